"""Options as the command line and the environment name them, and how they become the fields of a config.

Owns names and help texts. Defaults and bounds belong to `nobiru.config`; an option not given is None here, and its
default is only shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer

from nobiru import env
from nobiru.cli.rows import FORMATS
from nobiru.config import EngineConfig, ServerConfig

MODEL, BATCHING, PARALLEL, CACHE = "Model", "Batching", "Parallelism", "KV cache"
HTTP, LIMITS, LOGS = "HTTP", "Limits", "Logs"
DEFAULT_BATCH_ROWS = 512
INPUT, OUTPUT, VECTORS = "Input", "Output", "Vectors"

Config = type[EngineConfig] | type[ServerConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOption:
    """The option `--name` (`NOBIRU_NAME`) that sets `field` of `config`."""

    name: str
    config: Config
    field: str
    secret: bool = False

    def for_environment(self) -> env.Option:
        kind: Any = get_type_hints(self.config)[self.field]
        without_none = [each for each in get_args(kind) if each is not type(None)]
        if type(None) in get_args(kind) and len(without_none) == 1:
            kind = without_none[0]
        return env.Option(name=self.name, type=kind, check=self._check, secret=self.secret)

    def _check(self, value: object) -> None:
        required: dict[str, Any] = {"model": "-"} if self.config is EngineConfig else {}
        self.config(**{**required, self.field: value})


def _same_name(config: Config, *names: str) -> tuple[ConfigOption, ...]:
    return tuple(ConfigOption(name=name, config=config, field=name) for name in names)


ENGINE_OPTIONS = _same_name(
    EngineConfig,
    "model",
    "dtype",
    "device",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "quantization",
    "scheduling_policy",
    "num_threads",
    "kv_cache_memory_bytes",
    "kv_cache_memory_share",
    "block_size",
    "enable_prefix_caching",
    "async_scheduling",
)
SERVER_OPTIONS = (
    *_same_name(
        EngineConfig, "data_parallel_size", "tensor_parallel_size", "enable_expert_parallel", "num_redundant_experts"
    ),
    *_same_name(EngineConfig, "enable_eplb", "eplb_window_size", "eplb_step_interval"),
    *_same_name(EngineConfig, "max_transfer_bytes_per_s", "step_timeout_s"),
    *_same_name(EngineConfig, "data_parallel_backend", "ray_address"),
    *_same_name(ServerConfig, "host", "port", "max_body_bytes", "auto_truncate", "max_queued_tokens"),
    *_same_name(ServerConfig, "rank_timeout_s", "access_log", "log_format", "log_level"),
    ConfigOption(name="served_model_name", config=ServerConfig, field="served_model_names"),
    ConfigOption(name="admin_key", config=ServerConfig, field="admin_keys", secret=True),
    ConfigOption(name="elastic_ep_drain_requests", config=ServerConfig, field="drain_by_default"),
    *_same_name(EngineConfig, "max_data_parallel_size", "min_survivable_size", "self_heal"),
    *_same_name(ServerConfig, "autoscale"),
    ConfigOption(name="api_key", config=ServerConfig, field="api_keys", secret=True),
    ConfigOption(name="shutdown_timeout", config=ServerConfig, field="shutdown_timeout_s"),
)
SERVE_OPTIONS = (*ENGINE_OPTIONS, *SERVER_OPTIONS)
EMBED_OPTIONS = tuple(
    env.Option(name=name, type=kind)
    for name, kind in {
        "format": str,
        "text_column": str,
        "id_column": str,
        "skip_bad_rows": bool,
        "output": str,
        "overwrite": bool,
        "batch_rows": int,
        "prompt_name": str,
        "prompt": str,
        "dimensions": int,
        "normalize": bool,
    }.items()
)


def fields_of(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, by option name, that set fields of `config`, by field name; lists as tuples."""
    fields = {option.name: option.field for option in SERVE_OPTIONS if option.config is config}
    return {
        fields[name]: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in fields and value is not None
    }


