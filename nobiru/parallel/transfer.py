"""Copying experts' weights between ranks, beside serving.

Owns one transfer: in rounds, in chunks, no faster than allowed, verified. Does not know why experts move, nor when the
slots that were filled may serve. Runs in a thread of its own, on a group of its own; an error ends the transfer and
nothing else: the group is destroyed then, and what lies in the target slots is not used.

A round is a set of moves in which no rank takes part twice. Whoever has done its part of a round waits for the others,
so a rank that is gone is noticed by all, one round later at most; and nobody waits longer than one slot takes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nobiru.errors import NobiruError
from nobiru.models.pace import Pace
from nobiru.parallel.groups import Group
from nobiru.parallel.placement import Move

_CHECKSUM_BYTES = 64


class TransferError(NobiruError):
    """What arrived is not what was sent, or the ranks do not agree on what to move."""

    code = "transfer_failed"


class Bank(Protocol):
    """One layer's slots, as `nobiru.layers.moe.Experts` has them."""

    layout_id: str

    def memory(self, slot: int) -> Tensor:
        """The slot's bytes, uint8, contiguous."""

    def checksum(self, slot: int) -> str:
        """Of these bytes, at most 64 characters."""


class Transfer:
    """Moves between the members of `group`, whose positions are the ranks of the moves; `banks` are this rank's.

    A rank sends `max_bytes_per_s` at most. The group's time limit must be longer than a slot takes at that rate.
    """

    def __init__(
        self, group: Group, banks: Sequence[Bank], *, max_bytes_per_s: float | None = None, chunk_bytes: int = 2**20
    ) -> None:
        self._group = group
        self._banks = banks
        self._max_bytes_per_s = max_bytes_per_s
        self._chunk_bytes = chunk_bytes

    def run(self, moves: Sequence[Move]) -> dict[tuple[int, int], str]:
        """Copy; all members call this with the same moves. The checksums of the slots of this rank, by layer and slot.

        When it returns, every member's copies are complete and verified, unless a member has failed in this moment.
        `GroupError` when a member is gone or too late; `TransferError`, on all of them, when weights arrived damaged,
        or members have different moves or layouts.
        """
        self._agree(moves)
        checksums: dict[tuple[int, int], str] = {}
        for number, round_ in enumerate(rounds(moves)):
            damaged = 0
            for move in round_:
                if move.to_rank == self._group.rank:
                    checksums[move.layer, move.to_slot], is_right = self._receive(move)
                    damaged += not is_right
                elif move.from_rank == self._group.rank:
                    self._send(move)
            records_Rn = self._group.all_gather_record(torch.tensor([number, damaged]))
            if bool(records_Rn[:, 1].any()):
                ranks = records_Rn[:, 1].nonzero().flatten().tolist()
                raise TransferError(f"weights arrived damaged on ranks {ranks}, in one of the moves {round_}")
        return checksums

    def _agree(self, moves: Sequence[Move]) -> None:
        layouts = [bank.layout_id for bank in self._banks]
        record = torch.tensor([zlib.crc32(repr(list(moves)).encode()), zlib.crc32(repr(layouts).encode())])
        different_n = (self._group.all_gather_record(record) != record).any(0).tolist()
        if any(different_n):
            what = " and ".join(
                name for name, differs in zip(("moves", "layouts of experts"), different_n, strict=True) if differs
            )
            raise TransferError(f"the ranks have different {what}")

    def _send(self, move: Move) -> None:
        bank = self._banks[move.layer]
        memory = bank.memory(move.from_slot)
        pace = self._pace()
        for chunk in self._chunks(memory):
            self._group.send(chunk, move.to_rank)
            pace.took(len(chunk))
        checksum = bank.checksum(move.from_slot).encode().ljust(_CHECKSUM_BYTES)
        self._group.send(torch.frombuffer(bytearray(checksum), dtype=torch.uint8), move.to_rank)

    def _receive(self, move: Move) -> tuple[str, bool]:
        """The checksum of what lies in the target slot now, and whether it is the source's."""
        bank = self._banks[move.layer]
        memory = bank.memory(move.to_slot)
        if move.from_rank == move.to_rank:
            pace = self._pace()
            source = bank.memory(move.from_slot)
            for to, chunk in zip(self._chunks(memory), self._chunks(source), strict=True):
                to.numpy()[:] = chunk.numpy()  # numpy copies in this thread alone
                pace.took(len(to))
            expected = bank.checksum(move.from_slot)
        else:
            for chunk in self._chunks(memory):
                self._group.receive(chunk, move.from_rank)
            sent = torch.empty(_CHECKSUM_BYTES, dtype=torch.uint8)
            self._group.receive(sent, move.from_rank)
            expected = sent.numpy().tobytes().decode().rstrip()
        checksum = bank.checksum(move.to_slot)
        return checksum, checksum == expected

    def _chunks(self, memory: Tensor) -> list[Tensor]:
        return [memory[begin : begin + self._chunk_bytes] for begin in range(0, len(memory), self._chunk_bytes)]

    def _pace(self) -> Pace:
        return Pace(self._max_bytes_per_s or math.inf)


def rounds(moves: Sequence[Move]) -> list[list[Move]]:
    """Each move in the first round in which its two ranks have nothing to do yet."""
    found: list[list[Move]] = []
    busy: list[set[int]] = []
    for move in moves:
        pair = {move.from_rank, move.to_rank}
        number = next((number for number, ranks in enumerate(busy) if not ranks & pair), len(found))
        if number == len(found):
            found.append([])
            busy.append(set())
        found[number].append(move)
        busy[number] |= pair
    return found
