"""A Ray cluster of several nodes on this machine, for tests: nodes come and die, and nothing may be left of ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import until

SMALL = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
TESTS = Path(__file__).parent


class Nodes:
    """The node of the test itself has no CPU to give away; `add` brings others, by default with room for one rank."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
        self._nodes: dict[str, Any] = {}
        self.address: str = self._cluster.address

    def add(self, *, num_cpus: int = 1, wait: bool = True) -> str:
        """The id of the new one."""
        node = self._cluster.add_node(wait=wait, num_cpus=num_cpus, **SMALL)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """A machine dies."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    @property
    def ids(self) -> list[str]:
        """Of those that can have ranks, oldest first."""
        return list(self._nodes)

    def assert_nothing_is_left(self) -> None:
        """All CPUs are free again, all placement groups removed and all actors dead, once Ray has noticed.

        Which takes it some seconds when a node was killed.
        """
        import ray
        from ray._private import state  # what is public asks the dashboard, which does not run here

        ray.init(address=self.address)
        try:
            asyncio.run(until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU")))
            assert {each["state"] for each in ray.util.placement_group_table().values()} <= {"REMOVED"}
            assert {each["State"] for each in state.actors().values()} <= {"DEAD"}
        finally:
            ray.shutdown()

    def end(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes(num_nodes: int) -> Iterator[Nodes]:
    """A cluster with so many nodes of one CPU, whose processes find the modules of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]))
        nodes = Nodes()
        try:
            for _ in range(num_nodes):
                nodes.add()
            yield nodes
        finally:
            nodes.end()


def occupied_nodes() -> list[str]:
    """The nodes of the placement groups that there are, in a process that is connected to the cluster."""
    import ray

    table = ray.util.placement_group_table().values()
    return sorted(node for each in table if each["state"] == "CREATED" for node in each["bundles_to_node_id"].values())
