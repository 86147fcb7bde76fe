"""Options, resolved once, frozen, keyword-only.

Owns names, defaults and bounds of every option. Knows nothing of where a value came from: `nobiru.env` reads the
environment, `nobiru.cli` the command line.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from nobiru.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["priority", "fcfs"]
DataParallelBackend = Literal["local", "ray"]
Quantization = Literal["int8"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one step and the order of service; see `nobiru.scheduler`.

    For `hurry_s` after a sequence has passed less urgent ones, steps of encoders take `hurried_step_tokens` at most, if
    that is set.
    """

    max_num_batched_tokens: int = 2048
    hurried_step_tokens: int | None = None
    hurry_s: float = 10.0
    max_num_seqs: int = 256
    policy: SchedulingPolicy = "priority"
    lookahead: int = 64
    age_limit_s: float = 10.0
    min_step_tokens: int = 32
    prefix_caching: bool = True


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank needs to load a model and serve it. `model` is a resolved local folder.

    The KV cache of causal models is `kv_cache_memory_bytes` large, or the share `kv_cache_memory_share` of the memory
    that is free once the weights are loaded, in blocks of `block_size` tokens. With `async_scheduling` a step is
    planned while the one before runs; None: on CUDA, where the device need not wait for it then.
    `quantization` "int8" makes integers of the weights of an encoder, on a CPU.

    A server runs `data_parallel_size` ranks, each of `tensor_parallel_size` worker processes among which a decoder's
    heads, columns, vocabulary and experts are spread. With `enable_expert_parallel` the workers of all ranks spread the
    experts of a Mixture-of-Experts model among them, and `num_redundant_experts` more copies of them in each layer.
    `enable_eplb` moves experts to where they balance the load of the last `eplb_window_size` steps, every
    `eplb_step_interval` steps. A rank sends at most `max_transfer_bytes_per_s` for that, and reads no faster for a
    planned change of the ranks. A step of the ranks together
    that takes `step_timeout_s` has failed.

    The ranks are processes of this machine, or with the `data_parallel_backend` ray actors of the Ray cluster at
    `ray_address` (None: the one that runs here, or a new one), with `num_threads` CPUs each (None: as many as there are
    for each).
    """

    model: str
    dtype: Dtype = "auto"
    device: Device = "auto"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    quantization: Quantization | None = None
    scheduling_policy: SchedulingPolicy = "priority"
    num_threads: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_memory_share: float | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    num_redundant_experts: int = 0
    enable_eplb: bool = False
    eplb_window_size: int = 1000
    eplb_step_interval: int = 3000
    max_transfer_bytes_per_s: int | None = None
    step_timeout_s: float = 30.0
    max_data_parallel_size: int | None = None
    min_survivable_size: int = 1
    self_heal: bool = True
    data_parallel_backend: DataParallelBackend = "local"
    ray_address: str | None = None

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, get_args(Dtype))
        _choice("device", self.device, get_args(Device))
        _choice("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        if self.quantization is not None:
            _choice("quantization", self.quantization, get_args(Quantization))
        _choice("data_parallel_backend", self.data_parallel_backend, get_args(DataParallelBackend))
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("num_threads", self.num_threads, 1)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _at_least("block_size", self.block_size, 1)
        for name in ("data_parallel_size", "tensor_parallel_size", "eplb_window_size", "eplb_step_interval"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_redundant_experts", self.num_redundant_experts, 0)
        _at_least("max_transfer_bytes_per_s", self.max_transfer_bytes_per_s, 1)
        if not self.step_timeout_s > 0:
            raise ConfigError(f"step_timeout_s is {self.step_timeout_s}; it must be above 0", param="step_timeout_s")
        share = self.kv_cache_memory_share
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"kv_cache_memory_share is {share}; it must be above 0 and at most 1", param="kv_cache_memory_share"
            )

    @property
    def max_size(self) -> int:
        """The most ranks that may be asked for while serving; if nobody has said, there may be room for more."""
        return self.max_data_parallel_size or max(8, self.data_parallel_size)


class AutoscaleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the number of ranks follows the load; see `nobiru.elastic.autoscale`.

    It stays between `min_size` and `max_size`. It grows when the estimated wait has been above `target_wait_s` for
    `up_after_s`, and shrinks when that has been low for `down_after_s`. After an operation of whoever it neither grows
    for `up_cooldown_s` nor shrinks for `down_cooldown_s`. With `dry_run` decisions are told and not carried out.
    """

    min_size: int
    max_size: int
    target_wait_s: float = 2.0
    up_after_s: float = 2.0
    down_after_s: float = 60.0
    up_cooldown_s: float = 10.0
    down_cooldown_s: float = 60.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, value in (("min", self.min_size), ("max", self.max_size)):
            if isinstance(value, bool) or value < 1:
                raise _bad_autoscale(f"{name} is {value}; it must be at least 1")
        if self.min_size > self.max_size:
            raise _bad_autoscale(f"min is {self.min_size}; it must be at most max = {self.max_size}")
        if not 0 < self.target_wait_s < math.inf:
            raise _bad_autoscale(f"target_wait_s is {self.target_wait_s:g}; it must be above 0 and finite")
        for name in ("up_after_s", "down_after_s", "up_cooldown_s", "down_cooldown_s"):
            value_s = getattr(self, name)
            if not 0 <= value_s < math.inf:
                raise _bad_autoscale(f"{name} is {value_s:g}; it must be at least 0 and finite")

    @classmethod
    def parse(cls, text: str) -> AutoscaleConfig:
        """From the value of `--autoscale`, such as "min=1,max=8,target_wait_s=2". Raises `ConfigError`."""
        names = {"min": "min_size", "max": "max_size", **{name: name for name in cls.__struct_fields__[2:]}}
        given: dict[str, str] = {}
        for piece in filter(None, map(str.strip, text.split(","))):
            name, equals, value = map(str.strip, piece.partition("="))
            if name not in names or not equals:
                raise _bad_autoscale(f"{piece!r} is none of {', '.join(f'{known}=…' for known in names)}")
            if name in given:
                raise _bad_autoscale(f"{name} is given twice")
            given[name] = value
        if missing := [name for name in ("min", "max") if name not in given]:
            raise _bad_autoscale(f"{' and '.join(missing)} must be given, as in min=1,max=8")
        kinds = {field.name: field.type for field in msgspec.structs.fields(cls)}
        fields: dict[str, Any] = {}
        for name, value in given.items():
            kind = kinds[names[name]]
            try:
                fields[names[name]] = msgspec.convert(value, kind, strict=False)
            except msgspec.ValidationError:
                must_be = {int: "an integer", float: "a number", bool: "true or false"}[kind]
                raise _bad_autoscale(f"{name} is {value!r}; it must be {must_be}") from None
        return cls(**fields)

    def check_with(self, engine: EngineConfig) -> None:
        """Raises `ConfigError` when the ranks cannot follow: these sizes are not among those of `engine`."""
        if self.max_size > engine.max_size:
            raise _bad_autoscale(
                f"max is {self.max_size}; at most max_data_parallel_size = {engine.max_size} ranks may serve"
            )
        if self.min_size < engine.min_survivable_size:
            raise _bad_autoscale(
                f"min is {self.min_size}; at least min_survivable_size = {engine.min_survivable_size} ranks must serve"
            )
        if not self.min_size <= engine.data_parallel_size <= self.max_size:
            raise _bad_autoscale(
                f"data_parallel_size, with which the server begins, is {engine.data_parallel_size}; it must be from "
                f"min = {self.min_size} to max = {self.max_size}"
            )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the HTTP process needs beside the engine's options. `autoscale` is as `AutoscaleConfig.parse` takes it."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    drain_by_default: bool = False
    autoscale: str | None = None
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0
    auto_truncate: bool = False
    max_queued_tokens: int = 1_000_000
    shutdown_timeout_s: float = 30.0
    rank_timeout_s: float = 10.0
    max_start_failures: int = 5
    access_log: bool = False
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be from 0 to 65535", param="port")
        for name in ("max_body_bytes", "max_queued_tokens", "max_start_failures"):
            _at_least(name, getattr(self, name), 1)
        for name in ("shutdown_timeout_s", "body_timeout_s", "rank_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0", param=name)
        _choice("log_format", self.log_format, ("text", "json"))
        _choice("log_level", self.log_level.lower(), ("debug", "info", "warning", "error", "critical"))
        if self.autoscale is not None:
            AutoscaleConfig.parse(self.autoscale)

    def model_names(self, folder_name: str) -> tuple[str, ...]:
        """Of the model in the API; answers give the first."""
        return self.served_model_names or (folder_name,)

    @property
    def autoscaling(self) -> AutoscaleConfig | None:
        """How the number of ranks follows the load; None: not at all."""
        return None if self.autoscale is None else AutoscaleConfig.parse(self.autoscale)


def _bad_autoscale(message: str) -> ConfigError:
    return ConfigError(f"autoscale: {message}", param="autoscale")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose from {', '.join(allowed)}", param=name)


def _at_least(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}", param=name)