def with_environment(
    explicit: Mapping[str, Any], options: Iterable[ConfigOption | env.Option]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Explicit options completed by the environment's, and warnings about variables that cannot be used."""
    wanted = [option.for_environment() if isinstance(option, ConfigOption) else option for option in options]
    everything = [*(option.name for option in SERVE_OPTIONS), *(option.name for option in EMBED_OPTIONS)]
    found = env.read_options(wanted, other_names=everything)
    # Typer gives an empty list for a repeatable option that is absent.
    given = {name: None if value == [] else value for name, value in explicit.items()}
    return env.resolve(given, found.values), found.warnings


def say(message: str, *, level: str = "warning", as_json: bool = False) -> None:
    """One line for the user on standard error."""
    line = msgspec.json.encode({"level": level, "message": message}).decode() if as_json else f"nobiru: {message}"
    print(line, file=sys.stderr, flush=True)


def _default(config: Config, field: str) -> str:
    names, defaults = config.__struct_fields__, config.__struct_defaults__
    value = defaults[names.index(field) - len(names) + len(defaults)]
    return f"{value:,g}" if isinstance(value, float) else str(value)


def _option(panel: str, help_text: str, default: str, *flags: str) -> Any:
    return typer.Option(*flags, help=f"{help_text} Default: {default}.", rich_help_panel=panel)


def _engine(field: str) -> str:
    return _default(EngineConfig, field)


def _server(field: str) -> str:
    return _default(ServerConfig, field)


# ---- options of both commands ----------------------------------------------------------------------------------------

MODEL_HELP = "A model folder, or a name in the local cache or on the hub."
MODEL_DEFAULT = "the packaged all-MiniLM-L6-v2"

Dtype = Annotated[
    str | None,
    _option(
        MODEL,
        "auto, float32, bfloat16, float16. auto: bfloat16 where the device computes it fast, else float32.",
        "auto",
    ),
]
Device = Annotated[str | None, _option(MODEL, "auto, cpu or cuda.", "auto")]
Quantization = Annotated[
    str | None, _option(MODEL, "int8: weights of an encoder in eight bits, made while loading. On a CPU.", "none")
]
MaxModelLen = Annotated[int | None, _option(MODEL, "Longest text in tokens.", "the model's limit")]
NumThreads = Annotated[
    int | None, _option(MODEL, "Threads of the arithmetic on a CPU.", "one per core, within container limits")
]
MaxNumBatchedTokens = Annotated[
    int | None,
    _option(
        BATCHING,
        "Most tokens in one batch.",
        "what takes 0.1 s on a CPU (1024 to 4096), 16384 on CUDA; language models: 512 and 8192",
    ),
]
MaxNumSeqs = Annotated[int | None, _option(BATCHING, "Most texts in one batch.", _engine("max_num_seqs"))]

# ---- options of serve ------------------------------------------------------------------------------------------------

SchedulingPolicy = Annotated[
    str | None,
    _option(
        BATCHING, "priority (lower values first, then by arrival) or fcfs (by arrival).", _engine("scheduling_policy")
    ),
]
DataParallelSize = Annotated[
    int | None,
    _option(PARALLEL, "Rank processes; without expert parallelism each has the whole model.", "1"),
]
DataParallelBackend = Annotated[
    str | None,
    _option(PARALLEL, "local (processes of this machine) or ray (actors of a Ray cluster).", "local"),
]
RayAddress = Annotated[
    str | None, _option(PARALLEL, "Address of that cluster.", "the one that runs here, or a new one")
]
TensorParallelSize = Annotated[
    int | None,
    _option(PARALLEL, "Worker processes of each rank; a decoder is spread over them.", _engine("tensor_parallel_size")),
]
EnableExpertParallel = Annotated[
    bool | None,
    _option(
        PARALLEL,
        "Spread the experts of a Mixture-of-Experts model over the ranks.",
        "no-enable-expert-parallel",
        "--enable-expert-parallel/--no-enable-expert-parallel",
    ),
]
NumRedundantExperts = Annotated[
    int | None, _option(PARALLEL, "Copies of experts beyond one of each, in every layer.", "0")
]
EnableEplb = Annotated[
    bool | None,
    _option(
        PARALLEL,
        "Move experts between ranks while serving, so that they are equally busy.",
        "no-enable-eplb",
        "--enable-eplb/--no-enable-eplb",
    ),
]
EplbWindowSize = Annotated[
    int | None, _option(PARALLEL, "Steps whose load counts for that.", _engine("eplb_window_size"))
]
EplbStepInterval = Annotated[
    int | None, _option(PARALLEL, "Steps between two looks at the balance.", _engine("eplb_step_interval"))
]
MaxTransferBytesPerS = Annotated[
    int | None, _option(PARALLEL, "Most bytes of experts a rank that serves sends or reads in a second.", "no limit")
]
MaxDataParallelSize = Annotated[
    int | None, _option(PARALLEL, "Most ranks that may be asked for while serving.", "what there is room for")
]
MinSurvivableSize = Annotated[
    int | None,
    _option(PARALLEL, "Fewest ranks that must be able to hold all experts.", _engine("min_survivable_size")),
]
SelfHeal = Annotated[
    bool | None,
    _option(PARALLEL, "Replace ranks that died.", "self-heal", "--self-heal/--no-self-heal"),
]
Autoscale = Annotated[
    str | None,
    _option(
        PARALLEL,
        "Let the number of ranks follow the load, as in min=1,max=8,target_wait_s=2: so many ranks, so that requests "
        "wait for so many seconds at most. More with up_after_s, down_after_s, up_cooldown_s, down_cooldown_s, "
        "dry_run=true.",
        "a fixed number",
    ),
]
ElasticEpDrainRequests = Annotated[
    bool | None,
    _option(
        PARALLEL,
        "Let ranks that leave finish their requests first, for up to 120 s.",
        "no-elastic-ep-drain-requests",
        "--elastic-ep-drain-requests/--no-elastic-ep-drain-requests",
    ),
]
AdminKey = Annotated[
    list[str] | None,
    _option(HTTP, "Key that changes of the ranks need; repeatable. NOBIRU_ADMIN_KEY hides it better.", "no key asked"),
]
StepTimeoutS = Annotated[
    float | None,
    _option(PARALLEL, "Seconds after which a step of the ranks together has failed.", _engine("step_timeout_s")),
]
KvCacheMemoryBytes = Annotated[
    int | None, _option(CACHE, "Memory for keys and values of a causal model.", "a share of what is free")
]
KvCacheMemoryShare = Annotated[
    float | None,
    _option(CACHE, "That share, of the memory free once the weights are loaded.", "0.3 on a CPU, 0.85 on CUDA"),
]
BlockSize = Annotated[int | None, _option(CACHE, "Tokens in a block of the cache.", _engine("block_size"))]
EnablePrefixCaching = Annotated[
    bool | None,
    _option(
        CACHE,
        "Keep what prompts have in common, and compute it once.",
        "enable-prefix-caching",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    _option(
        BATCHING,
        "Plan a batch while the one before runs.",
        "on CUDA only",
        "--async-scheduling/--no-async-scheduling",
    ),
]
ServedModelName = Annotated[
    list[str] | None, _option(HTTP, "Name in the API; repeat for aliases.", "the folder's name")
]
Host = Annotated[str | None, _option(HTTP, "Address to listen on; 0.0.0.0 for all.", _server("host"))]
Port = Annotated[int | None, _option(HTTP, "Port to listen on; 0 for any free one.", _server("port"))]
ApiKey = Annotated[
    list[str] | None,
    _option(
        HTTP,
        "Key that clients send as bearer token; repeatable. NOBIRU_API_KEY hides it better.",
        "no key asked",
    ),
]
MaxQueuedTokens = Annotated[
    int | None,
    _option(LIMITS, "Refuse requests (429, Retry-After) while more tokens are queued.", _server("max_queued_tokens")),
]
MaxBodyBytes = Annotated[int | None, _option(LIMITS, "Largest request body.", _server("max_body_bytes"))]
AutoTruncate = Annotated[
    bool | None,
    _option(
        LIMITS,
        "Cut texts over the limit instead of refusing them; the response says which.",
        "no-auto-truncate",
        "--auto-truncate/--no-auto-truncate",
    ),
]
ShutdownTimeout = Annotated[
    float | None,
    _option(LIMITS, "Seconds that accepted requests get to end after SIGTERM.", _server("shutdown_timeout_s")),
]
RankTimeoutS = Annotated[
    float | None,
    _option(LIMITS, "Seconds of silence after which a rank process is replaced.", _server("rank_timeout_s")),
]
AccessLog = Annotated[bool | None, _option(LOGS, "Log every request.", "no-access-log", "--access-log/--no-access-log")]
LogFormat = Annotated[str | None, _option(LOGS, "text or json.", _server("log_format"))]
LogLevel = Annotated[str | None, _option(LOGS, "debug, info, warning, error, critical.", _server("log_level"))]

# ---- options of embed ------------------------------------------------------------------------------------------------

Output = Annotated[
    str | None,
    _option(OUTPUT, "File to write: jsonl, npy or parquet.", "none, must be given", "--output", "-o"),
]
Overwrite = Annotated[
    bool | None,
    _option(
        OUTPUT,
        "Start anew if the output exists.",
        "continue jsonl, refuse the others",
        "--overwrite/--no-overwrite",
    ),
]
Format = Annotated[str | None, _option(INPUT, f"Format of the input: {', '.join(FORMATS)}.", "by suffix")]
TextColumn = Annotated[str | None, _option(INPUT, "Column with the texts.", "text, else the only one with texts")]
IdColumn = Annotated[
    str | None, _option(INPUT, "Column with ids, written beside the vectors.", "none, rows are numbered from 0")
]
SkipBadRows = Annotated[
    bool | None,
    _option(INPUT, "Leave out rows that cannot be read.", "fail-on-bad-rows", "--skip-bad-rows/--fail-on-bad-rows"),
]
BatchRows = Annotated[
    int | None, _option(BATCHING, "Rows read, embedded and written at a time.", str(DEFAULT_BATCH_ROWS))
]
ModelOption = Annotated[str | None, _option(MODEL, MODEL_HELP, MODEL_DEFAULT, "--model", "-m")]
PromptName = Annotated[
    str | None, _option(VECTORS, "One of the model's prompts, put before every text.", "the model's default")
]
Prompt = Annotated[str | None, _option(VECTORS, "Words put before every text; '' for none.", "as --prompt-name")]
Dimensions = Annotated[int | None, _option(VECTORS, "Keep this many values of a vector.", "all")]
Normalize = Annotated[
    bool | None, _option(VECTORS, "Scale vectors to length 1.", "as the model says", "--normalize/--no-normalize")
]
