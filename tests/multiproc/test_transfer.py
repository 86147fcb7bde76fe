"""Experts' weights on their way between real processes: right, not too fast, and no danger to those who serve."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import Member, run_ranks
from torch import Tensor

from nobiru.errors import GroupError
from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.moe import Experts
from nobiru.parallel.balancer import stages
from nobiru.parallel.placement import EMPTY, Move, Placement, initial_placement, moves
from nobiru.parallel.transfer import Transfer, TransferError, rounds

SLOT_BYTES = 5000


class Bytes:
    """Slots of plain bytes; those of logical expert e are drawn with e as the seed."""

    def __init__(self, layer: int, slots_S: list[int], num_bytes: int = SLOT_BYTES, layout_id: str = "plain") -> None:
        self.layout_id = layout_id
        self.slots = torch.zeros(len(slots_S), num_bytes, dtype=torch.uint8)
        for slot, expert in enumerate(slots_S):
            if expert != EMPTY:
                self.slots[slot] = weights(layer, expert, num_bytes)

    def memory(self, slot: int) -> Tensor:
        return self.slots[slot]

    def checksum(self, slot: int) -> str:
        return hashlib.blake2b(self.slots[slot].numpy().tobytes(), digest_size=16).hexdigest()


def weights(layer: int, expert: int, num_bytes: int = SLOT_BYTES) -> Tensor:
    random = np.random.default_rng([layer, expert])
    return torch.from_numpy(random.integers(0, 256, size=num_bytes, dtype=np.uint8))


def move(from_rank: int, to_rank: int, *, expert: int = 0, from_slot: int = 0, to_slot: int = 1) -> Move:
    return Move(layer=0, expert=expert, from_rank=from_rank, from_slot=from_slot, to_rank=to_rank, to_slot=to_slot)


def spread(num_ranks: int) -> Placement:
    return initial_placement(num_layers=2, num_experts=6, num_ranks=num_ranks, slot_capacity=7)


def follow_stages(member: Member) -> None:
    """From one placement to another; what serves is right at every moment."""
    first = spread(member.size)
    slots = np.random.default_rng(3).permuted(first.slots.reshape(2, -1), axis=1).reshape(first.slots.shape)
    target = Placement(slots=slots, num_experts=6)
    banks = [Bytes(layer, first.slots[layer, member.rank].tolist()) for layer in range(2)]
    transfer = Transfer(member.group(), banks, chunk_bytes=999)
    for stage in stages(first, target, max_moves=3):
        checksums = transfer.run(stage.moves)
        mine = [each for each in stage.moves if each.to_rank == member.rank]
        assert checksums == {(each.layer, each.to_slot): banks[each.layer].checksum(each.to_slot) for each in mine}
        for layer, bank in enumerate(banks):
            for slot, expert in enumerate(stage.after.slots[layer, member.rank].tolist()):
                if expert != EMPTY:
                    assert torch.equal(bank.memory(slot), weights(layer, expert))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stages_move_the_right_weights(size: int) -> None:
    run_ranks(follow_stages, size)


def all_to_everybody(member: Member) -> None:
    """Every rank gets every expert at once."""
    first = spread(member.size)
    everything = np.broadcast_to([*range(6), EMPTY], first.slots.shape)
    target = Placement(slots=everything, num_experts=6)
    banks = [Bytes(layer, first.slots[layer, member.rank].tolist()) for layer in range(2)]
    found = [each for each in moves(first, target) if first.slots[each.layer, each.to_rank, each.to_slot] == EMPTY]
    Transfer(member.group(), banks).run(found)
    for each in found:
        if each.to_rank == member.rank:
            assert torch.equal(banks[each.layer].memory(each.to_slot), weights(each.layer, each.expert))


def test_many_moves_at_once() -> None:
    run_ranks(all_to_everybody, 3)


def move_an_expert(member: Member) -> list[float]:
    experts = Experts(
        num_slots=2,
        hidden_size=16,
        intermediate_size=32,
        activation=ACTIVATIONS["silu"],
        compute=torch.float32,
        stored=torch.float32,
        device=torch.device("cpu"),
    )
    if member.rank == 0:
        generator = torch.Generator().manual_seed(1)
        experts.write(0, torch.randn(64, 16, generator=generator), torch.randn(16, 32, generator=generator))
    Transfer(member.group(), [experts]).run([move(0, 1)])
    rows_NC = torch.linspace(-1, 1, 48).view(3, 16)
    return experts.compute(rows_NC, [3, 0] if member.rank == 0 else [0, 3]).flatten().tolist()


def test_a_moved_expert_computes_the_same() -> None:
    here, there = run_ranks(move_an_expert, 2)
    assert here == there
    assert any(here)


def refuse(member: Member, make: Callable[[int], tuple[Bytes, list[Move]]], message: str) -> None:
    bank, todo = make(member.rank)
    with pytest.raises(TransferError, match=message):
        Transfer(member.group(), [bank]).run(todo)


class Damaging(Bytes):
    """Says another checksum than its bytes have."""

    def checksum(self, slot: int) -> str:
        return super().checksum(slot)[::-1]


def damaged(rank: int) -> tuple[Bytes, list[Move]]:
    return (Damaging if rank == 0 else Bytes)(0, [rank, EMPTY]), [move(0, 1)]


def other_layouts(rank: int) -> tuple[Bytes, list[Move]]:
    return Bytes(0, [rank, EMPTY], layout_id=f"packed-{rank // 2}"), [move(0, 1)]


def other_moves(rank: int) -> tuple[Bytes, list[Move]]:
    return Bytes(0, [rank, EMPTY]), [move(0, 1)] if rank else [move(1, 0)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (damaged, r"damaged on ranks \[1\]"),
        (other_layouts, "different layouts of experts$"),
        (other_moves, "different moves$"),
    ],
)
def test_all_ranks_hear_of_what_is_wrong(make: Callable[[int], tuple[Bytes, list[Move]]], message: str) -> None:
    run_ranks(refuse, 3, make, message)


def move_slowly(member: Member, source: int) -> tuple[float, int]:
    """Seconds that moving 400 kB at 1 MB/s takes, and how far this thread counts meanwhile."""
    bank = Bytes(0, [0, EMPTY], num_bytes=400_000)
    group = member.group()
    transfer = Transfer(group, [bank], max_bytes_per_s=1e6, chunk_bytes=50_000)
    seconds = []

    def run() -> None:
        began = time.monotonic()
        transfer.run([move(source, 1)])
        seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=run)
    thread.start()
    count = 0
    while thread.is_alive():
        count += 1
        time.sleep(0.001)
    return seconds[0], count


@pytest.mark.parametrize("source", [0, 1])
def test_no_faster_than_allowed_and_other_threads_go_on(source: int) -> None:
    for seconds, count in run_ranks(move_slowly, 2, source):
        assert 0.35 <= seconds < 10
        assert count > 20


def serve_while_a_mover_is_dead(member: Member) -> float:
    """Rank 0's transfer waits for rank 1, whose mover does not run; both go on serving. Seconds until it is noticed."""
    serving, moving = member.group("serving", timeout_s=20.0), member.group("moving", timeout_s=1.0)
    noticed = []

    def run() -> None:
        began = time.monotonic()
        with pytest.raises(GroupError):
            Transfer(moving, [Bytes(0, [0, EMPTY])]).run([move(1, 0)])
        noticed.append(time.monotonic() - began)

    mover = threading.Thread(target=run)
    if member.rank == 0:
        mover.start()
    num_steps = 0
    while True:
        num_steps += 1
        is_done = member.rank == 0 and not mover.is_alive()
        if serving.all_gather_record(torch.tensor([is_done]).long()).any():
            break
        time.sleep(0.005)
    assert num_steps > 10
    return noticed[0] if member.rank == 0 else 0.0


