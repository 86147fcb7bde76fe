"""The blocks of each sequence: taking, sharing, publishing and giving back.

Owns the arithmetic between tokens and blocks. Which sequence gets blocks, and who loses them, the scheduler decides.
"""

from __future__ import annotations

from nobiru.kv.blocks import BlockPool
from nobiru.scheduler.plan import CausalState


class BlockTables:
    """A `BlockPool` seen from sequences. Without `prefix_caching` nothing is published, so nothing is found."""

    def __init__(self, pool: BlockPool, *, prefix_caching: bool = True) -> None:
        self.pool = pool
        self._prefix_caching = prefix_caching

    def can_ever_hold(self, state: CausalState) -> bool:
        """Whether the whole pool is enough for the sequence at its longest."""
        return self._num_blocks(state.max_num_tokens) <= self.pool.num_blocks

    def open(self, state: CausalState) -> bool:
        """Share the blocks of the longest known prefix with a sequence that begins; false if the pool is too full.

        Too full means that its present tokens would not fit beside what others hold. One token is always left to
        compute: its logits, or its hidden state, are what the sequence is after.
        """
        prefix = self.pool.find_prefix(state.token_ids[:-1], state.cache_salt)
        if self._num_blocks(len(state.token_ids)) - len(prefix) > self.pool.num_free_beside(prefix):
            return False
        self.pool.share(prefix)
        state.block_ids = prefix
        state.num_published_blocks = len(prefix)
        state.num_computed_tokens = len(prefix) * self.pool.block_size
        if state.num_cached_tokens is None:
            state.num_cached_tokens = state.num_computed_tokens
        return True

    def grow(self, state: CausalState, num_tokens: int) -> bool:
        """Take blocks until the sequence has room for `num_tokens` tokens; false, and none taken, if there are none."""
        num_needed = self._num_blocks(num_tokens) - len(state.block_ids)
        if num_needed > self.pool.num_free:
            return False
        if num_needed > 0:
            state.block_ids += self.pool.allocate(num_needed)
        return True

    def publish(self, state: CausalState) -> None:
        """Let others find the blocks that are full by now."""
        num_full = state.num_computed_tokens // self.pool.block_size
        if self._prefix_caching and num_full > state.num_published_blocks:
            tokens = state.token_ids[: state.num_computed_tokens]
            self.pool.publish(state.block_ids, tokens, state.num_published_blocks, state.cache_salt)
            state.num_published_blocks = num_full

    def close(self, state: CausalState) -> None:
        """Give all blocks back; what they hold can be found until they are taken anew."""
        self.pool.release(state.block_ids)
        state.block_ids = []
        state.num_computed_tokens = state.num_published_blocks = 0

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)
