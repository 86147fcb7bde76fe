"""A queue before ranks that take time to start, with the autoscaler's policy in charge of their number.

Fluid: requests are amounts of tokens, each rank serves so many a second, and the queue is one. What is simulated is
what the policy sees and does: the wait it is told, how busy ranks are, operations that take time and may be undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nobiru.config import AutoscaleConfig
from nobiru.elastic.autoscale import Decision, Observation, State, Usage, decide

TICK_S = 0.5
TRACES = Path(__file__).parent / "traces"


def trace(name: str) -> list[int]:
    """Requests that arrived in each second."""
    lines = (TRACES / f"{name}.txt").read_text().splitlines()
    return [int(count) for line in lines if not line.startswith("#") for count in line.split()]


@dataclass(kw_only=True)
class Run:
    """What happened: `changes` are (second, ranks before, ranks wanted) of what was begun, `sizes` one value a tick."""

    target_wait_s: float
    waits: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    changes: list[tuple[float, int, int]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    rank_s: float = 0.0
    num_served_tokens: float = 0.0

    @property
    def share_over_target(self) -> float:
        """Of all time."""
        return sum(wait > self.target_wait_s for wait in self.waits) / len(self.waits)

    @property
    def num_turns(self) -> int:
        """How often growing followed shrinking, or the other way round."""
        directions = [after > before for _, before, after in self.changes]
        return sum(one is not other for one, other in itertools.pairwise(directions))


def simulate(
    arrivals: Iterable[float],
    config: AutoscaleConfig | None,
    *,
    size: int = 1,
    rank_tokens_per_s: float = 2000.0,
    tokens_per_request: float = 100.0,
    start_s: float = 8.0,
    stop_s: float = 1.0,
    occupancy: Callable[[float, int], float] = lambda tokens_per_s, size: 0.0,
    is_undone: Callable[[int], bool] = lambda number: False,
    target_wait_s: float = 2.0,
) -> Run:
    """`arrivals` are requests in each second. Without `config` the number of ranks stays at `size`.

    A rank takes `start_s` until it serves, and counts as rank time from its launch on. Shrinking takes `stop_s`.
    """
    run = Run(target_wait_s=config.target_wait_s if config else target_wait_s)
    state, queue, compute_s, now_s = State(), 0.0, 0.0, 0.0
    wanted, ends_s, served = size, 0.0, 0.0
    for arrived in arrivals:
        for _ in range(round(1 / TICK_S)):
            queue += arrived * tokens_per_request * TICK_S
            served = min(queue, size * rank_tokens_per_s * TICK_S)
            queue -= served
            run.num_served_tokens += served
            compute_s += served / rank_tokens_per_s
            now_s += TICK_S
            if wanted != size and now_s >= ends_s:
                size = size if is_undone(len(run.changes)) else wanted
                wanted = size
            run.rank_s += max(size, wanted) * TICK_S
            run.waits.append(queue / rank_tokens_per_s / size)
            run.sizes.append(size)
            if config is None:
                continue
            ranks = Usage(
                size=size,
                is_changing=wanted != size,
                num_served_tokens=int(run.num_served_tokens),
                compute_s=compute_s,
                occupancy=occupancy(served / TICK_S, size),
            )
            state, decision = decide(config, state, Observation(now_s=now_s, wait_s=run.waits[-1], ranks=ranks))
            run.decisions.append(decision)
            if decision.action != "hold" and not config.dry_run:
                run.changes.append((now_s, size, decision.size))
                wanted, ends_s = decision.size, now_s + (start_s if decision.size > size else stop_s)
    return run


def steady(requests_per_s: float, seconds: int) -> Sequence[float]:
    return [requests_per_s] * seconds
