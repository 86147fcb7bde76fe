"""`nobiru bench`: options in, a checked job out, progress and report on the terminal. The work is `nobiru.bench`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nobiru.cli import options
from nobiru.config import ServerConfig
from nobiru.errors import ConfigError

if TYPE_CHECKING:
    from nobiru.bench.job import Job, Outcome

TARGET, TRAFFIC, PROMPTS, RESULTS = "Server", "Traffic", "Prompts", "Results"
EPILOG = "The API key can be set in the environment: NOBIRU_API_KEY, as for the server."
HEADER_SEPARATOR = ":"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def bench() -> None:
    """Measure a running server, nobiru's or any other with OpenAI's interface.

    [bold]nobiru bench serve --help[/bold]  says how.
    """


def _option(panel: str, help_text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel=panel, **more)


Url = Annotated[str, _option(TARGET, "The server's address, with or without /v1.", "--url", "--base-url")]
Model = Annotated[str | None, _option(TARGET, "Model's name in the API. Default: the first the server lists.")]
Endpoint = Annotated[str, _option(TARGET, "completions, chat or embeddings.")]
ApiKey = Annotated[str | None, _option(TARGET, "Sent as bearer token. NOBIRU_API_KEY hides it better.")]
Header = Annotated[list[str] | None, _option(TARGET, "One more HTTP header, 'Name: value'; repeatable.")]
ExtraBody = Annotated[str | None, _option(TARGET, "JSON object whose fields go into every request.")]
Timeout = Annotated[float, _option(TARGET, "Seconds that one request may take.")]
NumPrompts = Annotated[int, _option(TRAFFIC, "Requests to send.")]
RequestRate = Annotated[
    float, _option(TRAFFIC, "Requests per second, at random intervals (Poisson). inf: all at once.", metavar="RATE")
]
MaxConcurrency = Annotated[int | None, _option(TRAFFIC, "Most requests at a time. Default: no limit.")]
NumWarmups = Annotated[int, _option(TRAFFIC, "Requests sent before, one by one, that do not count.")]
Seed = Annotated[int, _option(TRAFFIC, "The same seed sends the same texts at the same times.")]
Dataset = Annotated[str, _option(PROMPTS, "random (words), or jsonl (--dataset-path).")]
DatasetPath = Annotated[
    Path | None,
    _option(PROMPTS, "JSON lines: texts, or objects with prompt, text, input or messages, and maybe output_len."),
]
InputLen = Annotated[int, _option(PROMPTS, "Mean words of a random text; a word is about a token.")]
OutputLen = Annotated[int, _option(PROMPTS, "Most tokens to generate (max_tokens).")]
RangeRatio = Annotated[float, _option(PROMPTS, "Lengths vary evenly by this share up and down: 0.2 is ± 20 %.")]
PrefixLen = Annotated[int, _option(PROMPTS, "Words that all random texts begin with; shows what prefix caching does.")]
IgnoreEos = Annotated[
    bool, _option(PROMPTS, "Generate all --output-len tokens (nobiru and vLLM know it).", "--ignore-eos")
]
Temperature = Annotated[float, _option(PROMPTS, "0 is greedy.")]
Percentiles = Annotated[str, _option(RESULTS, "Percentiles to show.")]
Goodput = Annotated[
    list[str] | None,
    _option(
        RESULTS, "Also count requests that keep these bounds in ms: ttft:200,tpot:50 (or e2el:…).", metavar="BOUNDS"
    ),
]
SaveResult = Annotated[Path | None, _option(RESULTS, "JSON file to write: options, summary, every request.")]
Plot = Annotated[Path | None, _option(RESULTS, "Plot to write: png, svg, pdf or html. Needs matplotlib.")]


@app.command(epilog=EPILOG)
def serve(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    endpoint: Endpoint = "completions",
    api_key: ApiKey = None,
    header: Header = None,
    extra_body: ExtraBody = None,
    timeout: Timeout = 600.0,
    num_prompts: NumPrompts = 200,
    request_rate: RequestRate = math.inf,
    max_concurrency: MaxConcurrency = None,
    num_warmups: NumWarmups = 1,
    seed: Seed = 0,
    dataset: Dataset = "random",
    dataset_path: DatasetPath = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 0,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    percentiles: Percentiles = "50,90,99",
    goodput: Goodput = None,
    save_result: SaveResult = None,
    plot: Plot = None,
) -> None:
    """Send requests to a server and print throughput and latencies: TTFT, TPOT, ITL, end to end.

    [bold]nobiru bench serve --max-concurrency 32[/bold]  32 clients that each wait for their answer (closed loop)

    [bold]nobiru bench serve --request-rate 5 --goodput ttft:500,tpot:100[/bold]  5 requests a second, whatever the
    server does (open loop); latencies count from when a request was due

    [bold]nobiru bench serve --endpoint chat --dataset-path prompts.jsonl --plot run.png --save-result run.json[/bold]

    [bold]nobiru bench serve --endpoint embeddings --url http://10.0.0.7:8000 --num-prompts 2000[/bold]

    Exit code 0 when every request was answered whole, 1 when one failed or there is no server.
    """
    job = make_job(dict(locals()))
    from nobiru.bench.job import run_job, write_files

    with _progress(job.num_prompts) as on_done:
        outcome = asyncio.run(run_job(job, on_done))
    _show(job, outcome)
    for path in write_files(job, outcome):
        options.say(f"wrote {path}", level="info")
    sys.exit(1 if outcome.summary.failed else 0)


def make_job(values: Mapping[str, Any]) -> Job:
    """The options of the command line, checked; raises `ConfigError`."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("nobiru bench needs aiohttp: pip install 'nobiru[bench]'")
    from nobiru.bench.job import Job
    from nobiru.bench.statistics import parse_goodput, parse_percentiles

    fields = dict(values)
    dataset = fields.pop("dataset")
    if dataset not in ("random", "jsonl"):
        raise ConfigError(f"dataset is {dataset!r}; it must be random or jsonl", param="dataset")
    if dataset == "jsonl" and fields["dataset_path"] is None:
        raise ConfigError("dataset jsonl needs --dataset-path FILE", param="dataset_path")
    fields["headers"] = _headers(fields.pop("header") or [], fields.pop("api_key"))
    fields["extra_body"] = _json_object(fields["extra_body"])
    fields["goodput_ms"] = parse_goodput(fields.pop("goodput") or [])
    fields["percentiles"] = parse_percentiles(fields["percentiles"])
    return Job(timeout_s=fields.pop("timeout"), **fields)


