"""What it costs a step that its experts are spread over ranks: the control all-gather, dispatch and combine.

    python -m benchmarks.expert_cost MODEL_FOLDER [--ranks 1,2,4] [--streams 8] [--steps 60] [--dtype bfloat16]

For each number of ranks as many processes load the model as `nobiru serve --enable-expert-parallel` would, form an
epoch, and decode together: all have `--streams` texts, so no step is idle anywhere. Each step's gather, dispatches and
combines are timed in the step, where they include waiting for whichever rank is late, and then *alone*: those of the
last step again and again, with nothing computed between them. A rank's resident memory is what it has for itself, so
without the files of its program. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from nobiru import SamplingParams, machine
from nobiru.config import EngineConfig
from nobiru.engine.build import build_engine
from nobiru.engine.core import EngineCore
from nobiru.engine.expert_member import ExpertMember
from nobiru.engine.limits import SERVER_TOKEN_BUDGET
from nobiru.engine.messages import Form
from nobiru.engine.rank_spec import Place
from nobiru.engine.sequences import generation_sequence
from nobiru.engine.shares import first_placement
from nobiru.layers.moe import Dispatched, Dispatcher
from nobiru.parallel.placement import Placement
from nobiru.runner.causal import CausalRunner
from nobiru.scheduler import Plan, Sequence

DEADLINE_S = 170.0
WARM_UP_STEPS = 8
ATTEMPT = 1
PROMPT_TOKENS = 32
RESIDENT = "resident MiB"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each rank does; its texts are of random tokens."""

    model: str
    dtype: str
    num_ranks: int
    num_streams: int
    num_steps: int
    store_port: int

    @property
    def num_threads(self) -> int:
        return max(1, machine.default_num_threads() // self.num_ranks)


class Timed:
    """A dispatcher whose time is added up in `seconds`, and which keeps what each layer gave it last."""

    is_reentrant = False

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self._weight_TK = torch.empty(0)
        self.seconds = 0.0

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        started_s = time.perf_counter()
        dispatched = self._dispatcher.dispatch(layer, x_TC, expert_TK)
        self.seconds += time.perf_counter() - started_s
        self._tokens[layer] = (x_TC, expert_TK)
        return dispatched

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        started_s = time.perf_counter()
        combined = self._dispatcher.combine(y_NC, dispatched, weight_TK)
        self.seconds += time.perf_counter() - started_s
        self._weight_TK = weight_TK
        return combined

    def again(self) -> None:
        """The exchanges of the last step, of experts that do nothing."""
        for layer, (x_TC, expert_TK) in self._tokens.items():
            dispatched = self.dispatch(layer, x_TC, expert_TK)
            self.combine(dispatched.rows_NC, dispatched, self._weight_TK)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def run_rank(work: Work, position: int) -> dict[str, float]:
    """Medians over the steps of one rank, in ms, and its resident memory."""
    config = EngineConfig(
        model=work.model,
        dtype=work.dtype,
        device="cpu",
        num_threads=work.num_threads,
        data_parallel_size=work.num_ranks,
        enable_expert_parallel=True,
        kv_cache_memory_bytes=200_000_000,
    )
    engine = build_engine(config, default_budget=SERVER_TOKEN_BUDGET, place=Place(position=position))
    assert isinstance(engine.runner, CausalRunner) and engine.runner.moe is not None and engine.member is not None
    moe, member = engine.runner.moe, engine.member
    member.prepare(_form(first_placement(config, moe.num_layers, moe.num_experts), work, position))
    while (formed := member.take_prepared()) is None:
        time.sleep(0.01)
    assert formed.error is None, formed.error
    member.begin(ATTEMPT)
    assert moe.dispatcher is not None
    timed = moe.dispatcher = Timed(moe.dispatcher)
    engine.core.add(_texts(work, position, engine.folder.vocab_size))
    with torch.inference_mode():
        times = {**_decode(engine.core, member, timed, work), **_exchange(engine.core, member, timed, work)}
    member.leave()
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    return {**medians, RESIDENT: _resident_bytes() / 2**20}


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def _form(placement: Placement, work: Work, position: int) -> Form:
    slots = placement.slots
    return Form(
        attempt=ATTEMPT,
        epoch=1,
        position=position,
        size=work.num_ranks,
        store_host="127.0.0.1",
        store_port=work.store_port,
        version=0,
        shape=(slots.shape[0], slots.shape[1], slots.shape[2]),
        slots=slots.astype("<i4").tobytes(),
    )


def _texts(work: Work, position: int, vocab_size: int) -> list[Sequence]:
    chance = np.random.default_rng(position)
    max_tokens = WARM_UP_STEPS + 3 * work.num_steps
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=1)
    return [
        generation_sequence(
            params,
            child=0,
            prompt=chance.integers(100, vocab_size, PROMPT_TOKENS).tolist(),
            max_tokens=max_tokens,
            stop_token_ids=(),
            seq_id=number,
            arrival=number,
            arrival_s=time.monotonic(),
        )
        for number in range(work.num_streams)
    ]


