"""Load a server for a while, kill its rank on the way if asked to, and watch what its processes hold.

Starts `nobiru serve MODEL`, keeps `--clients` closed-loop clients busy (or runs the command after `--`, with `{url}`
replaced), and samples the resident memory and descriptors of all processes of the server. Checks:

* no request failed (or the command ended with 0),
* every text always had the same vector,
* the 99th percentile of latency is at most 2 x clients / (texts/s),
* memory grew by at most `--max-growth-mib` after the first ten seconds,
* on SIGTERM the server ended by itself with exit code 0.

    python benchmarks/soak.py MODEL --clients 256 --duration-s 60
    python benchmarks/soak.py MODEL --clients 256 --duration-s 60 --kill-every-s 10
    python benchmarks/soak.py MODEL -- python load.py --url {url} --concurrency 256 --duration 60

The last line of output is JSON. Exit code 0 when every check held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

WARM_S = 10.0
SAMPLE_S = 0.5
TOLERANCE = 0.999


@dataclass
class Samples:
    """Resident bytes and open descriptors of the server's processes, by seconds since the load began."""

    times_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    num_fds: list[int] = field(default_factory=list)
    kills_s: list[float] = field(default_factory=list)

    def growth_mib(self) -> float | None:
        """Largest memory after the first ten seconds above that at ten seconds; None for a shorter run."""
        late = [rss for at_s, rss in zip(self.times_s, self.rss_bytes, strict=True) if at_s >= WARM_S]
        return (max(late) - late[0]) / 2**20 if late else None


def processes_of(root: int) -> list[int]:
    """`root` and its living descendants, from /proc."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending.extend(child for child, parent in parents.items() if parent == pid)
    return found


def sample(samples: Samples, root: int, started_s: float) -> None:
    rss = fds = 0
    for pid in processes_of(root):
        try:
            rss += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            fds += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue  # it ended while we looked
    samples.times_s.append(time.monotonic() - started_s)
    samples.rss_bytes.append(rss)
    samples.num_fds.append(fds)


def rank_pids(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/elastic/status", timeout=10) as answer:
        return [rank["pid"] for rank in json.load(answer)["ranks"] if rank["state"] == "serving"]


def watch(samples: Samples, root: int, url: str, kill_every_s: float | None, stop: threading.Event) -> None:
    """Sample twice a second and kill the rank on schedule, until told to stop."""
    started_s = time.monotonic()
    next_kill_s = kill_every_s or float("inf")
    while not stop.wait(SAMPLE_S):
        sample(samples, root, started_s)
        if time.monotonic() - started_s >= next_kill_s:
            next_kill_s += kill_every_s or 0
            for pid in rank_pids(url):
                os.kill(pid, signal.SIGKILL)
                samples.kills_s.append(round(time.monotonic() - started_s, 1))


def make_texts(count: int) -> list[str]:
    """Texts of lognormal length over a small vocabulary; the same in every run."""
    rng = random.Random(0)
    words = [
        f"{first}{second}" for first in ("stone", "river", "market", "engine") for second in ("s", "", "ed", "ing")
    ]
    lengths = [int(min(150, max(3, rng.lognormvariate(3.6, 0.8)))) for _ in range(count)]
    return [" ".join(rng.choice(words) for _ in range(length)) for length in lengths]


async def load(url: str, num_clients: int, duration_s: float) -> dict[str, Any]:
    """Closed-loop clients, one text a request; every text's vectors are compared with its first."""
    texts = make_texts(1000)
    latencies_s: list[float] = []
    failures: list[str] = []
    first: dict[str, np.ndarray] = {}
    issued = 0
    ends_s = time.monotonic() + duration_s

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal issued
        while time.monotonic() < ends_s:
            text, issued = texts[issued % len(texts)], issued + 1
            began_s = time.monotonic()
            body = {"input": text, "truncate_prompt_tokens": -1}
            try:
                async with session.post(f"{url}/v1/embeddings", json=body) as answer:
                    content = await answer.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                failures.append(repr(error))
                continue
            latencies_s.append(time.monotonic() - began_s)
            if answer.status != 200:
                failures.append(f"{answer.status}: {content}")
                continue
            vector = np.array(content["data"][0]["embedding"], dtype=np.float32)
            before = first.setdefault(text, vector)
            cosine = before @ vector / np.linalg.norm(before) / np.linalg.norm(vector)
            if cosine < TOLERANCE:
                failures.append(f"cosine {cosine:.5f} between two vectors of one text")

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
    started_s = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        await asyncio.gather(*(client(session) for _ in range(num_clients)))
    elapsed_s = time.monotonic() - started_s
    texts_per_s = len(latencies_s) / elapsed_s
    return {
        "requests": issued,
        "failed": len(failures),
        "first_failures": failures[:3],
        "texts_per_s": texts_per_s,
        "latency_p50_s": float(np.percentile(latencies_s, 50)),
        "latency_p99_s": float(np.percentile(latencies_s, 99)),
        "latency_p99_bound_s": 2 * num_clients / texts_per_s,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(url: str, server: subprocess.Popen[bytes], timeout_s: float = 120) -> float:
    started_s = time.monotonic()
    while time.monotonic() - started_s < timeout_s:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return time.monotonic() - started_s
        except OSError:
            time.sleep(0.05)
    sys.exit(f"the server was not ready within {timeout_s:g} s")


def run_command(command: list[str], url: str) -> dict[str, Any]:
    done = subprocess.run([part.replace("{url}", url) for part in command], check=False)
    return {"command": command, "failed": done.returncode}


def run(args: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "nobiru", "serve", args.model, "--port", str(port), *args.server_arg]
    server = subprocess.Popen(command)
    samples, stop = Samples(), threading.Event()
    watcher = threading.Thread(target=watch, args=(samples, server.pid, url, args.kill_every_s, stop))
    try:
        ready_s = wait_ready(url, server)
        watcher.start()
        result = (
            run_command(args.command, url) if args.command else asyncio.run(load(url, args.clients, args.duration_s))
        )
    finally:
        stop.set()
        if watcher.ident is not None:
            watcher.join()
        server.terminate()
        try:
            exit_code: int | str = server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            exit_code = "had to be killed"
    growth_mib = samples.growth_mib()
    checks = {
        "no request failed": result["failed"] == 0,
        "memory": growth_mib is None or growth_mib <= args.max_growth_mib,
        "ended by itself": exit_code == 0,
    }
    if "latency_p99_bound_s" in result and not args.kill_every_s:
        checks["p99"] = result["latency_p99_s"] <= result["latency_p99_bound_s"]
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "ready_s": round(ready_s, 2),
        **result,
        "rss_mib_at_start": round(samples.rss_bytes[0] / 2**20) if samples.rss_bytes else None,
        "rss_mib_max": round(max(samples.rss_bytes, default=0) / 2**20),
        "rss_growth_mib_after_10_s": None if growth_mib is None else round(growth_mib, 1),
        "fds_max": max(samples.num_fds, default=0),
        "kills_at_s": samples.kills_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--duration-s", type=float, default=60)
    parser.add_argument("--kill-every-s", type=float, help="SIGKILL the rank this often")
    parser.add_argument("--max-growth-mib", type=float, default=64)
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument of nobiru serve; repeat")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:split])
    args.command = arguments[split + 1 :]  # a load command instead of the built-in clients
    result = run(args)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