def test_a_dead_mover_is_noticed_and_does_not_harm_serving() -> None:
    seconds, _ = run_ranks(serve_while_a_mover_is_dead, 2)
    assert 0.5 < seconds < 8.0


class Dying(Bytes):
    """Its rank's group breaks in the middle of what it sends."""

    group = None

    def checksum(self, slot: int) -> str:
        assert self.group is not None
        self.group.destroy()
        return super().checksum(slot)


def lose_the_sender(member: Member) -> float:
    group = member.group(timeout_s=20.0)
    bank = (Dying if member.rank == 1 else Bytes)(0, [member.rank, EMPTY])
    if isinstance(bank, Dying):
        bank.group = group
    began = time.monotonic()
    with pytest.raises(GroupError):
        Transfer(group, [bank]).run([move(1, 0), move(2, 3)])
    group.destroy()
    return time.monotonic() - began


def test_all_notice_a_sender_that_leaves_in_the_middle() -> None:
    assert max(run_ranks(lose_the_sender, 4)) < 8.0


@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=20))
def test_rounds_take_each_rank_once(pairs: list[tuple[int, int]]) -> None:
    todo = [move(*pair, expert=number) for number, pair in enumerate(pairs)]
    found = rounds(todo)
    assert sorted((each for round_ in found for each in round_), key=lambda each: each.expert) == todo
    for round_ in found:
        busy = [rank for each in round_ for rank in {each.from_rank, each.to_rank}]
        assert len(busy) == len(set(busy))
        assert round_
