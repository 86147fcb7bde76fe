"""Loads a model through `transformers`, from a local folder, running no code from it.

`transformers` is imported when such a model is loaded: the native families need none of its three seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nobiru.errors import ModelFolderError
from nobiru.folder.spec import ModelFolder
from nobiru.models.weights import Precision, listed

# Encoder-decoder architectures whose encoder stands alone, as Sentence Transformers uses them.
_ENCODER_CLASSES = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
# Parts that pooling of token vectors does not use; a folder need not have their weights.
_UNUSED_PARTS = ("pooler", "contact_head")


def load_pretrained(folder: ModelFolder, precision: Precision) -> Any:
    """The model as `transformers` has it, on the CPU, with a head if it is a language model.

    Decoders have attention in its plainest form, which supports all that an architecture asks for. `ModelFolderError`
    explains what cannot be served.
    """
    import transformers

    path, file = folder.transformer_path, folder.transformer_path / "config.json"
    loading: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(path, **loading)
            if getattr(config, "is_encoder_decoder", False) and folder.model_type not in _ENCODER_CLASSES:
                raise ModelFolderError(
                    f"{file}: field 'model_type' is {folder.model_type!r}, an encoder-decoder architecture; only the "
                    f"encoders of {', '.join(_ENCODER_CLASSES)} can be served"
                )
            default = "AutoModelForCausalLM" if folder.task == "generate" else "AutoModel"
            model_class = getattr(transformers, _ENCODER_CLASSES.get(folder.model_type, default))
            if folder.is_causal:
                loading["attn_implementation"] = "eager"
            model, report = model_class.from_pretrained(
                path, config=config, dtype=precision.compute, output_loading_info=True, **loading
            )
        except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, ModelFolderError):
                raise
            raise ModelFolderError(
                f"{path}: transformers {transformers.__version__} cannot load model_type {folder.model_type!r}: {error}"
            ) from error
    missing = sorted(name for name in report["missing_keys"] if not set(name.split(".")) & set(_UNUSED_PARTS))
    if missing:
        raise ModelFolderError(f"{path}: the weights lack {listed(missing)}, which config.json asks for")
    if precision.weights != precision.compute:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(precision.weights))
    return model.eval().requires_grad_(False)


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def hidden_of(output: Any) -> Tensor:
    """The hidden states in what a model returns, behind its last layer."""
    hidden: Tensor = output.last_hidden_state
    return hidden


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of `transformers` on the terminal; what matters is raised."""
    import transformers

    log: Any = transformers.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
