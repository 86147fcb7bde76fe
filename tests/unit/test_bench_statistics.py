"""The numbers of `nobiru bench`, on records whose numbers are known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobiru.bench.report import warnings
from nobiru.bench.statistics import (
    RequestRecord,
    Summary,
    concurrency,
    parse_goodput,
    parse_percentiles,
    summarize,
    tokens_per_second,
)
from nobiru.errors import ConfigError


def record(due_s: float, arrivals_s: list[float], *, output_tokens: int | None = None, **more: object) -> RequestRecord:
    values: dict[str, object] = {"sent_s": due_s, "end_s": arrivals_s[-1] if arrivals_s else due_s + 1} | more
    tokens = len(arrivals_s) if output_tokens is None else output_tokens
    return RequestRecord(due_s=due_s, arrivals_s=arrivals_s, prompt_tokens=10, output_tokens=tokens, **values)  # type: ignore[arg-type]


def test_latencies_of_one_request() -> None:
    one = record(1.0, [1.5, 1.6, 2.0], output_tokens=6, sent_s=1.2, end_s=2.1)
    assert one.ttft_s == pytest.approx(0.5), "counted from when it was due, not from when it was sent"
    assert one.tpot_s == pytest.approx(0.5 / 5), "five tokens after the first, in however many pieces"
    assert one.itl_s == pytest.approx([0.1, 0.4])
    assert one.e2el_s == pytest.approx(1.1)


def test_what_a_single_token_or_none_leaves_open() -> None:
    assert record(0.0, [0.5]).tpot_s is None
    assert record(0.0, []).ttft_s is None
    assert record(0.0, []).itl_s == []


def test_summary() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.3]),
        record(0.0, [0.3, 0.5]),
        record(1.0, [1.2]),
        record(1.0, [], error="status 429: full"),
    ]
    found = summarize(records, duration_s=2.0, percentiles=(50, 99))
    assert (found.successful, found.failed, found.errors) == (3, 1, {"status 429: full": 1})
    assert (found.input_tokens, found.output_tokens) == (30, 6), "a failed request's tokens do not count"
    assert found.request_throughput == 1.5
    assert found.output_throughput == 3.0
    assert found.total_token_throughput == 18.0
    ttft = found.latencies["ttft"]
    assert ttft.mean == pytest.approx(200) and ttft.median == pytest.approx(200)
    assert ttft.std == pytest.approx(np.std([100, 300, 200]))
    assert ttft.percentiles[99] == pytest.approx(np.percentile([100, 300, 200], 99))
    assert found.latencies["tpot"].mean == pytest.approx(150), "of the two requests that have a second token"
    assert found.latencies["itl"].mean == pytest.approx(400 / 3), "of all gaps alike"
    assert found.goodput is None


def test_embeddings_have_only_end_to_end_latency() -> None:
    found = summarize([record(0.0, [], end_s=0.5)], duration_s=1.0)
    assert set(found.latencies) == {"e2el"}


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        ({"ttft": 150}, 1),
        ({"ttft": 350}, 3),
        ({"ttft": 350, "tpot": 150}, 2),  # the third has no second token, so it keeps the bound
        ({"e2el": 100}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_all_bounds(bounds: dict[str, float], good: int) -> None:
    records = [record(0.0, [0.1, 0.2]), record(0.0, [0.3, 0.6]), record(0.0, [0.2])]
    assert summarize(records, duration_s=2.0, goodput_ms=bounds).goodput == good / 2


def test_a_run_in_which_everything_failed() -> None:
    found = summarize([record(0.0, [], error="x")] * 2, duration_s=1.0, goodput_ms={"ttft": 1})
    assert found.latencies == {} and found.goodput == 0 and found.failed == 2
    assert found.peak_output_throughput == 0


def test_concurrency_follows_requests() -> None:
    records = [record(0.0, [], end_s=2.0), record(1.0, [], end_s=3.0), record(2.0, [], end_s=4.0)]
    assert [count for _, count in concurrency(records)] == [1, 2, 1, 2, 1, 0], "the end at 2 s comes before the start"
    assert summarize(records, duration_s=4.0).peak_concurrency == 2


def test_tokens_per_second() -> None:
    records = [record(0.0, [0.1, 0.9, 2.5], output_tokens=6), record(0.0, [0.5])]
    assert tokens_per_second(records) == [5.0, 0.0, 2.0]


@given(st.lists(st.lists(st.floats(0, 50), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 99))
def test_percentiles_lie_between_least_and_most(arrivals: list[list[float]], number: int) -> None:
    records = [record(0.0, sorted(each)) for each in arrivals]
    found = summarize(records, duration_s=60.0, percentiles=(0, number, 100))
    for latency in found.latencies.values():
        least, middle, most = (latency.percentiles[each] for each in (0, number, 100))
        assert least <= middle <= most
        assert least - 1e-6 <= latency.median <= most + 1e-6 and least - 1e-6 <= latency.mean <= most + 1e-6
    assert sum(tokens_per_second(records)) == pytest.approx(found.output_tokens)


def test_json_is_flat_and_has_the_usual_keys() -> None:
    flat = summarize([record(0.0, [0.1, 0.2])], duration_s=1.0, percentiles=(50, 99.9)).as_json()
    expected = {"completed", "failed", "duration", "total_input_tokens", "request_throughput", "output_throughput"}
    assert expected <= set(flat)
    assert flat["p99.9_ttft_ms"] == pytest.approx(100)
    assert flat["mean_itl_ms"] == pytest.approx(100)
    json.dumps(flat, allow_nan=False)


def test_options_in_words() -> None:
    assert parse_percentiles("50, 99.9") == (50.0, 99.9)
    assert parse_goodput(["ttft:200,tpot:50", "e2el:1e3"]) == {"ttft": 200, "tpot": 50, "e2el": 1000}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize("text", ["", "fifty", "101", "-1", "50,,99", "nan"])
def test_percentiles_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="percentiles"):
        parse_percentiles(text)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-5", "ttft:nan", "itl:5", "speed:1", "ttft=5"])
def test_goodput_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([text])


@pytest.fixture
def summary() -> Summary:
    return summarize([record(0.0, [0.1])], duration_s=1.0)


def test_warnings_say_when_the_client_is_the_limit(summary: Summary) -> None:
    assert warnings(summary, client_cpu_share=0.5, late_s=0.001, is_limited=False) == []
    assert "limit" in warnings(summary, client_cpu_share=0.99, late_s=0.0, is_limited=False)[0]
    assert "late" in warnings(summary, client_cpu_share=0.1, late_s=0.5, is_limited=False)[0]
    assert warnings(summary, client_cpu_share=0.1, late_s=0.5, is_limited=True) == [], "held back on purpose"
