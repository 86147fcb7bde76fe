"""Generation, nobiru against other engines: the same model folder and token ids, each engine in its own interpreter.

    python benchmarks/generate_peers.py --model DIR --engine nobiru=PY --engine vllm=PY
    python benchmarks/generate_peers.py --model DIR --engine nobiru=PY --engine hf=PY --rounds 3 --min-ratio 1.1
    python benchmarks/generate_peers.py --model DIR --engine vllm=PY --engine vllm:eager=PY \\
        --option vllm:eager.enforce_eager=true

Every engine is started `--rounds` times, in turn (A B A B), and each start times `--repeats` times:

* batch: output tokens/s, all prompts at once, `--output-tokens` each
* prefill: prompt tokens/s, all prompts at once, one output token each
* single: output tokens/s of one prompt alone, its prefill included; decode: the same without the prefill

All is greedy and nothing ends a text early. No two timings share a prompt, so nobody is served from a prefix cache.
Speeds are medians over all timings, with their range; ratios are to the best other engine of the same run. Engines:
nobiru, vllm, hf (`transformers`); a label behind a colon lets one take part twice. `--option ENGINE.KEY=VALUE` (VALUE
is JSON, else text) goes to the engine's constructor.

The last line of output is JSON. Exit code 0 when every engine ran, gave as many tokens as asked for, and, with
`--min-ratio`, `--subject` reached that ratio in batch, prefill and single.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

WORKER = Path(__file__).resolve().parent / "peers" / "generate_worker.py"
ROOT = WORKER.parent.parent.parent
ENGINES = ("nobiru", "vllm", "hf")
MEASURES = ("batch", "prefill", "single", "decode")
JUDGED = ("batch", "prefill", "single")

TokenIds = list[int]


@dataclass(kw_only=True)
class EngineResult:
    """All timings of one engine, by measure in tokens/s, and what its starts took."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    outputs: list[TokenIds] = field(default_factory=list)
    startup_s: list[float] = field(default_factory=list)
    peak_rss_bytes: list[int] = field(default_factory=list)
    cores_used: list[float] = field(default_factory=list)

    def median(self, measure: str) -> float:
        return statistics.median(self.rates[measure])


# ---- prompts ---------------------------------------------------------------------------------------------------------


def source_token_ids(model: Path) -> TokenIds:
    """The language reference that every Python carries, as the model's token ids; the same for one Python release."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids


class Prompts:
    """Runs of consecutive tokens of the source. No two begin at the same place."""

    def __init__(self, source: TokenIds, *, mean: int, spread: float, seed: int) -> None:
        self._source, self._random = source, random.Random(seed)
        self._least, self._most = max(1, round(mean * (1 - spread))), round(mean * (1 + spread))
        starts = range(len(source) - self._most)
        self._starts = self._random.sample(starts, len(starts))

    def take(self, count: int) -> list[TokenIds]:
        """`count` prompts; raises `ValueError` when the source has no more."""
        if count > len(self._starts):
            raise ValueError(f"the source has {len(self._source)} tokens, too few for so many different prompts")
        lengths = [self._random.randint(self._least, self._most) for _ in range(count)]
        return [self._source[start : start + length] for length in lengths for start in [self._starts.pop()]]


def make_repeats(prompts: Prompts, *, num_prompts: int, num_repeats: int) -> list[dict[str, Any]]:
    """What each repeat is given; prefill alone is timed on other prompts than prefill with decoding."""
    return [
        {
            "batch": prompts.take(num_prompts),
            "prefill": prompts.take(num_prompts),
            "single": (single := prompts.take(1)[0]),
            "first": prompts.take(1)[0][: len(single)],
        }
        for _ in range(num_repeats)
    ]


# ---- running an engine -----------------------------------------------------------------------------------------------


def environment(engine: str, python: str) -> dict[str, str]:
    """The worker's environment: offline, and with all cores, whatever this shell limits itself to."""
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    env["HF_HUB_OFFLINE"] = "1"
    if engine == "nobiru":
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    # vLLM's installation guide for CPUs asks for this library, which its packages bring along.
    iomp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    if engine == "vllm" and iomp.is_file():
        env["LD_PRELOAD"] = ":".join(filter(None, [str(iomp), env.get("LD_PRELOAD")]))
    return env


