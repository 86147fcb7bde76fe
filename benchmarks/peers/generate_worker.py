"""One engine in its own interpreter: started, warmed up, timed. `generate_peers.py` runs `PY generate_worker.py JOB`.

Owns how each engine is started and asked. The job (JSON) names the engine, the model and the prompts as token ids; the
result is written to the file that the job names. Imports the standard library and the engine, nothing of nobiru else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Prompts as token ids and how many tokens each gets, in; output token ids, out. Greedy, and no token ends a text.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def start_nobiru(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    from nobiru import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, **options)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def start_vllm(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, as nobiru's LLM
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, **options)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(inputs, params, use_tqdm=False)]

    return generate


def start_hf(model: str, dtype: str, options: dict[str, Any]) -> Generate:
    """`transformers`: all prompts as one batch, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **options).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            found = decoder.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return found[:, longest:].tolist()

    return generate


ENGINES = {"nobiru": start_nobiru, "vllm": start_vllm, "hf": start_hf}


class Timer:
    """Wall and processor seconds of calls of `generate`."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.wall_s = self.cpu_s = 0.0

    def __call__(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        outputs = self.generate(prompts, num_tokens)
        took_s = time.perf_counter() - wall_s
        self.wall_s += took_s
        self.cpu_s += time.process_time() - cpu_s
        return outputs, took_s


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first answer since `spawned_s`, then the timings of every round of prompts, in turn."""
    generate = ENGINES[job["engine"]](job["model"], job["dtype"], job["options"])
    generate([job["warm_up"][0]], 1)
    startup_s = time.monotonic() - job["spawned_s"]
    num_tokens = job["output_tokens"]
    generate(job["warm_up"], min(num_tokens, 8))
    timer, repeats = Timer(generate), []
    for prompts in job["repeats"]:
        outputs, batch_s = timer(prompts["batch"], num_tokens)
        _, prefill_s = timer(prompts["prefill"], 1)
        alone, single_s = timer([prompts["single"]], num_tokens)
        _, first_s = timer([prompts["first"]], 1)
        repeats.append(
            {
                "outputs": outputs + alone,
                "batch_s": batch_s,
                "prefill_s": prefill_s,
                "single_s": single_s,
                "first_s": first_s,
            }
        )
    return {
        "startup_s": startup_s,
        "repeats": repeats,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cores_used": timer.cpu_s / timer.wall_s,
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["result"]).write_text(json.dumps(measure(job)))
    sys.stdout.flush()
    os._exit(0)  # some engines hang or complain in their exit handlers; the result is on disk


if __name__ == "__main__":
    main()
