"""The modules behind the Transformer: `modules.json` and each module's `config.json` as `ModuleSpec`s.

Owns which modules and which of their settings can be honoured; the rest is refused with file and field. Follows
Sentence Transformers 6.2 for defaults and for the names that older versions wrote. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nobiru.errors import ModelFolderError
from nobiru.folder.files import read_json, read_object, refuse_unknown, typed
from nobiru.folder.spec import (
    POOLING_MODES,
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    NormalizeSpec,
    PoolingSpec,
)

SENTENCE_EMBEDDING = "sentence_embedding"
# Activations that torch.nn builds without arguments and that have no weights of their own.
# fmt: off
ACTIVATIONS = frozenset({
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink",
})
# fmt: on
_LEGACY_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_FIELDS = frozenset(
    {"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *_LEGACY_FLAGS}
)
# fmt: off
_DENSE_FIELDS = frozenset({
    "in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
    "use_residual",
})
# fmt: on
_HONOURED = "Transformer, Pooling, Dense, LayerNorm, Normalize and Dropout"


@dataclass(frozen=True, kw_only=True)
class ModuleEntry:
    """One line of `modules.json`: the class's last name and the folder that holds its files."""

    class_name: str
    path: Path


def read_entries(path: Path) -> list[ModuleEntry]:
    """The modules in order: the first is the Transformer, the second a Pooling, and neither comes again."""
    file = path / "modules.json"
    content = read_json(file)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ModelFolderError(f"{file} must hold a list of objects, one for each module")
    entries = [_entry(file, index, item) for index, item in enumerate(content)]
    names = [entry.class_name for entry in entries]
    if names[:1] != ["Transformer"] or names.count("Transformer") != 1:
        raise ModelFolderError(
            f"{file}: the modules are {', '.join(names) or 'none'}; exactly one Transformer is expected, in first place"
        )
    if names[1:2] != ["Pooling"] or names.count("Pooling") != 1:
        raise ModelFolderError(
            f"{file}: the modules are {', '.join(names)}; exactly one Pooling is expected, right behind the Transformer"
        )
    return entries


def _entry(file: Path, index: int, item: Mapping[str, Any]) -> ModuleEntry:
    reference = typed(item, "type", str, file)
    package, _, class_name = reference.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers":
        raise ModelFolderError(
            f"{file}: module {index} has type {reference!r}, which is not part of Sentence Transformers. It would "
            f"need code from the folder, and nobiru runs none; honoured are {_HONOURED}"
        )
    if class_name not in {"Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout"}:
        raise ModelFolderError(
            f"{file}: module {index} has type {reference!r}, which nobiru cannot honour; honoured are {_HONOURED}"
        )
    relative = PurePosixPath(typed(item, "path", str, file, default=""))
    if relative.is_absolute() or ".." in relative.parts:
        raise ModelFolderError(f"{file}: module {index} has path {str(relative)!r}, which leads out of the folder")
    return ModuleEntry(class_name=class_name, path=file.parent / relative)


def read_modules(entries: Sequence[ModuleEntry], hidden_size: int) -> tuple[tuple[ModuleSpec, ...], int]:
    """The specs of `entries` (those behind the Transformer), and the size of the vector that leaves the last one."""
    specs: list[ModuleSpec] = []
    size = hidden_size
    for entry in entries:
        file = entry.path / "config.json"
        if entry.class_name == "Pooling":
            pooling = _pooling(file, size)
            size *= len(pooling.modes)
            specs.append(pooling)
        elif entry.class_name == "Dense":
            dense = _dense(file, size)
            size = dense.out_features
            specs.append(dense)
        elif entry.class_name == "LayerNorm":
            specs.append(_layer_norm(file, size))
        elif entry.class_name == "Normalize":
            _sentence_embedding_only(read_object(file, required=False), file, "Normalize")
            specs.append(NormalizeSpec())
        else:
            assert entry.class_name == "Dropout", entry.class_name  # does nothing outside of training
    return tuple(specs), size


def _pooling(file: Path, hidden_size: int) -> PoolingSpec:
    fields = read_object(file)
    refuse_unknown(fields, _POOLING_FIELDS, file, "Pooling")
    name = "embedding_dimension" if "embedding_dimension" in fields else "word_embedding_dimension"
    size = typed(fields, name, int, file)
    if size != hidden_size:
        raise ModelFolderError(
            f"{file}: field {name!r} is {size}, but the Transformer's vectors have {hidden_size} values"
        )
    return PoolingSpec(
        modes=_pooling_modes(fields, file), include_prompt=typed(fields, "include_prompt", bool, file, default=True)
    )


def _pooling_modes(fields: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    """`pooling_mode`, a name or a list of names, beats the flags of older versions; no flag set means the mean."""
    if "pooling_mode" not in fields:
        flagged = tuple(mode for flag, mode in _LEGACY_FLAGS.items() if typed(fields, flag, bool, file, default=False))
        return flagged or ("mean",)
    chosen = fields["pooling_mode"]
    modes = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(modes, list) or not modes or any(mode not in POOLING_MODES for mode in modes):
        raise ModelFolderError(
            f"{file}: field 'pooling_mode' is {chosen!r}; one or several of {', '.join(POOLING_MODES)} are expected"
        )
    return tuple(modes)


def _dense(file: Path, size: int) -> DenseSpec:
    fields = read_object(file)
    refuse_unknown(fields, _DENSE_FIELDS, file, "Dense")
    _sentence_embedding_only(fields, file, "Dense")
    in_features = typed(fields, "in_features", int, file)
    out_features = typed(fields, "out_features", int, file)
    if in_features != size:
        raise ModelFolderError(
            f"{file}: field 'in_features' is {in_features}, but it receives vectors of {size} values"
        )
    if out_features < 1:
        raise ModelFolderError(f"{file}: field 'out_features' is {out_features}; it must be at least 1")
    activation = "torch.nn.modules.activation.Tanh"
    if "activation_function" in fields:
        activation = typed(fields, "activation_function", str, file)
    package, _, class_name = activation.rpartition(".")
    if not f"{package}.".startswith("torch.nn.") or class_name not in ACTIVATIONS:
        raise ModelFolderError(
            f"{file}: field 'activation_function' is {activation!r}; of torch.nn, "
            f"{', '.join(sorted(ACTIVATIONS))} can be honoured"
        )
    return DenseSpec(
        path=file.parent,
        in_features=in_features,
        out_features=out_features,
        bias=typed(fields, "bias", bool, file, default=True),
        activation=activation,
        use_residual=typed(fields, "use_residual", bool, file, default=False),
    )


def _layer_norm(file: Path, size: int) -> LayerNormSpec:
    fields = read_object(file)
    refuse_unknown(fields, frozenset({"dimension"}), file, "LayerNorm")
    dimension = typed(fields, "dimension", int, file)
    if dimension != size:
        raise ModelFolderError(f"{file}: field 'dimension' is {dimension}, but it receives vectors of {size} values")
    return LayerNormSpec(path=file.parent, dimension=dimension)


def _sentence_embedding_only(fields: Mapping[str, Any], file: Path, owner: str) -> None:
    """A module that reads or writes token vectors would run before pooling; those are not served."""
    for name in ("module_input_name", "module_output_name"):
        value = fields.get(name)
        if value is not None and value != SENTENCE_EMBEDDING:
            raise ModelFolderError(
                f"{file}: field {name!r} of {owner} is {value!r}; only {SENTENCE_EMBEDDING!r} can be honoured"
            )
