"""What a change of membership will take: bytes read from the folder, memory on every node, the pause of the commit.

Pure: sizes and free memory are given. Owns the arithmetic, the refusal of what does not fit, and the shape of a plan in
the API. Which expert goes where is `nobiru.elastic.planner`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nobiru.elastic.planner import MembershipPlan
from nobiru.machine import describe_bytes
from nobiru.parallel.placement import EMPTY

Role = Literal["stays", "joins", "leaves"]

# Before there is a measured pause. Planned changes of two to four ranks of a small model on two cores took 35 to 64 ms.
PRIOR_PAUSE_S = 0.05
# So many of the latest pauses count.
NUM_PAUSES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What a rank takes on its `node` (None: not known yet).

    `base_bytes` is all but experts and KV cache: other weights, interpreter, libraries. The cache of `kv_cache_bytes`
    is only occupied as it fills, on a CPU. `firm_cache_bytes` of it have to be there: all, if its size was asked for; a
    cache that was made from a share of the free memory needs room for one sequence. `resident_bytes` is what the rank
    occupies now, if that is known.
    """

    node: str | None
    base_bytes: int
    kv_cache_bytes: int
    firm_cache_bytes: int
    resident_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of one expert of one layer in a rank's memory and in the folder, and of everything else in the folder."""

    expert_bytes: int = 0
    stored_expert_bytes: int = 0
    stored_rest_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCounts:
    """Experts of all layers together, by rank: held `before`, to be `read`, held `after`."""

    before: Mapping[str, int]
    read: Mapping[str, int]
    after: Mapping[str, int]


NO_EXPERTS = ExpertCounts(before={}, read={}, after={})


def count_experts(held: Mapping[str, int], plan: MembershipPlan, members: Sequence[str]) -> ExpertCounts:
    """For the present ranks, which hold so many experts now, and the plan of the next `members`, in its order.

    The plan may be one of workers, as many for each member, with names such as "r0/1".
    """
    in_slots = (plan.placement.slots != EMPTY).sum((0, 2)).reshape(len(members), -1).sum(1).tolist()
    after = dict(zip(members, in_slots, strict=True))
    read = {rank: 0 if rank in held else after[rank] for rank in members}
    for worker, fills in plan.fills.items():
        if (rank := worker.partition("/")[0]) in held:
            read[rank] += len(fills)
    return ExpertCounts(before=dict(held), read=read, after=after)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankForecast:
    """`read_bytes` come from the folder; memory before the change, at its height, and when it is done."""

    role: Role
    node: str | None
    read_bytes: int
    before_bytes: int
    during_bytes: int
    after_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeForecast:
    """What the change needs beyond what is occupied, and what is there for it.

    `available_bytes` are the free ones, less what the caches of present ranks may still grow by where ranks are added.
    """

    num_new: int
    needed_bytes: int
    free_bytes: int
    available_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    ranks: Mapping[str, RankForecast]
    nodes: Mapping[str, NodeForecast]

    @property
    def bytes_to_read(self) -> int:
        return sum(rank.read_bytes for rank in self.ranks.values())

    @property
    def problem(self) -> str | None:
        """Why it cannot be done: what is needed where, and what is there."""
        for name, node in self.nodes.items():
            if node.needed_bytes > node.available_bytes:
                new = f"for {node.num_new} new rank{'s' if node.num_new > 1 else ''}" if node.num_new else "for experts"
                taken = node.free_bytes - node.available_bytes
                promised = f", of which the KV caches of the present ranks may take {describe_bytes(taken)}"
                return (
                    f"not enough memory on {name}: {describe_bytes(node.needed_bytes)} are needed {new}, and "
                    f"{describe_bytes(node.available_bytes)} are available "
                    f"({describe_bytes(node.free_bytes)} are free{promised if taken else ''})"
                )
        return None

    def document(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "bytes_to_read": self.bytes_to_read,
            "ranks": {
                name: {
                    "role": rank.role,
                    "node": rank.node,
                    "bytes_to_read": rank.read_bytes,
                    "memory_bytes": {
                        "before": rank.before_bytes,
                        "during": rank.during_bytes,
                        "after": rank.after_bytes,
                    },
                }
                for name, rank in self.ranks.items()
            },
            "nodes": {
                name: {
                    "needed_bytes": node.needed_bytes,
                    "available_bytes": node.available_bytes,
                    "free_bytes": node.free_bytes,
                }
                for name, node in self.nodes.items()
            },
        }


