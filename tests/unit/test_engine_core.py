"""The step loop, plain and pipelined: the same results, and nothing lost when a step fails."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from nobiru.config import SchedulerConfig
from nobiru.engine.core import EngineCore
from nobiru.engine.sequences import generation_sequence
from nobiru.errors import InferenceError
from nobiru.generation import CausalInput, SampledToken, SamplingParams
from nobiru.kv.blocks import BlockPool
from nobiru.runner.executor import Executor
from nobiru.scheduler import Plan, Scheduler

POISON = 13
FATAL = 14


class Model:
    """The next token is a function of all tokens, which are read back from the cache."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], int] = {}

    def run(self, inputs: Sequence[CausalInput]) -> list[SampledToken | None]:
        return [self._run(each) for each in inputs]

    def _run(self, each: CausalInput) -> SampledToken | None:
        if POISON in each.token_ids:
            raise ValueError("poison")
        if FATAL in each.token_ids:
            raise MemoryError("the device is gone")
        end = each.start + each.token_ids.size
        places = [(int(each.block_ids[p // self._block_size]), p % self._block_size) for p in range(end)]
        for place, token in zip(places[each.start :], each.token_ids.tolist(), strict=True):
            self._slots[place] = token
        if each.sample is None:
            return None
        return SampledToken(zlib.crc32(bytes(self._slots[place] for place in places)) % 11)


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def make_core(
    worker: ThreadPoolExecutor | None, *, num_blocks: int = 40, plans: list[Plan] | None = None
) -> tuple[EngineCore, BlockPool]:
    pool = BlockPool(num_blocks, 4)
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=6)
    executor = Executor(Model(4), is_fatal=lambda error: isinstance(error, MemoryError))
    seen = [] if plans is None else plans
    return EngineCore(Scheduler(config, pool), executor, on_plan=seen.append, worker=worker), pool


def add(core: EngineCore, seq_id: int, prompt: list[int], max_tokens: int = 20, min_tokens: int = 0) -> None:
    sequence = generation_sequence(
        SamplingParams(seed=0, min_tokens=min_tokens),
        child=0,
        prompt=prompt,
        max_tokens=max_tokens,
        stop_token_ids=[0],
        seq_id=seq_id,
        arrival=seq_id,
        arrival_s=0.0,
    )
    core.add([sequence])


def run(core: EngineCore) -> dict[int, list[int | str]]:
    """All texts, with how they ended."""
    texts: dict[int, list[int | str]] = {}
    while core.has_work:
        output = core.step()
        assert output is not None
        for sequence, outcome in zip(output.sequences, output.outcomes, strict=True):
            text = texts.setdefault(sequence.seq_id, [])
            if isinstance(outcome, SampledToken):
                text.append(outcome.token_id)
                assert sequence.causal is not None
                if sequence.causal.finish_reason is not None:
                    text.append(sequence.causal.finish_reason)
            else:
                text.append(type(outcome).__name__)
    return texts


@pytest.mark.parametrize("num_blocks", [40, 9])
def test_the_pipelined_loop_gives_what_the_plain_one_gives(worker: ThreadPoolExecutor, num_blocks: int) -> None:
    results = []
    for thread in (None, worker):
        core, pool = make_core(thread, num_blocks=num_blocks)
        for number in range(12):
            add(core, number, [number % 10 + 1] * (number + 1))
        results.append(run(core))
        assert pool.num_free == num_blocks
        assert not core.is_executing
    assert results[0] == results[1]
    assert len(results[0]) == 12


def test_the_next_step_is_planned_while_one_runs(worker: ThreadPoolExecutor) -> None:
    core, _ = make_core(worker)
    add(core, 1, [1, 2, 3], max_tokens=5, min_tokens=5)
    core.step()
    assert core.is_executing


def test_a_sequence_that_fails_harms_no_other(worker: ThreadPoolExecutor) -> None:
    plain, _ = make_core(None)
    add(plain, 1, [1, 2, 3])
    expected = run(plain)
    for thread in (None, worker):
        core, pool = make_core(thread)
        add(core, 1, [1, 2, 3])
        add(core, 2, [1, POISON, 3])
        texts = run(core)
        assert texts.pop(2) == [InferenceError.__name__]
        assert pool.num_free == pool.num_blocks
        assert texts == expected


def test_a_step_that_does_not_happen_is_undone(worker: ThreadPoolExecutor) -> None:
    for thread in (None, worker):
        core, pool = make_core(thread)
        add(core, 1, [1, 2, 3], min_tokens=20)
        first = core.step()
        assert first is not None
        add(core, 2, [4, FATAL])
        with pytest.raises(MemoryError):
            run(core)
        core.abort([2])
        text = run(core)[1]
        assert pool.num_free == pool.num_blocks
        plain, _ = make_core(None)
        add(plain, 1, [1, 2, 3], min_tokens=20)
        whole = run(plain)[1]
        assert text == whole[len(whole) - len(text) :], "the text goes on where it was"
        assert len(text) >= len(whole) - 2


def test_an_abort_frees_blocks_within_a_step(worker: ThreadPoolExecutor) -> None:
    for thread in (None, worker):
        core, pool = make_core(thread)
        add(core, 1, [1] * 9)
        add(core, 2, [2] * 9)
        core.step()
        core.abort([1, 2])
        core.step()
        assert pool.num_free == pool.num_blocks
        assert not core.has_work


def test_every_executed_plan_is_noted_before(worker: ThreadPoolExecutor) -> None:
    for thread in (None, worker):
        plans: list[Plan] = []
        core, _ = make_core(thread, plans=plans)
        add(core, 1, [1, 2, 3], max_tokens=4)
        text = run(core)[1]
        assert len(plans) == len(text) - 1
