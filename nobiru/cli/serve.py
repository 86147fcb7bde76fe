"""`nobiru serve`: options in, a running server out.

Owns turning the command line and the environment into the two configs. The server itself is `nobiru.serving`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from nobiru.cli import options
from nobiru.config import EngineConfig, ServerConfig
from nobiru.folder.resolve import DEFAULT_MODEL, resolve_model

Model = Annotated[str | None, typer.Argument(help=f"{options.MODEL_HELP} Default: {options.MODEL_DEFAULT}.")]


def serve(
    model: Model = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    quantization: options.Quantization = None,
    num_threads: options.NumThreads = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_num_seqs: options.MaxNumSeqs = None,
    scheduling_policy: options.SchedulingPolicy = None,
    async_scheduling: options.AsyncScheduling = None,
    data_parallel_size: options.DataParallelSize = None,
    data_parallel_backend: options.DataParallelBackend = None,
    ray_address: options.RayAddress = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    enable_expert_parallel: options.EnableExpertParallel = None,
    num_redundant_experts: options.NumRedundantExperts = None,
    enable_eplb: options.EnableEplb = None,
    eplb_window_size: options.EplbWindowSize = None,
    eplb_step_interval: options.EplbStepInterval = None,
    max_transfer_bytes_per_s: options.MaxTransferBytesPerS = None,
    step_timeout_s: options.StepTimeoutS = None,
    max_data_parallel_size: options.MaxDataParallelSize = None,
    min_survivable_size: options.MinSurvivableSize = None,
    self_heal: options.SelfHeal = None,
    autoscale: options.Autoscale = None,
    elastic_ep_drain_requests: options.ElasticEpDrainRequests = None,
    admin_key: options.AdminKey = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_memory_share: options.KvCacheMemoryShare = None,
    block_size: options.BlockSize = None,
    enable_prefix_caching: options.EnablePrefixCaching = None,
    served_model_name: options.ServedModelName = None,
    host: options.Host = None,
    port: options.Port = None,
    api_key: options.ApiKey = None,
    max_queued_tokens: options.MaxQueuedTokens = None,
    max_body_bytes: options.MaxBodyBytes = None,
    auto_truncate: options.AutoTruncate = None,
    shutdown_timeout: options.ShutdownTimeout = None,
    rank_timeout_s: options.RankTimeoutS = None,
    access_log: options.AccessLog = None,
    log_format: options.LogFormat = None,
    log_level: options.LogLevel = None,
) -> None:
    """Serve an embedding model or a language model over HTTP, in the way OpenAI clients expect.

    [bold]nobiru serve ./my-model[/bold]  a folder that Sentence Transformers wrote, on port 8000

    [bold]nobiru serve ./my-model --served-model-name news-v2 --host 0.0.0.0[/bold]  under a name, for other machines

    [bold]NOBIRU_API_KEY=secret nobiru serve ./my-model --auto-truncate[/bold]  with a key; long texts are cut

    The HTTP interface describes itself at http://127.0.0.1:8000/docs once the server runs.
    """
    server, engine = server_and_engine(dict(locals()))
    from nobiru.serving.start import start  # the web framework takes a second, which --help need not wait for

    sys.exit(start(server, engine))


def server_and_engine(explicit: Mapping[str, Any]) -> tuple[ServerConfig, EngineConfig]:
    """The configs for the options of the command line (None where not given) and the environment.

    Raises `ConfigError` or `ModelFolderError`. Says on standard error which variables it cannot use.
    """
    values, warnings = options.with_environment(explicit, options.SERVE_OPTIONS)
    as_json = values.get("log_format") == "json"
    for warning in warnings:
        options.say(warning, as_json=as_json)
    server = ServerConfig(**options.fields_of(ServerConfig, values))
    engine_fields = options.fields_of(EngineConfig, values)
    engine = EngineConfig(**{**engine_fields, "model": "-"})  # a bad option is told before a model is looked for
    if server.autoscaling is not None:
        server.autoscaling.check_with(engine)
    name = engine_fields.get("model")
    folder = resolve_model(name)
    if name is None:
        options.say(f"no model is given: serving {DEFAULT_MODEL} from {folder}", level="info", as_json=as_json)
    if not server.served_model_names:
        server = msgspec.structs.replace(server, served_model_names=(served_name(name, folder),))
    return server, msgspec.structs.replace(engine, model=str(folder))


def served_name(name: str | None, folder: Path) -> str:
    """The name in the API when none is chosen: a folder's own, or the name that was looked up."""
    if name is None:
        return DEFAULT_MODEL
    return folder.resolve().name if Path(name).expanduser().is_dir() else name