def forecast(
    present: Mapping[str, RankMemory],
    members: Sequence[str],
    *,
    newcomer: RankMemory,
    experts: ExpertCounts = NO_EXPERTS,
    sizes: Sizes,
    free_bytes: Mapping[str, int],
) -> Forecast:
    """For `present` ranks and the next `members`: who of these is not present is new, and like `newcomer`.

    `free_bytes` is what could be taken on each node now; others, and ranks whose node is not known, are not looked at.
    """
    ranks: dict[str, RankForecast] = {}
    for name in (*present, *(each for each in members if each not in present)):
        memory = present.get(name, newcomer)
        fixed = memory.base_bytes + memory.kv_cache_bytes
        before = fixed + experts.before.get(name, 0) * sizes.expert_bytes if name in present else 0
        after = fixed + experts.after.get(name, 0) * sizes.expert_bytes if name in members else 0
        num_read = experts.read.get(name, 0)
        rest = 0 if name in present else sizes.stored_rest_bytes
        ranks[name] = RankForecast(
            role="joins" if name not in present else "stays" if name in members else "leaves",
            node=memory.node,
            read_bytes=num_read * sizes.stored_expert_bytes + rest,
            before_bytes=before,
            during_bytes=before + num_read * sizes.expert_bytes if name in present else after,
            after_bytes=after,
        )
    soft_bytes = newcomer.kv_cache_bytes - newcomer.firm_cache_bytes
    nodes = {node: _on_node(node, ranks, present, free, soft_bytes) for node, free in free_bytes.items()}
    return Forecast(ranks=ranks, nodes=nodes)


def _on_node(
    node: str, ranks: Mapping[str, RankForecast], present: Mapping[str, RankMemory], free_bytes: int, soft_bytes: int
) -> NodeForecast:
    """`soft_bytes` of a new rank's memory may be missing."""
    here = {name: rank for name, rank in ranks.items() if rank.node == node}
    num_new = sum(rank.role == "joins" for rank in here.values())
    promised = 0
    for name, rank in here.items():
        resident = present[name].resident_bytes if name in present else None
        if num_new and resident is not None:
            promised += min(present[name].firm_cache_bytes, max(0, rank.before_bytes - resident))
    return NodeForecast(
        num_new=num_new,
        needed_bytes=sum(rank.during_bytes - rank.before_bytes for rank in here.values()) - num_new * soft_bytes,
        free_bytes=free_bytes,
        available_bytes=max(0, free_bytes - promised),
    )


def cache_of_newcomer(
    *, explicit_bytes: int | None, largest_present_bytes: int, least_bytes: int, share: float, free_bytes: int | None
) -> int:
    """Bytes of the KV cache that a new rank will make: what was asked for, else its `share` of the free memory, within
    one sequence of the greatest length and what the present ranks have."""
    if explicit_bytes is not None:
        return explicit_bytes
    if free_bytes is None:
        return largest_present_bytes
    return max(least_bytes, min(largest_present_bytes, int(share * free_bytes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedPause:
    """For how long ranks will stand still, from so many measured pauses; of none it is `PRIOR_PAUSE_S`."""

    seconds: float
    num_measured: int


def expect_pause(measured_s: Sequence[float]) -> ExpectedPause:
    """From the pauses of earlier planned changes, oldest first: the median of the latest ones.

    What a pause consists of, a step that ends, a message to every rank and back, and a first gather, depends on the
    machine and the model's step more than on how many ranks come or go.
    """
    latest = [pause for pause in measured_s if pause > 0][-NUM_PAUSES:]
    if not latest:
        return ExpectedPause(seconds=PRIOR_PAUSE_S, num_measured=0)
    return ExpectedPause(seconds=statistics.median(latest), num_measured=len(latest))