Times = dict[str, list[float]]


def _decode(core: EngineCore, member: ExpertMember, timed: Timed, work: Work) -> Times:
    """Steps of all ranks together; the first ones, which compute the prompts, do not count."""
    times: Times = {"step": [], "gather": [], "exchanges": []}
    for number in range(WARM_UP_STEPS + work.num_steps):
        started_s = time.perf_counter()
        plan = core.plan()
        assert plan is not None, "every rank has work in every step"
        gather_s = _gather(member, plan)
        core.run(plan)
        took = {"step": time.perf_counter() - started_s, "gather": gather_s, "exchanges": timed.take()}
        member.take_loads()
        if number >= WARM_UP_STEPS:
            assert plan.num_tokens == work.num_streams, "a token for each text"
            for name, seconds in took.items():
                times[name].append(seconds)
    return times


def _exchange(core: EngineCore, member: ExpertMember, timed: Timed, work: Work) -> Times:
    times: Times = {"gather alone": [], "exchanges alone": []}
    plan = core.plan()
    assert plan is not None
    for _ in range(work.num_steps):
        times["gather alone"].append(_gather(member, plan))
        timed.again()
        times["exchanges alone"].append(timed.take())
    core.scheduler.abandon(plan)
    return times


def _gather(member: ExpertMember, plan: Plan) -> float:
    started_s = time.perf_counter()
    member.gather(plan)
    return time.perf_counter() - started_s


def measure(options: argparse.Namespace, num_ranks: int) -> dict[str, float]:
    """The mean over the ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    work = Work(
        model=str(options.model),
        dtype=options.dtype,
        num_ranks=num_ranks,
        num_streams=options.streams,
        num_steps=options.steps,
        store_port=store.port,
    )
    with ProcessPoolExecutor(num_ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_rank, work, position) for position in range(num_ranks)]
        found = [future.result(timeout=DEADLINE_S) for future in futures]
    return {"ranks": num_ranks, **{name: round(statistics.mean(each[name] for each in found), 3) for name in found[0]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--streams", type=int, default=8, help="texts that each rank decodes")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    table = Table(
        title=f"{options.model.name}, {options.dtype}, {options.streams} texts a rank; ms a step (share of it)"
    )
    results = []
    for num_ranks in map(int, options.ranks.split(",")):
        found = measure(options, num_ranks)
        results.append(found)
        if not table.columns:
            for name in found:
                table.add_column(name, justify="right")
        step = found["step"]
        shares = [name for name in found if name not in ("ranks", "step", RESIDENT)]
        cells = [f"{found[name]:.2f} ({found[name] / step:.1%})" for name in shares]
        table.add_row(str(num_ranks), f"{step:.2f}", *cells, f"{found[RESIDENT]:.0f}")
    Console().print(table)
    print(json.dumps({"model": options.model.name, "dtype": options.dtype, "results": results}))


if __name__ == "__main__":
    main()
