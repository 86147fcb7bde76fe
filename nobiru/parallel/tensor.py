"""The workers of one rank as a group that exchanges tensors, for layers that are spread over them.

Owns which group stands behind it: one can be left and another joined without touching the model. Knows nothing of
layers, or of what workers are told.
"""

from __future__ import annotations

from torch import Tensor

from nobiru.errors import GroupError
from nobiru.layers.sharding import Shard
from nobiru.parallel.groups import Group


class WorkerGroup:
    """A `TensorGroup` of worker `shard.index`; `join` comes before everything else."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._group: Group | None = None

    @property
    def group(self) -> Group:
        """That which was joined last; `GroupError` if it was left."""
        if self._group is None:
            raise GroupError(f"worker {self.shard.index} of {self.shard.size} is in no group")
        return self._group

    def join(self, group: Group) -> None:
        """Leave the group before, and use this one."""
        assert (group.rank, group.size) == (self.shard.index, self.shard.size)
        self.leave()
        self._group = group

    def leave(self) -> None:
        """Whoever is still in an exchange gets a `GroupError`."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def break_connections(self) -> None:
        """End exchanges of this worker, also one that is blocked in another thread."""
        group = self._group
        if group is not None:
            group.break_connections()

    def all_reduce(self, x: Tensor) -> None:
        self.group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.group.all_gather(x)

    def gather(self, x: Tensor) -> Tensor:
        num_rows = [x.shape[0]] + [0] * (self.shard.size - 1)
        num_received = [0 if self.shard.index else x.shape[0]] * self.shard.size
        return self.group.all_to_all(x, num_rows, num_received)