def _headers(lines: Sequence[str], api_key: str | None) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, separator, value = line.partition(HEADER_SEPARATOR)
        if not separator or not name.strip():
            raise ConfigError(f"header is {line!r}; it must be 'Name: value'", param="header")
        headers[name.strip()] = value.strip()
    if api_key is None:
        option = options.ConfigOption(name="api_key", config=ServerConfig, field="api_keys", secret=True)
        found, _ = options.with_environment({}, [option])
        api_key = next(iter(found.get("api_key") or ()), None)
    return headers if api_key is None else {**headers, "Authorization": f"Bearer {api_key}"}


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"extra_body is {text!r}; it must be a JSON object", param="extra_body")
    return value


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on standard error if that is a terminal; gives the function to call for each request that ended."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    failed = 0
    with bar:
        task = bar.add_task("requests", total=total)

        def on_done(record: Any) -> None:
            nonlocal failed
            failed += record.error is not None
            bar.update(task, advance=1, description=f"requests ({failed} failed)" if failed else "requests")

        yield on_done


def _show(job: Job, outcome: Outcome) -> None:
    from nobiru.bench.report import render, warnings

    # Where the output is piped, rich assumes 80 columns; a long model name or error needs more.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(render(outcome.summary, job.setting(outcome.model)))
    for warning in warnings(
        outcome.summary,
        client_cpu_share=outcome.result.client_cpu_share,
        late_s=outcome.result.late_s,
        is_limited=job.max_concurrency is not None,
    ):
        options.say(warning)
