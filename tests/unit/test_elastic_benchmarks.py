"""What the elastic benchmarks make of the times they measured, what they draw, and what they call a leak."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.elastic.changes import WEIGHTS, draw
from benchmarks.elastic.clients import Stream
from benchmarks.elastic.footprint import Footprint, Process, differences, measure
from benchmarks.elastic.intervals import longest_gap_s, percentile, recovery_s, tokens_per_bin
from benchmarks.elastic.plot import save_plot
from benchmarks.elastic.recording import Event, Recording, report

SECONDS = st.lists(st.integers(0, 50).map(float), max_size=20).map(sorted)


@given(SECONDS, st.integers(0, 40).map(float), st.integers(1, 20).map(float))
def test_the_longest_gap_is_that_of_a_slow_search(arrivals_s: list[float], begin_s: float, length_s: float) -> None:
    end_s = begin_s + length_s
    before = [at for at in arrivals_s if at < begin_s][-1:] or [begin_s]
    after = [at for at in arrivals_s if at > end_s][:1] or [end_s]
    points = [*before, *(at for at in arrivals_s if begin_s <= at <= end_s), *after]
    expected = max(later - earlier for earlier, later in itertools.pairwise(points))
    assert longest_gap_s(arrivals_s, begin_s, end_s) == expected


def stream(sent_s: float, arrivals_s: Sequence[float], ended_s: float | None = None) -> Stream:
    return Stream(prompt=0, sent_s=sent_s, arrivals_s=list(arrivals_s), ended_s=ended_s)


def test_recovery_ends_with_the_slowest_stream_that_was_in_progress() -> None:
    streams = [
        stream(0.0, [9.0, 10.05, 11.0, 11.1]),  # a token of the old epoch comes after the death
        stream(0.0, [9.0, 11.4]),
        stream(0.0, [9.0, 10.1], ended_s=10.2),  # had all it wanted before the survivors began
        stream(10.5, [12.0]),  # came later
    ]
    assert recovery_s(streams, killed_s=10.0, committed_s=10.8) == pytest.approx(1.4)
    assert recovery_s(streams[2:], killed_s=10.0, committed_s=10.8) is None


def test_tokens_are_counted_by_bins() -> None:
    assert tokens_per_bin([0.5, 1.0, 1.04, 1.06, 1.99, 2.0], 1.0, 2.0, 0.05) == [2, 1, *[0] * 17, 1]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 21)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile(values, 1.0)) == (10.0, 19.0, 20.0)
    assert percentile([3.0], 0.95) == 3.0


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_every_drawn_change_can_be_asked_for(seed: int, size: int) -> None:
    members = [f"r{number}" for number in range(size)]
    change = draw(random.Random(seed), members, 4)
    assert change == draw(random.Random(seed), members, 4)
    assert change.kind in WEIGHTS
    body = change.body or {}
    assert 1 <= body.get("data_parallel_size", 1) <= 4
    assert body.get("data_parallel_size") != size
    assert len(set(body.get("remove_ranks", ()))) < size
    assert set(body.get("remove_ranks", ())) | set(body.get("replace_ranks", ())) <= set(members)


RANK = Process(pid=2, role="rank", descriptors={"socket": 9, "pipe": 2}, num_threads=7, rss_bytes=100)
SERVER = Process(pid=1, role="server", descriptors={"socket": 4}, num_threads=3, rss_bytes=100)
BEFORE = Footprint(processes=[SERVER, RANK], shared=frozenset(), num_store_keys=0)


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (BEFORE, ""),
        (dataclasses.replace(BEFORE, processes=[SERVER, dataclasses.replace(RANK, pid=7, rss_bytes=106)]), ""),
        (dataclasses.replace(BEFORE, processes=[SERVER, dataclasses.replace(RANK, rss_bytes=107)]), "resident memory"),
        (
            dataclasses.replace(BEFORE, processes=[SERVER, dataclasses.replace(RANK, num_threads=8)]),
            "num_threads of rank",
        ),
        (
            dataclasses.replace(BEFORE, processes=[SERVER, dataclasses.replace(RANK, descriptors={"socket": 10})]),
            "descriptors of rank",
        ),
        (dataclasses.replace(BEFORE, processes=[SERVER, RANK, RANK]), "processes: 1 of role rank, then 2"),
        (dataclasses.replace(BEFORE, shared=frozenset({"left"})), "left in /dev/shm: left"),
        (dataclasses.replace(BEFORE, num_store_keys=3), "keys of the store: 0, then 3"),
    ],
)
def test_what_is_left_behind_is_named(after: Footprint, found: str) -> None:
    problems = differences(BEFORE, after, max_growth=0.03)
    assert found in "".join(problems)
    assert bool(problems) == bool(found)


def test_a_footprint_sees_descriptors_and_threads_of_this_process(tmp_path: Path) -> None:
    import os

    def own() -> Process:
        return measure(os.getpid()).of("server")[0]

    before = own()
    with (tmp_path / "file").open("w"):
        assert own().descriptors["file"] == before.descriptors.get("file", 0) + 1
    assert own().descriptors == before.descriptors
    assert before.rss_bytes > 2**20


def event(kind: str, to_size: int, gap_s: float, **more: float) -> Event:
    return Event(
        kind=kind,  # type: ignore[arg-type]
        size=2,
        to_size=to_size,
        began_s=1.0,
        ended_s=2.0,
        longest_gap_s=gap_s,
        usual_gap_s=0.01,
        **more,  # type: ignore[arg-type]
    )


def recording(*events: Event) -> Recording:
    return Recording(
        model="/models/m",
        kind="planned",
        num_clients=4,
        rank_timeout_s=5.0,
        num_requests=3,
        tokens=[1, 2, 3] * 20,
        events=list(events),
        problems=[],
    )


def test_runs_are_saved_read_reported_and_drawn(tmp_path: Path) -> None:
    run = recording(event("planned", 4, 0.1, pause_s=0.05), event("planned", 3, 0.2, pause_s=0.03))
    restart = recording(event("restart", 4, 5.0), event("restart", 4, 3.0), event("restart", 4, 4.0))
    run.save(tmp_path / "run.json")
    assert Recording.load(tmp_path / "run.json") == run
    found = report([run, restart])
    assert found["planned"]["pause_s"] == {"count": 2, "min": 0.03, "p50": 0.04, "p95": 0.05, "max": 0.05}
    assert found["planned"]["2 → 3"]["longest_gap_s"]["max"] == 0.2
    assert found["restart_longer_by"] == {"4": 40.0}
    save_plot(tmp_path / "run.png", [run, restart], title="two")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
