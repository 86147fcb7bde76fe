"""The block pool: no leak, no double use, and shared contents that are always the right ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.kv.blocks import BlockPool, OutOfBlocksError

SIZE = 2


def test_allocate_and_release() -> None:
    pool = BlockPool(4, SIZE)
    first = pool.allocate(3)
    assert len(set(first)) == 3
    assert pool.num_free == 1
    with pytest.raises(OutOfBlocksError, match="2 KV blocks are needed, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.release(first)
    assert pool.num_free == 4
    with pytest.raises(ValueError, match="more often"):
        pool.release(first[:1])


def test_a_released_prefix_is_found_until_its_blocks_are_used_again() -> None:
    pool = BlockPool(3, SIZE)
    tokens = [1, 2, 3, 4, 5]
    blocks = pool.allocate(3)
    pool.publish(blocks, tokens, 0)
    assert pool.find_prefix([1, 2, 3, 4]) == blocks[:2]
    assert pool.find_prefix([1, 2, 9, 9]) == blocks[:1]
    assert pool.find_prefix([9, 2, 3, 4]) == []
    assert pool.find_prefix([1, 2, 3, 4], salt="other") == []
    pool.release(blocks)
    found = pool.find_prefix(tokens)
    pool.share(found)
    assert pool.num_free == 1
    pool.release(found)
    [used] = pool.allocate(1)
    assert used == blocks[2]  # never published, and the end of a sequence goes first
    pool.allocate(1)
    assert pool.find_prefix(tokens) == blocks[:1]
    pool.allocate(1)
    assert pool.find_prefix(tokens) == []


def test_the_same_contents_twice_are_one_entry_and_still_extend() -> None:
    pool = BlockPool(6, SIZE)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.publish(first, [1, 2, 3, 4], 0)
    pool.publish(second, [1, 2, 3, 4], 0)
    pool.publish(second, [1, 2, 3, 4, 5, 6], 2)
    assert pool.find_prefix([1, 2, 3, 4, 5, 6]) == [*first, second[2]]


class Sequences:
    """Random sequences over a tiny alphabet; what every block must hold is known from what was written to it."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}  # block → salt and all tokens up to its end
        self.held: list[list[int]] = []

    def start(self, salt: str, tokens: list[int]) -> None:
        found = self.pool.find_prefix(tokens, salt)
        for number, block_id in enumerate(found):
            assert self.written[block_id] == (salt, tuple(tokens[: (number + 1) * SIZE])), "shared contents are right"
        num_new = -(-len(tokens) // SIZE) - len(found)
        if self.pool.num_free_beside(found) < num_new:
            return
        self.pool.share(found)
        new = self.pool.allocate(num_new)
        assert not set(new) & {block_id for blocks in self.held for block_id in blocks}, "no block is given twice"
        assert not set(new) & set(found)
        blocks = [*found, *new]
        for number in range(len(found), len(blocks)):
            self.written[blocks[number]] = (salt, tuple(tokens[: (number + 1) * SIZE]))
        self.pool.publish(blocks, tokens, len(found), salt)
        self.held.append(blocks)

    def end(self, number: int) -> None:
        if number < len(self.held):
            self.pool.release(self.held.pop(number))

    def check(self) -> None:
        held = {block_id for blocks in self.held for block_id in blocks}
        assert self.pool.num_free == self.pool.num_blocks - len(held)


@settings(max_examples=300, deadline=None)
@given(
    num_blocks=st.integers(1, 8),
    events=st.lists(
        st.one_of(
            st.tuples(
                st.just("start"), st.sampled_from(["", "x"]), st.lists(st.integers(0, 1), min_size=1, max_size=9)
            ),
            st.tuples(st.just("end"), st.integers(0, 4)),
        ),
        max_size=60,
    ),
)
def test_random_sequences(num_blocks: int, events: list[tuple[object, ...]]) -> None:
    life = Sequences(num_blocks)
    for name, *arguments in events:
        getattr(life, str(name))(*arguments)
        life.check()
    while life.held:
        life.end(0)
    assert life.pool.num_free == num_blocks
