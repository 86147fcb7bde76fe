"""The limits of a step, from the engine's options and the model folder.

Pure, so that the HTTP process and the rank come to the same numbers.
"""

from __future__ import annotations

from nobiru.config import EngineConfig, SchedulerConfig
from nobiru.errors import ConfigError
from nobiru.folder.spec import ModelFolder

# A step's tokens where the user does not say. A CPU is busy with 1,024 tokens; with twice as many it is some per cent
# faster, and everybody waits twice as long. Without anybody who waits, the few per cent count; and a server's encoder
# takes as many as it computes in a tenth of a second, if those are more.
SERVER_TOKEN_BUDGET = 1024
SERVER_STEP_S = 0.1
MAX_TIMED_TOKEN_BUDGET = 4096
OFFLINE_TOKEN_BUDGET = 2048
CUDA_TOKEN_BUDGET = 16384
# Between two steps of a generating model many people wait for their next token, which a prefill must not delay long.
SERVER_GENERATION_TOKEN_BUDGET = 512
CUDA_GENERATION_TOKEN_BUDGET = 8192


def default_token_budget(folder: ModelFolder, *, default: int, on_cuda: bool) -> int:
    """The tokens of a step when the user does not say; `default` is the number for encoders on a CPU."""
    if folder.task == "generate":
        on_cpu = SERVER_GENERATION_TOKEN_BUDGET if default == SERVER_TOKEN_BUDGET else default
        return CUDA_GENERATION_TOKEN_BUDGET if on_cuda else on_cpu
    return CUDA_TOKEN_BUDGET if on_cuda else default


def timed_token_budget(tokens_per_s: float, step_s: float, *, least: int) -> int:
    """The tokens that take about `step_s`, rounded down, but not fewer than `least` and not too many."""
    fitting = min(int(tokens_per_s * step_s), MAX_TIMED_TOKEN_BUDGET)
    return max(least, fitting - fitting % 256)


def scheduler_config(config: EngineConfig, folder: ModelFolder, *, default_budget: int) -> SchedulerConfig:
    """The scheduler's limits; `ConfigError` when the longest text would not fit into a step.

    A causal model's text need not: its prefill is cut to what a step takes.
    """
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = default_budget if folder.is_causal else max(default_budget, folder.max_model_len)
    if budget < folder.max_model_len and not folder.is_causal:
        raise ConfigError(
            f"max_num_batched_tokens is {budget}, but a text may have {folder.max_model_len} tokens (max_model_len) "
            f"and must fit into one step; raise the first or lower the second",
            param="max_num_batched_tokens",
        )
    return SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=config.max_num_seqs,
        policy=config.scheduling_policy,
        prefix_caching=config.enable_prefix_caching,
    )
