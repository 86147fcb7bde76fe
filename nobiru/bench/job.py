"""One benchmark from its options to its files: checked first, then run, then written."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec

from nobiru import __version__
from nobiru.bench.client import Endpoint, Target, find_model
from nobiru.bench.load import Result, run_load, warm_up
from nobiru.bench.statistics import RequestRecord, Summary, summarize
from nobiru.bench.workload import Prompt, due_times, random_prompts, read_prompts
from nobiru.errors import ConfigError

ENDPOINTS: tuple[str, ...] = get_args(Endpoint)
PLOT_SUFFIXES = (".png", ".svg", ".pdf", ".html")
_AT_LEAST = {
    "num_prompts": 1,
    "input_len": 1,
    "output_len": 1,
    "prefix_len": 0,
    "num_warmups": 0,
    "max_concurrency": 1,
}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `nobiru bench serve`. Raises `ConfigError` that names the option, the bound and the value.

    `headers` hold the API key and are not written to the result file. `goodput_ms` bounds latencies by name.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: Endpoint = "completions"
    num_prompts: int = 200
    request_rate: float = math.inf
    max_concurrency: int | None = None
    dataset_path: Path | None = None
    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = {}
    headers: dict[str, str] = {}
    num_warmups: int = 1
    timeout_s: float = 600.0
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    goodput_ms: dict[str, float] = {}
    save_result: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise _wrong(name, value, f"at least {least}")
        if self.endpoint not in ENDPOINTS:
            raise _wrong("endpoint", self.endpoint, f"one of {', '.join(ENDPOINTS)}")
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise _wrong("url", self.url, "like http://127.0.0.1:8000")
        if not self.request_rate > 0:
            raise _wrong("request_rate", self.request_rate, "above 0, requests per second, or inf")
        if not 0 <= self.range_ratio < 1:
            raise _wrong("range_ratio", self.range_ratio, "from 0 to below 1")
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise _wrong("timeout", self.timeout_s, "a number of seconds above 0")
        if self.plot is not None and self.plot.suffix.lower() not in PLOT_SUFFIXES:
            raise _wrong("plot", str(self.plot), f"a file ending in {', '.join(PLOT_SUFFIXES)}")
        for name, path in {"plot": self.plot, "save_result": self.save_result}.items():
            if path is not None and not path.parent.is_dir():
                raise _wrong(name, str(path), "in a folder that exists")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("plot needs matplotlib: pip install 'nobiru[bench]'", param="plot")

    def prompts(self) -> list[Prompt]:
        """What is sent: `num_prompts`, then those of the warm-up."""
        count = self.num_prompts + self.num_warmups
        if self.dataset_path is not None:
            return read_prompts(self.dataset_path, count, output_len=self.output_len)
        lengths = {"input_len": self.input_len, "output_len": self.output_len, "prefix_len": self.prefix_len}
        return random_prompts(count, range_ratio=self.range_ratio, seed=self.seed, **lengths)

    def setting(self, model: str) -> dict[str, str]:
        """What the report says above the numbers."""
        rate = "inf (all at once)" if math.isinf(self.request_rate) else f"{self.request_rate:g} req/s (Poisson)"
        return {
            "Server": self.url,
            "Model": model,
            "Endpoint": self.endpoint,
            "Request rate": rate,
            "Maximum concurrency": "none" if self.max_concurrency is None else f"{self.max_concurrency:,}",
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run gave."""

    model: str
    result: Result
    summary: Summary


async def run_job(job: Job, on_done: Callable[[RequestRecord], None] = lambda record: None) -> Outcome:
    """Find the model, warm up and run; `on_done` is called for each request that ended.

    Raises `ConfigError` or `UnavailableError` when nothing can be measured.
    """
    url = job.url.rstrip("/").removesuffix("/v1")
    prompts = job.prompts()
    model = await find_model(url, job.model, job.headers)
    target = Target(
        url=url,
        endpoint=job.endpoint,
        model=model,
        headers=job.headers,
        ignore_eos=job.ignore_eos,
        temperature=job.temperature,
        extra_body=job.extra_body,
    )
    await warm_up(target, prompts[job.num_prompts :], timeout_s=job.timeout_s)
    result = await run_load(
        target,
        prompts[: job.num_prompts],
        due_times(job.num_prompts, job.request_rate, seed=job.seed),
        max_concurrency=job.max_concurrency,
        timeout_s=job.timeout_s,
        on_done=on_done,
    )
    summary = summarize(
        result.records, duration_s=result.duration_s, percentiles=job.percentiles, goodput_ms=job.goodput_ms
    )
    return Outcome(model=model, result=result, summary=summary)


def write_files(job: Job, outcome: Outcome) -> Sequence[Path]:
    """The result file and the plot, where asked for; returns what was written."""
    if job.save_result is not None:
        content = json.dumps(as_json(job, outcome), indent=1, allow_nan=False)
        job.save_result.write_text(content + "\n", encoding="utf-8")
    if job.plot is not None:
        from nobiru.bench.plot import save_plot  # matplotlib takes a second, which a run without a plot need not wait

        rate = f"{outcome.summary.request_throughput:,.1f} req/s"
        save_plot(job.plot, outcome.result.records, title=f"{outcome.model}, {job.endpoint}: {rate}")
    return [path for path in (job.save_result, job.plot) if path is not None]


def as_json(job: Job, outcome: Outcome) -> dict[str, Any]:
    """The result file: options, the summary, and one entry per request."""
    options: Mapping[str, Any] = {
        name: value
        for name, value in msgspec.to_builtins(job, enc_hook=str).items()
        if name not in ("headers", "save_result", "plot")
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "nobiru_version": __version__,
        **options,
        "request_rate": "inf" if math.isinf(job.request_rate) else job.request_rate,
        "model": outcome.model,
        **outcome.summary.as_json(),
        "client_cpu_share": outcome.result.client_cpu_share,
        "requests": [
            {
                "due_s": record.due_s,
                "sent_s": record.sent_s,
                "end_s": record.end_s,
                "ttft_s": record.ttft_s,
                "itl_s": record.itl_s,
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "error": record.error,
            }
            for record in outcome.result.records
        ],
    }


def _wrong(name: str, value: object, must_be: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; it must be {must_be}", param=name)
