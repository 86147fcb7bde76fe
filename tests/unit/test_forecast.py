"""What a change of membership takes, for any ranks, experts and memory; and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.elastic.forecast import (
    NUM_PAUSES,
    PRIOR_PAUSE_S,
    Forecast,
    RankMemory,
    Sizes,
    cache_of_newcomer,
    count_experts,
    expect_pause,
    forecast,
)
from nobiru.elastic.planner import plan_membership

SIZES = Sizes(expert_bytes=1000, stored_expert_bytes=500, stored_rest_bytes=7000)
NUM_LAYERS, NUM_EXPERTS = 2, 6


def memory(resident: int | None = None, node: str | None = "a") -> RankMemory:
    return RankMemory(node=node, base_bytes=10_000, kv_cache_bytes=4000, firm_cache_bytes=4000, resident_bytes=resident)


def change(before: list[str], after: list[str], free: int, resident: int | None = None) -> Forecast:
    """Of expert-parallel ranks on one node."""
    first = plan_membership({}, before, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, slot_capacity=NUM_EXPERTS)
    held = {rank: first.placement.slots[:, place] for place, rank in enumerate(before)}
    plan = plan_membership(
        {rank: held[rank] for rank in before if rank in after},
        after,
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        slot_capacity=NUM_EXPERTS,
    )
    return forecast(
        dict.fromkeys(before, memory(resident)),
        after,
        newcomer=memory(),
        experts=count_experts({rank: int((slots >= 0).sum()) for rank, slots in held.items()}, plan, after),
        sizes=SIZES,
        free_bytes={"a": free},
    )


@st.composite
def memberships(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    before = [f"r{number}" for number in range(draw(st.integers(1, 4)))]
    stay = [rank for rank in before if draw(st.booleans())]
    new = [f"new-{number}" for number in range(draw(st.integers(0 if stay else 1, 3)))]
    return before, [*stay, *new]


@settings(max_examples=200, deadline=None)
@given(memberships(), st.integers(0, 200_000), st.integers(0, 30_000))
def test_memory_follows_the_experts(members: tuple[list[str], list[str]], free: int, resident: int) -> None:
    before, after = members
    found = change(before, after, free, resident)
    assert set(found.ranks) == {*before, *after}
    for name, rank in found.ranks.items():
        assert rank.role == ("joins" if name not in before else "stays" if name in after else "leaves")
        assert rank.during_bytes >= max(rank.before_bytes, rank.after_bytes), "old and new experts lie side by side"
        assert (rank.before_bytes == 0) == (rank.role == "joins")
        assert (rank.after_bytes == 0) == (rank.role == "leaves")
        num_read, rest = divmod(rank.read_bytes - (7000 if rank.role == "joins" else 0), 500)
        assert rest == 0
        assert rank.during_bytes - rank.before_bytes == num_read * 1000 + (14_000 if rank.role == "joins" else 0)
    held = sum(rank.after_bytes - 14_000 for name, rank in found.ranks.items() if name in after)
    assert held == NUM_LAYERS * NUM_EXPERTS * 1000, "every expert has a place afterwards"
    node = found.nodes["a"]
    assert node.needed_bytes == sum(rank.during_bytes - rank.before_bytes for rank in found.ranks.values())
    assert 0 <= node.available_bytes <= node.free_bytes == free
    assert (found.problem is not None) == (node.needed_bytes > node.available_bytes)


@settings(max_examples=200, deadline=None)
@given(memberships(), st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 30_000))
def test_more_memory_never_hurts(members: tuple[list[str], list[str]], free: int, more: int, resident: int) -> None:
    if change(*members, free, resident).problem is None:
        assert change(*members, free + more, resident).problem is None
        assert change(*members, free + more, resident + more).problem is None, "what is occupied is not promised twice"
    if set(members[1]) <= set(members[0]):
        assert change(*members, 12_000, resident).problem is None, "who stays needs room for experts only"


def test_a_refusal_names_what_is_needed_and_what_is_there() -> None:
    gib = 2**30
    cache = {"kv_cache_bytes": 4 * gib, "firm_cache_bytes": 4 * gib}
    ranks = {"r0": RankMemory(node="10.0.0.1", base_bytes=3 * gib, resident_bytes=4 * gib, **cache)}
    new = RankMemory(node="10.0.0.1", base_bytes=3 * gib, kv_cache_bytes=2 * gib, firm_cache_bytes=2 * gib)
    found = forecast(
        ranks, ["r0", "new-0", "new-1"], newcomer=new, sizes=Sizes(), free_bytes={"10.0.0.1": 12 * gib, "10.0.0.2": 0}
    )
    assert found.problem == (
        "not enough memory on 10.0.0.1: 10.00 GiB are needed for 2 new ranks, and 9.00 GiB are available "
        "(12.00 GiB are free, of which the KV caches of the present ranks may take 3.00 GiB)"
    )
    assert found.document()["nodes"]["10.0.0.1"] == {
        "needed_bytes": 10 * gib,
        "available_bytes": 9 * gib,
        "free_bytes": 12 * gib,
    }
    one = forecast(ranks, ["r0", "new-0"], newcomer=new, sizes=Sizes(), free_bytes={"10.0.0.1": 12 * gib})
    assert one.problem is None


def test_a_cache_from_a_share_of_what_is_free_needs_room_for_one_sequence() -> None:
    new = RankMemory(node="a", base_bytes=10_000, kv_cache_bytes=9_000, firm_cache_bytes=500)
    found = forecast({}, ["new-0"], newcomer=new, sizes=SIZES, free_bytes={"a": 17_499})
    assert found.ranks["new-0"].after_bytes == 19_000
    assert (found.nodes["a"].needed_bytes, found.problem) == (10_500, None)
    assert forecast({}, ["new-0"], newcomer=new, sizes=SIZES, free_bytes={"a": 10_499}).problem is not None


def test_a_node_that_is_not_known_is_not_looked_at() -> None:
    new = memory(node=None)
    found = forecast({"r0": memory()}, ["r0", "new-0"], newcomer=new, sizes=SIZES, free_bytes={"a": 0})
    assert found.problem is None
    assert found.ranks["new-0"].during_bytes == 14_000


@pytest.mark.parametrize(
    ("explicit", "free", "expected"), [(5000, 10, 5000), (None, None, 900), (None, 2000, 500), (None, 20, 100)]
)
def test_the_cache_of_a_new_rank(explicit: int | None, free: int | None, expected: int) -> None:
    found = cache_of_newcomer(
        explicit_bytes=explicit, largest_present_bytes=900, least_bytes=100, share=0.25, free_bytes=free
    )
    assert found == expected


def test_the_pause_is_the_median_of_the_latest() -> None:
    assert expect_pause([]).seconds == expect_pause([0.0]).seconds == PRIOR_PAUSE_S
    assert expect_pause([0.0]).num_measured == 0
    found = expect_pause([0.1, 0.0, 0.3, 0.2])
    assert (found.seconds, found.num_measured) == (0.2, 3)
    many = expect_pause([9.0] * 50 + [1.0] * NUM_PAUSES)
    assert (many.seconds, many.num_measured) == (1.0, NUM_PAUSES)
