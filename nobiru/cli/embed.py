"""`nobiru embed`: options in, a checked job out. The job itself is `nobiru.cli.embed_job`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nobiru.cli import options, vector_files
from nobiru.cli.embed_job import Job, Model, run
from nobiru.cli.rows import RowSource, input_format
from nobiru.config import EngineConfig
from nobiru.errors import ConfigError
from nobiru.request import PoolingParams

POOLING_OPTIONS = ("prompt_name", "prompt", "dimensions", "normalize")

Input = Annotated[
    str, typer.Argument(metavar="INPUT", help="txt, jsonl, csv, tsv or parquet file, or - for standard input.")
]


def embed(
    input: Input,
    output: options.Output = None,
    overwrite: options.Overwrite = None,
    format: options.Format = None,
    text_column: options.TextColumn = None,
    id_column: options.IdColumn = None,
    skip_bad_rows: options.SkipBadRows = None,
    model: options.ModelOption = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    quantization: options.Quantization = None,
    num_threads: options.NumThreads = None,
    prompt_name: options.PromptName = None,
    prompt: options.Prompt = None,
    dimensions: options.Dimensions = None,
    normalize: options.Normalize = None,
    batch_rows: options.BatchRows = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_num_seqs: options.MaxNumSeqs = None,
    async_scheduling: options.AsyncScheduling = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_memory_share: options.KvCacheMemoryShare = None,
    block_size: options.BlockSize = None,
    enable_prefix_caching: options.EnablePrefixCaching = None,
) -> None:
    """Embed the texts of a file. Memory stays constant, however long the file is.

    [bold]nobiru embed news.jsonl -o vectors.jsonl --id-column id[/bold]  goes on where it was interrupted

    [bold]nobiru embed news.csv -o vectors.npy --text-column body -m ./my-model[/bold]  one float32 array

    [bold]cut -f2 log.tsv | nobiru embed - --format txt -o vectors.parquet[/bold]  from standard input
    """
    values, warnings = options.with_environment(dict(locals()), (*options.ENGINE_OPTIONS, *options.EMBED_OPTIONS))
    for warning in warnings:
        options.say(warning)
    engine_fields = options.fields_of(EngineConfig, values)
    EngineConfig(**{**engine_fields, "model": "-"})  # a bad option is told before the input is read

    def load_model() -> Model:
        from nobiru.llm import LLM  # torch takes seconds, which --help and a finished job need not wait for

        return LLM(**engine_fields)

    run(prepare(values), load_model)


def prepare(values: Mapping[str, Any]) -> Job:
    """Check the options and open the input; raises `ConfigError`."""
    if values.get("output") is None:
        raise ConfigError("say where the vectors go: -o vectors.jsonl, .npy or .parquet", param="output")
    path, output = str(values["input"]), Path(values["output"])
    overwrite, skip_bad_rows = bool(values.get("overwrite")), bool(values.get("skip_bad_rows"))
    id_column = values.get("id_column")
    kind = vector_files.output_format(output)
    _check_output(output, kind, path, overwrite=overwrite)
    if kind == "npy" and (id_column or skip_bad_rows):
        reason = "has no room for ids" if id_column else "would not tell which rows were left out"
        raise ConfigError(f"{output}: an npy file {reason}; write jsonl or parquet instead", param="output")
    batch_rows = values.get("batch_rows", options.DEFAULT_BATCH_ROWS)
    if batch_rows < 1:
        raise ConfigError(f"--batch-rows is {batch_rows}; it must be at least 1", param="batch_rows")
    input_kind = input_format(path, values.get("format"))
    return Job(
        source=RowSource(path, kind=input_kind, text_column=values.get("text_column"), id_column=id_column),
        output=output,
        kind=kind,
        with_ids=id_column is not None,
        skip_bad_rows=skip_bad_rows,
        overwrite=overwrite,
        batch_rows=batch_rows,
        params=PoolingParams(**{name: values[name] for name in POOLING_OPTIONS if name in values}),
    )


def _check_output(output: Path, kind: str, input_path: str, *, overwrite: bool) -> None:
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: there is no folder {output.parent}", param="output")
    if not output.exists():
        return
    if input_path != "-" and Path(input_path).exists() and output.samefile(input_path):
        raise ConfigError(f"{output} is the input too; name another output", param="output")
    if kind != "jsonl" and not overwrite:
        raise ConfigError(f"{output} exists; --overwrite replaces it", param="output")
