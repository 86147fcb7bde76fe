"""From what happened to each request to the numbers of a report. Pure: no clock, no I/O.

Terms: TTFT, from when a request was due to its first token; TPOT, the mean time of a token after the first; ITL, the
gaps between two arrivals; E2EL, from when a request was due to its end. A request is *due* when the schedule says so,
which in an open loop is before it could be sent if the client had to wait, so a stalled server cannot hide its queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nobiru.errors import ConfigError

LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One request; times are seconds since the run began. `error` None: it was answered whole.

    `arrivals_s` has one entry for each piece of the answer that carried tokens.
    """

    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals_s[0] - self.due_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        if not self.arrivals_s or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        return np.diff(self.arrivals_s).tolist()

    def latency_s(self, name: str) -> float | None:
        """One value of `LATENCIES` but ITL, which has several."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Milliseconds. `percentiles` by their number: `percentiles[99.0]`."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run in numbers. Rates are per second of `duration_s` and count requests that were answered whole.

    `latencies` has the names of `LATENCIES` for which there is a value. `goodput` is None when no bounds were given.
    """

    duration_s: float
    successful: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_token_throughput: float
    peak_output_throughput: float
    peak_concurrency: int
    latencies: dict[str, Distribution]
    goodput: float | None
    errors: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Flat, with the keys that result files of other engines' benchmarks use."""
        flat: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.successful,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.request_throughput,
            "input_throughput": self.input_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.peak_output_throughput,
            "max_concurrent_requests": self.peak_concurrency,
            "request_goodput": self.goodput,
            "errors": self.errors,
        }
        for name, latency in self.latencies.items():
            flat |= {f"{each}_{name}_ms": getattr(latency, each) for each in ("mean", "median", "std")}
            flat |= {f"p{number:g}_{name}_ms": value for number, value in latency.percentiles.items()}
        return flat


def summarize(
    records: Sequence[RequestRecord],
    *,
    duration_s: float,
    percentiles: Sequence[float] = (99.0,),
    goodput_ms: dict[str, float] | None = None,
) -> Summary:
    """The numbers of a run of `duration_s` seconds; latencies are of the requests that were answered whole.

    `goodput_ms` bounds latencies by name: goodput counts requests that keep all bounds. A request without that latency
    (no second token, say) keeps its bound.
    """
    done = [record for record in records if record.error is None]
    values_s = {name: [value for each in done if (value := each.latency_s(name)) is not None] for name in _ONE_EACH}
    values_s["itl"] = [gap for record in done for gap in record.itl_s]
    if not any(record.arrivals_s for record in done):  # embeddings have no tokens to wait for
        values_s = {"e2el": values_s["e2el"]}
    input_tokens, output_tokens = sum(each.prompt_tokens for each in done), sum(each.output_tokens for each in done)
    good = [all(_within(record, name, most) for name, most in (goodput_ms or {}).items()) for record in done]
    errors = Counter(record.error for record in records if record.error is not None)
    return Summary(
        duration_s=duration_s,
        successful=len(done),
        failed=len(records) - len(done),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_throughput=len(done) / duration_s,
        input_throughput=input_tokens / duration_s,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        peak_output_throughput=float(max(tokens_per_second(done), default=0.0)),
        peak_concurrency=max((count for _, count in concurrency(records)), default=0),
        latencies={name: _distribution(values_s[name], percentiles) for name in LATENCIES if values_s.get(name)},
        goodput=sum(good) / duration_s if goodput_ms else None,
        errors=dict(errors.most_common()),
    )


_ONE_EACH = ("ttft", "tpot", "e2el")


def _within(record: RequestRecord, name: str, most_ms: float) -> bool:
    value_s = record.latency_s(name)
    return value_s is None or value_s * 1000 <= most_ms


def _distribution(values_s: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    milliseconds = np.asarray(values_s) * 1000
    found = np.percentile(milliseconds, percentiles) if percentiles else []
    return Distribution(
        mean=float(milliseconds.mean()),
        median=float(np.median(milliseconds)),
        std=float(milliseconds.std()),
        percentiles=dict(zip(percentiles, map(float, found), strict=True)),
    )


def tokens_per_second(records: Sequence[RequestRecord]) -> list[float]:
    """Output tokens that arrived in each second of the run; a request's tokens are spread over its arrivals evenly."""
    at = [second for record in records for second in record.arrivals_s]
    weights = [record.output_tokens / len(record.arrivals_s) for record in records for _ in record.arrivals_s]
    return np.bincount(np.asarray(at, dtype=np.int64), weights).tolist() if at else []


def concurrency(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """(second, requests on their way from then on), in order of time."""
    # One that ends in the instant in which another is sent made room for it.
    changes = sorted([(each.sent_s, 1) for each in records] + [(each.end_s, -1) for each in records])
    counts = np.cumsum([step for _, step in changes]).tolist()
    return [(second, count) for (second, _), count in zip(changes, counts, strict=True)]


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`50,90,99` as numbers; raises `ConfigError`."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 <= number <= 100 for number in numbers):
        raise ConfigError(f"percentiles is {text!r}; it must be numbers from 0 to 100, such as 50,90,99")
    return numbers


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` (milliseconds, separated by commas or blanks) as bounds by name; raises `ConfigError`."""
    bounds: dict[str, float] = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, number = part.partition(":")
        try:
            bounds[name] = float(number)
        except ValueError:
            bounds[name] = -1.0
        if name not in _ONE_EACH or not bounds[name] > 0:
            raise ConfigError(
                f"goodput is {part!r}; it must be NAME:MILLISECONDS with a name of {', '.join(_ONE_EACH)}"
            )
    return bounds