def run_engine(name: str, python: str, job: Mapping[str, Any], *, work_dir: Path, timeout_s: float) -> dict[str, Any]:
    """Start the engine once and time it; raises `RuntimeError` with the end of its log."""
    handle, job_path = tempfile.mkstemp(prefix=f"{name.replace(':', '_')}_", suffix=".json", dir=work_dir)
    result, log = Path(job_path).with_suffix(".result"), Path(job_path).with_suffix(".log")
    engine = name.partition(":")[0]
    with os.fdopen(handle, "w") as file:
        json.dump({**job, "engine": engine, "result": str(result), "spawned_s": time.monotonic()}, file)
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [python, str(WORKER), job_path],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(engine, python),
            start_new_session=True,
        )
    try:
        code: int | str = worker.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = f"stopped after {timeout_s:g} s"
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    if code != 0 or not result.is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise RuntimeError(f"{name}: exit code {code}; {log} ends with:\n{tail}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def add_start(
    result: EngineResult, found: Mapping[str, Any], repeats: Sequence[Mapping[str, Any]], tokens: int
) -> None:
    """Enter the timings of one start."""
    for timing, prompts in zip(found["repeats"], repeats, strict=True):
        rates = result.rates
        rates["batch"].append(len(prompts["batch"]) * tokens / timing["batch_s"])
        rates["prefill"].append(sum(map(len, prompts["prefill"])) / timing["prefill_s"])
        rates["single"].append(tokens / timing["single_s"])
        if tokens > 1 and timing["single_s"] > timing["first_s"]:
            rates["decode"].append((tokens - 1) / (timing["single_s"] - timing["first_s"]))
        result.outputs.extend(timing["outputs"])
    result.startup_s.append(found["startup_s"])
    result.peak_rss_bytes.append(found["peak_rss_bytes"])
    result.cores_used.append(found["cores_used"])


def busy_cores(seconds: float = 0.5) -> float:
    """How many cores other work keeps busy now."""

    def read() -> tuple[int, int]:
        ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # all; idle and waiting for disks

    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    return (1 - (idle_after - idle) / max(1, total_after - total)) * (os.cpu_count() or 1)


# ---- what it means ---------------------------------------------------------------------------------------------------


def ratios_to_best_other(results: Mapping[str, EngineResult]) -> dict[str, dict[str, float]]:
    """Engine → measure → its median over that of the best engine of another kind. Labels are of one kind."""
    ratios: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        others = [other for each, other in results.items() if each.partition(":")[0] != name.partition(":")[0]]
        ratios[name] = {
            measure: result.median(measure) / max(other.median(measure) for other in others if other.rates[measure])
            for measure in MEASURES
            if result.rates[measure] and any(other.rates[measure] for other in others)
        }
    return ratios


def agreement(left: Sequence[TokenIds], right: Sequence[TokenIds]) -> dict[str, float]:
    """Share of texts with the same tokens, and the mean share of a text before the first difference.

    In bfloat16 two right engines part where the two best tokens are close, and differ from there on.
    """
    pairs = list(zip(left, right, strict=False))
    common = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))) for a, b in pairs]
    return {
        "same_texts": sum(a == b for a, b in pairs) / len(pairs),
        "common_prefix": statistics.fmean(count / max(1, len(a)) for count, (a, _) in zip(common, pairs, strict=True)),
    }


def judge(args: argparse.Namespace, results: Mapping[str, EngineResult], failures: Sequence[str]) -> dict[str, bool]:
    """Every check by name."""
    checks = dict.fromkeys(failures, False)
    for name, result in results.items():
        complete = all(len(output) == args.output_tokens for output in result.outputs)
        checks[f"{name}: {args.output_tokens} tokens for every prompt"] = complete
    if args.min_ratio is not None:
        found = ratios_to_best_other(results).get(args.subject, {})
        for measure in JUDGED:
            checks[f"{args.subject}: {measure} at least {args.min_ratio:g} x the best other"] = (
                found.get(measure, 0.0) >= args.min_ratio
            )
    return checks


