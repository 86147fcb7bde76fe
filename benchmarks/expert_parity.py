"""Texts of a Mixture-of-Experts model spread over ranks, against `transformers`, and what many requests leave behind.

    python -m benchmarks.expert_parity MODEL_FOLDER [--layouts dp1,dp2,dp4,tp2,dp2tp2] [--prompts 16] [--tokens 48]
    python -m benchmarks.expert_parity MODEL_FOLDER --aborts 500

For each layout a `nobiru serve` is started in float32: N data-parallel ranks of T workers, experts spread over them.
Names may end in `+red2` (two redundant experts a layer), `+eplb` (a rebalance every few steps) and `+ray` (actors on
the two nodes of a Ray cluster that is started here). Prompts are sent all at once, twice. Every chosen token must be
the reference's best on the same text, or within 1e-3 of it, and its log-probability within 1e-4. A file `expected.json`
beside the folder that has the model's name adds its prompt, whose text has to be the one that is written there. With
`--work-dir` the reference and results are kept in that folder, and layouts that have agreed are not run again. No
layout is begun then after `--seconds`, so that a long list may be run in pieces; what was left makes the exit code 1.

With `--aborts` so many requests are sent over some seconds, and two fifths of the clients leave in the middle; the
others' texts must be those of an undisturbed run, and no KV block may be left. In the end the server is killed, by
SIGKILL, under load, and no process may be left.

The last line is JSON; the exit code is 0 if everything agrees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.generate_parity import Reference, compare, load_reference, make_prompts, reference_texts
from nobiru import CompletionOutput, RequestOutput
from nobiru.generation import SampledToken

LAYOUTS = "dp1,dp2,dp4,dp2+red2,dp4+red2,dp2+red2+eplb,dp4+eplb"
READY_TIMEOUT_S = 180.0
GONE_TIMEOUT_S = 10.0
NODE_CPUS = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a server is started."""

    name: str
    ray_address: str | None = None

    @property
    def is_on_ray(self) -> bool:
        return "ray" in self.name.split("+")

    @property
    def arguments(self) -> list[str]:
        base, *extras = self.name.split("+")
        found = re.fullmatch(r"(?:dp(\d+))?(?:tp(\d+))?", base)
        if found is None or not base:
            raise SystemExit(f"layout {self.name!r}: expected dpN, tpT or dpNtpT, with +redK, +eplb, +ray")
        arguments = ["--enable-expert-parallel", "--data-parallel-size", found[1] or "1"]
        if found[2]:
            arguments += ["--tensor-parallel-size", found[2]]
        for extra in extras:
            if extra.startswith("red"):
                arguments += ["--num-redundant-experts", extra.removeprefix("red")]
            elif extra == "eplb":
                arguments += ["--enable-eplb", "--eplb-step-interval", "8", "--eplb-window-size", "32"]
            elif extra == "ray":
                assert self.ray_address is not None, "a cluster was started"
                arguments += ["--data-parallel-backend", "ray", "--ray-address", self.ray_address, "--num-threads", "1"]
        return arguments


@contextmanager
def ray_cluster() -> Iterator[str]:
    """The address of a cluster on this machine: a head that runs nothing, and two nodes with room for four ranks."""
    from ray.cluster_utils import Cluster

    small = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=NODE_CPUS, **small)
        yield cluster.address
    finally:
        cluster.shutdown()


