"""What `config.json` says about a stack of layers, checked field by field.

Owns defaults and refusals that the native families share. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from nobiru.errors import ModelFolderError
from nobiru.folder.files import typed
from nobiru.folder.spec import ModelFolder
from nobiru.layers.activation import ACTIVATIONS, Activation

# A field that is none of these would change the arithmetic, and is not implemented.
Limits = Mapping[str, tuple[object, ...]]
DECODER_LIMITS: Limits = MappingProxyType(
    {"add_cross_attention": (None, False), "is_encoder_decoder": (None, False), "quantization_config": (None,)}
)
ENCODER_LIMITS: Limits = MappingProxyType(
    {
        **DECODER_LIMITS,
        "position_embedding_type": (None, "absolute"),
        "is_decoder": (None, False),
        "pruned_heads": (None, {}),
    }
)


class ConfigFields:
    """Typed access to one `config.json`; errors name the file and the field."""

    def __init__(self, folder: ModelFolder, limits: Limits = ENCODER_LIMITS) -> None:
        self._config = folder.config
        self.file: Path = folder.transformer_path / "config.json"
        for name, allowed in limits.items():
            if folder.config.get(name) not in allowed:
                self.refuse(name, f"only {' or '.join(repr(value) for value in allowed)} can be honoured")

    def size(self, name: str, default: int | None = None) -> int:
        value = typed(self._config, name, int, self.file, default=default)
        if value < 1:
            self.refuse(name, "it must be at least 1")
        return value

    def index(self, name: str, default: int) -> int:
        value = typed(self._config, name, int, self.file, default=default)
        if value < 0:
            self.refuse(name, "it must be at least 0")
        return value

    def number(self, name: str, default: float) -> float:
        value: Any = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "a number is expected")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return typed(self._config, name, bool, self.file, default=default)

    def activation(self, name: str, default: str = "gelu") -> Activation:
        value = typed(self._config, name, str, self.file, default=default)
        if value not in ACTIVATIONS:
            self.refuse(name, f"known are {', '.join(sorted(ACTIVATIONS))}")
        return ACTIVATIONS[value]

    def refuse(self, name: str, reason: str) -> NoReturn:
        raise ModelFolderError(f"{self.file}: field {name!r} is {self._config.get(name)!r}; {reason}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig:
    """Sizes of a stack of `PostNormBlock`s."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Activation
    norm_eps: float

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def read_stack(fields: ConfigFields) -> StackConfig:
    """The sizes by the names of BERT, RoBERTa and MPNet."""
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden_size % num_heads:
        fields.refuse("num_attention_heads", f"it must divide hidden_size, {hidden_size}")
    return StackConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        activation=fields.activation("hidden_act"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
    )