def print_results(results: Mapping[str, EngineResult], agreements: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("engine", *(f"{name}\ntokens/s" for name in MEASURES), "start-up\ns", "peak RSS\nMiB", "cores\nused")
    ratios = ratios_to_best_other(results)
    for name, result in results.items():
        cells = []
        for measure, rates in result.rates.items():
            ratio = f" ({ratios[name][measure]:.2f} x)" if measure in ratios[name] else ""
            cells.append(
                f"{result.median(measure):,.1f}{ratio}\n{min(rates):,.1f} to {max(rates):,.1f}" if rates else "-"
            )
        table.add_row(
            name,
            *cells,
            f"{statistics.median(result.startup_s):.1f}",
            f"{max(result.peak_rss_bytes) / 2**20:,.0f}",
            f"{statistics.median(result.cores_used):.2f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 140, emoji=False, highlight=False)
    console.print(table)
    console.print("medians with their range; (x): ratio to the best engine of another kind")
    for pair, found in agreements.items():
        console.print(
            f"{pair}: {found['same_texts']:.0%} of the texts have the same tokens, "
            f"{found['common_prefix']:.0%} of a text's tokens come before the first difference"
        )


# ---- command line ----------------------------------------------------------------------------------------------------


def parse_engines(pairs: Sequence[str]) -> dict[str, str]:
    """Engine → interpreter; raises `ValueError`."""
    engines: dict[str, str] = {}
    for pair in pairs:
        name, separator, python = pair.partition("=")
        if not separator or name.partition(":")[0] not in ENGINES:
            raise ValueError(f"--engine {pair}: write NAME=PYTHON with a name of {', '.join(ENGINES)}, or NAME:LABEL")
        if name in engines:
            raise ValueError(f"--engine {name} is given twice; give one a label, such as {name}:b")
        if not os.access(python, os.X_OK):
            raise ValueError(f"--engine {name}: {python} is no interpreter that can be run")
        engines[name] = python
    return engines


def parse_options(pairs: Sequence[str], engines: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Engine → keyword arguments of its constructor; raises `ValueError`."""
    options: dict[str, dict[str, Any]] = {name: {} for name in engines}
    for pair in pairs:
        left, separator, text = pair.partition("=")
        name, dot, key = left.rpartition(".")
        if not separator or not dot or name not in options:
            raise ValueError(f"--option {pair}: write ENGINE.KEY=VALUE with an engine of {', '.join(engines)}")
        try:
            options[name][key] = json.loads(text)
        except json.JSONDecodeError:
            options[name][key] = text
    return options


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="model folder with a tokenizer.json")
    p.add_argument("--engine", action="append", required=True, metavar="NAME=PYTHON", help="repeat for more")
    p.add_argument("--option", action="append", default=[], metavar="ENGINE.KEY=VALUE", help="repeat for more")
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    p.add_argument("--prompts", type=int, default=32, help="prompts at once (default %(default)s)")
    p.add_argument("--prompt-tokens", type=int, default=150, help="mean length of a prompt (default %(default)s)")
    p.add_argument("--spread", type=float, default=0.2, help="lengths differ by up to this share (default %(default)s)")
    p.add_argument("--output-tokens", type=int, default=64, help="for each prompt (default %(default)s)")
    p.add_argument("--rounds", type=int, default=2, help="starts of every engine, in turn (default %(default)s)")
    p.add_argument("--repeats", type=int, default=3, help="timings in one start (default %(default)s)")
    p.add_argument("--min-ratio", type=float, help="least ratio of --subject to the best other engine")
    p.add_argument("--subject", default="nobiru", help="the engine that --min-ratio judges (default %(default)s)")
    p.add_argument("--timeout", type=float, default=600, help="seconds for one start (default %(default)s)")
    p.add_argument("--work-dir", type=Path, help="folder for jobs and logs (default: a new temporary one)")
    p.add_argument("--seed", type=int, default=0)
    return p


def check_arguments(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Engines and their options; raises `ValueError`."""
    engines = parse_engines(args.engine)
    for name in ("prompts", "prompt_tokens", "output_tokens", "rounds", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.spread < 1:
        raise ValueError("--spread must be from 0 to below 1")
    if not (args.model / "tokenizer.json").is_file():
        raise ValueError(f"--model {args.model} has no tokenizer.json")
    if args.min_ratio is not None and (args.subject not in engines or len({e.partition(":")[0] for e in engines}) < 2):
        raise ValueError(f"--min-ratio needs --subject {args.subject} and another engine")
    return engines, parse_options(args.option, engines)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole comparison; returns the report."""
    engines, options = check_arguments(args)
    work_dir = args.work_dir or Path(tempfile.mkdtemp(prefix="generate_peers_"))
    work_dir.mkdir(parents=True, exist_ok=True)
    results = {name: EngineResult() for name in engines}
    failures: list[str] = []
    busy: list[float] = []
    prompts = Prompts(source_token_ids(args.model), mean=args.prompt_tokens, spread=args.spread, seed=args.seed)
    warm_up = prompts.take(args.prompts)
    repeats = make_repeats(prompts, num_prompts=args.prompts, num_repeats=args.repeats)
    job = {"model": str(args.model.resolve()), "dtype": args.dtype, "output_tokens": args.output_tokens}
    job |= {"warm_up": warm_up, "repeats": repeats}
    print(f"jobs and logs: {work_dir}", flush=True)
    for number in range(args.rounds):
        for name, python in engines.items():
            busy.append(round(busy_cores(), 2))
            print(f"round {number + 1}: {name} (other work keeps {busy[-1]:.1f} cores busy)", flush=True)
            full = {**job, "options": options[name]}
            try:
                found = run_engine(name, python, full, work_dir=work_dir, timeout_s=args.timeout)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failures.append(f"{name}: start {number + 1} ran")
                continue
            add_start(results[name], found, repeats, args.output_tokens)
    return report(args, {name: result for name, result in results.items() if result.startup_s}, failures, busy)


def report(
    args: argparse.Namespace, results: Mapping[str, EngineResult], failures: Sequence[str], busy: Sequence[float]
) -> dict[str, Any]:
    """Print the table; everything measured, as JSON has it."""
    first = args.subject if args.subject in results else next(iter(results), None)
    agreements = {
        f"{first} and {name}": agreement(results[first].outputs, result.outputs)
        for name, result in results.items()
        if first is not None and name != first
    }
    print_results(results, agreements)
    checks = judge(args, results, failures)
    for name, held in checks.items():
        if not held:
            print(f"FAILED {name}", flush=True)
    shape = ("dtype", "prompts", "prompt_tokens", "spread", "output_tokens", "rounds", "repeats", "seed")
    return {
        "ok": bool(results) and all(checks.values()),
        "checks": checks,
        "model": args.model.resolve().name,
        **{name: getattr(args, name) for name in shape},
        "engines": {
            name: {
                "medians": {each: round(result.median(each), 1) for each in MEASURES if result.rates[each]},
                "rates": {each: [round(rate, 1) for rate in rates] for each, rates in result.rates.items()},
                "startup_s": [round(seconds, 1) for seconds in result.startup_s],
                "peak_rss_mib": [round(size / 2**20) for size in result.peak_rss_bytes],
                "cores_used": [round(cores, 2) for cores in result.cores_used],
            }
            for name, result in results.items()
        },
        "ratios_to_best_other": ratios_to_best_other(results),
        "agreement": agreements,
        "other_busy_cores": busy,
    }


def main() -> int:
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that run_engine ends its worker
    try:
        result = run(args)
    except ValueError as error:
        print(f"generate_peers: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