class Server:
    """A started `nobiru serve`; ended by a signal, and checked to be gone, at the end of its block."""

    def __init__(self, folder: Path, arguments: list[str], *, end: signal.Signals = signal.SIGTERM) -> None:
        self._end = end
        command = [sys.executable, "-m", "nobiru", "serve", str(folder), "--port", "0", "--dtype", "float32"]
        self.process = subprocess.Popen(
            [*command, "--kv-cache-memory-bytes", "200000000", "--max-model-len", "512", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = ""
        self.num_gone = 0

    async def __aenter__(self) -> Server:
        assert self.process.stderr is not None
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not self.url:
            line = await asyncio.to_thread(self.process.stderr.readline)
            self.log.append(line)
            if not line or time.monotonic() > deadline_s:
                raise SystemExit(f"the server did not start: {''.join(self.log)}")
            if found := re.search(r"listens on (http://[^ ,]+)", line):
                self.url = found[1]
        self._drain = asyncio.create_task(asyncio.to_thread(self._read_on))
        async with httpx.AsyncClient() as client:
            while not await self._is_ready(client):
                if time.monotonic() > deadline_s or self.process.poll() is not None:
                    self.process.kill()
                    raise SystemExit(f"the server is not ready: {''.join(self.log)}")
                await asyncio.sleep(0.1)
        return self

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.url}/ready")).status_code == 200
        except httpx.ConnectError:
            return False

    def _read_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    async def __aexit__(self, *error: object) -> None:
        pids = [rank["pid"] for rank in (await self.status())["ranks"]]
        pids += [pid for pid in descendants(self.process.pid) if pid not in pids and "nobiru" in command_of(pid)]
        self.process.send_signal(self._end)
        try:
            code = await asyncio.to_thread(self.process.wait, 60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit(f"the server did not end within 60 s of {self._end.name}") from None
        await self._drain
        deadline_s = time.monotonic() + GONE_TIMEOUT_S
        while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        if code != (0 if self._end == signal.SIGTERM else -self._end) or left:
            raise SystemExit(f"the server ended with {code} and left processes {left}")
        self.num_gone = len(pids)

    async def status(self) -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            answer: dict[str, Any] = (await client.get(f"{self.url}/elastic/status")).json()
        return answer


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    found = []
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *descendants(child)]
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def complete(client: httpx.AsyncClient, url: str, prompt: list[int], num_tokens: int) -> RequestOutput:
    """One greedy completion with the log-probability of each token."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    answer = await client.post(f"{url}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    logprobs = [
        SampledToken(token_id, logprob)
        for token_id, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    ]
    output = CompletionOutput(index=0, text=choice["text"], token_ids=choice["token_ids"], logprobs=logprobs)
    return RequestOutput(prompt=None, prompt_token_ids=prompt, outputs=[output])


class WorkDir:
    """What was computed before: the reference of a model, and the results of layouts that agreed with it."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._reference = None if folder is None else folder / f"{name}-reference.json"
        self._results = None if folder is None else folder / f"{name}-results.json"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def reference(self, model: Any, prompts: list[list[int]], num_tokens: int) -> Reference:
        """That of exactly these prompts."""
        if self._reference is not None and self._reference.exists():
            kept = Reference(**json.loads(self._reference.read_text()))
            if kept.prompts == prompts and len(kept.tokens[0]) == num_tokens:
                return kept
        reference = reference_texts(model, prompts, num_tokens)
        if self._reference is not None:
            self._reference.write_text(json.dumps({"prompts": reference.prompts, "tokens": reference.tokens}))
        return reference

    def results(self) -> dict[str, dict[str, Any]]:
        """By layout."""
        if self._results is None or not self._results.exists():
            return {}
        results: dict[str, dict[str, Any]] = json.loads(self._results.read_text())
        return results

    def keep(self, result: dict[str, Any]) -> None:
        if self._results is not None and result["ok"]:
            self._results.write_text(json.dumps({**self.results(), result["layout"]: result}, indent=1))


def expected_text(folder: Path) -> tuple[list[int], list[int]] | None:
    """The prompt and greedy text that `expected.json` beside the model has for it."""
    path = folder.resolve().parent / "expected.json"
    known = json.loads(path.read_text()).get(folder.resolve().name) if path.exists() else None
    return (known["prompt_token_ids"], known["greedy_token_ids"]) if known else None


async def run_layout(
    folder: Path, layout: Layout, reference: Reference, model: Any, expected: list[int] | None
) -> dict[str, Any]:
    started_s = time.perf_counter()
    async with Server(folder, layout.arguments) as server, httpx.AsyncClient() as client:
        num_tokens = len(reference.tokens[0])
        agreements = []
        as_expected = True
        for _ in range(2):
            work = [complete(client, server.url, prompt, num_tokens) for prompt in reference.prompts]
            outputs = await asyncio.gather(*work)
            agreements.append(compare(layout.name, outputs, reference, model))
            first = outputs[0].outputs[0].token_ids
            as_expected = as_expected and (expected is None or first == expected[:num_tokens])
        placement = (await server.status()).get("placement", {})
    return {
        "layout": layout.name,
        "ok": as_expected and all(each.ok for each in agreements),
        "equal_texts": [each.num_equal_texts for each in agreements],
        "as_expected": None if expected is None else as_expected,
        "near_ties": [each.num_excused for each in agreements],
        "worst_gap": max(each.worst_gap for each in agreements),
        "worst_logprob": max(each.worst_logprob for each in agreements),
        "rebalances": placement.get("num_rebalances", 0),
        "bytes_moved": placement.get("bytes_moved", 0),
        "balancedness": placement.get("balancedness"),
        "seconds": round(time.perf_counter() - started_s, 1),
    }


async def run_aborts(folder: Path, layout: Layout, prompts: list[list[int]], count: int, tokens: int) -> dict[str, Any]:
    """Many requests, of which two fifths are abandoned by their clients."""
    chance = random.Random(0)
    server = Server(folder, layout.arguments, end=signal.SIGKILL)
    async with server, httpx.AsyncClient(limits=httpx.Limits(max_connections=64)) as client:
        alone = [(await complete(client, server.url, prompt, tokens)).outputs[0].token_ids for prompt in prompts]
        wrong = 0

        async def one(number: int) -> None:
            nonlocal wrong
            await asyncio.sleep(chance.random() * 20)
            place = number % len(prompts)
            if chance.random() < 0.4:
                try:
                    async with asyncio.timeout(chance.random()):
                        await complete(client, server.url, prompts[place], tokens)
                except TimeoutError:
                    return
            else:
                output = await complete(client, server.url, prompts[place], tokens)
                wrong += output.outputs[0].token_ids != alone[place]

        async with asyncio.timeout(600):
            await asyncio.gather(*(one(number) for number in range(count)))
        usage = await _kv_usage(client, server.url)
        epoch = (await server.status())["epoch"]
        last = [asyncio.create_task(complete(client, server.url, prompt, tokens)) for prompt in prompts]
        await asyncio.sleep(0.3)
    await asyncio.gather(*last, return_exceptions=True)  # the server was killed
    return {
        "layout": layout.name,
        "requests": count,
        "wrong": wrong,
        "kv_usage": usage,
        "epoch": epoch,
        "processes_gone": server.num_gone,
        "ok": wrong == 0 and usage == 0.0,
    }


async def _kv_usage(client: httpx.AsyncClient, url: str) -> float:
    """The share of KV blocks that are held; when all requests have ended, it falls to 0 within moments."""
    usage = 1.0
    for _ in range(100):
        found = re.search(r"^nobiru_kv_cache_usage_ratio (\S+)", (await client.get(f"{url}/metrics")).text, re.M)
        usage = float(found[1]) if found else 1.0
        if usage == 0.0:
            break
        await asyncio.sleep(0.1)
    return usage


def run_layouts(options: argparse.Namespace, layouts: list[Layout], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Those that were not run before."""
    work_dir = WorkDir(options.work_dir, options.model.name)
    model = load_reference(options.model)
    prompt, text = expected_text(options.model) or (None, None)
    if prompt is not None:
        prompts = [prompt, *prompts]
    reference = work_dir.reference(model, prompts, options.tokens)
    results = []
    end_s = time.monotonic() + (options.seconds if options.work_dir else math.inf)
    for layout in layouts:
        if (result := work_dir.results().get(layout.name)) is None:
            if time.monotonic() > end_s:
                continue
            result = asyncio.run(run_layout(options.model, layout, reference, model, text))
            work_dir.keep(result)
        results.append(result)
        print(result, file=sys.stderr, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--aborts", type=int, default=0)
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    prompts = [tokenizer(text)["input_ids"] for text in make_prompts(options.prompts)]
    layouts = [Layout(name=name) for name in options.layouts.split(",")]
    with ray_cluster() if any(layout.is_on_ray for layout in layouts) else nullcontext() as address:
        layouts = [replace(layout, ray_address=address) for layout in layouts]
        if options.aborts:
            work = [run_aborts(options.model, each, prompts, options.aborts, options.tokens) for each in layouts]
            results = [asyncio.run(each) for each in work]
        else:
            results = run_layouts(options, layouts, prompts)
    table = Table(*results[0], title=options.model.name)
    for each in results:
        table.add_row(
            *(f"{value:.1e}" if isinstance(value, float) and value < 0.01 else str(value) for value in each.values())
        )
    Console().print(table)
    ok = len(results) == len(layouts) and all(each["ok"] for each in results)
    print(json.dumps({"model": options.model.name, "ok": ok, "results": results}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
