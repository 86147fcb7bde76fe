"""Signs of life over a connection: what a rank has told survives it, and a rank without a server ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from functools import partial

from nobiru.engine.heart import GRACE_S, LEASE_EXIT_CODE, Hearts

RANK = """
import os, signal, sys, time
from nobiru.engine import heart
heart.FIRST_LEASE_S = 0.0
rank = heart.Heart(sys.argv[1], sys.argv[2], lease_s=1.0)
rank.start()
for numbers in sys.argv[3:]:
    rank.step_begins([int(number) for number in numbers.split()])
if sys.argv[3:]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def start_rank(address: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RANK, address, *arguments])


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), 20)


def test_what_a_rank_tells_survives_its_death_in_the_same_moment() -> None:
    async def main() -> None:
        hearts, lost = Hearts("127.0.0.1"), []
        await hearts.start()
        for number in range(5):
            recorder = hearts.expect(f"r{number}", partial(lost.append, number))
            before_s = time.monotonic()
            assert await ended(start_rank(hearts.address, f"r{number}", "1 2 3", "", f"{2**40} {number}")) == -9
            await asyncio.sleep(0.05)
            assert recorder.seq_ids == [2**40, number]
            assert recorder.heartbeat_s > before_s
        await asyncio.sleep(2 * GRACE_S)
        assert lost == [0, 1, 2, 3, 4]
        await hearts.close()

    asyncio.run(main())


def test_a_rank_lives_while_the_server_wants_it() -> None:
    async def main() -> None:
        hearts, lost = Hearts("127.0.0.1"), []
        recorder = hearts.expect("r0", partial(lost.append, "r0"))
        rank = start_rank(hearts.address, "r0")  # before anybody hears it
        await hearts.start()
        await asyncio.sleep(2.0)
        assert rank.poll() is None
        assert time.monotonic() - recorder.heartbeat_s < 1.0
        recorder.close()
        assert await ended(rank) == LEASE_EXIT_CODE
        await asyncio.sleep(2 * GRACE_S)
        assert not lost  # it was sent away
        await hearts.close()

    asyncio.run(main())


def test_a_rank_that_nobody_expects_or_answers_ends() -> None:
    async def main() -> None:
        hearts = Hearts("127.0.0.1")
        silent = start_rank(hearts.address, "r0")  # accepted by the kernel, and never answered
        assert await ended(silent) == LEASE_EXIT_CODE
        await hearts.start()
        assert await ended(start_rank(hearts.address, "r9")) == LEASE_EXIT_CODE
        leaving = start_rank(hearts.address, "r1")
        hearts.expect("r1", lambda: None)
        await asyncio.sleep(0.5)
        await hearts.close()
        assert await ended(leaving) == LEASE_EXIT_CODE

    asyncio.run(main())
