"""Reads a model's tensors from its folder, one at a time, into the dtype they are used in.

Owns file formats (safetensors and `pytorch_model.bin`, whole or in shards), the spelling of names (prefixes,
TensorFlow's `gamma` and `beta`), and the check that a model gets all its tensors, in their shapes, and that the file
holds no others of that model. Files are mapped, not read: beside the model there is at most one tensor in memory.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nobiru.config import Quantization
from nobiru.errors import ModelFolderError
from nobiru.folder.files import read_object
from nobiru.models.pace import Pace
from nobiru.models.safetensors_file import SafetensorsFile

_SUFFIX = ".safetensors"
_SAFETENSORS = f"model{_SUFFIX}"
_PICKLED = "pytorch_model.bin"
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
# Buffers that older versions of transformers saved; they follow from the configuration.
_DERIVED = ("position_ids", "token_type_ids", "rotary_emb.inv_freq")
_MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Weights are rounded to `weights` once; arithmetic runs in `compute`, which holds them exactly.

    With `quantization` "int8" the matrices of linear layers are integers with a scale for each output.
    """

    weights: torch.dtype
    compute: torch.dtype
    quantization: Quantization | None = None


FLOAT32 = Precision(weights=torch.float32, compute=torch.float32)


class TensorFiles:
    """The tensors of one folder by name; `load` reads one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[Path, Any] = {}
        self._in_parts: dict[Path, SafetensorsFile] = {}
        self._files = self._locate()

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def file_of(self, name: str) -> Path:
        return self._files[name]

    def load(self, name: str) -> Tensor:
        """The tensor in the file's dtype, on the CPU, perhaps a view of the mapped file."""
        file = self._files[name]
        opened = self._open(file)
        with _readable(file):
            tensor: Tensor = opened[name] if isinstance(opened, dict) else opened.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        file = self._files[name]
        return self._parts(file).shape(name) if file.suffix == _SUFFIX else tuple(self.load(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        file = self._files[name]
        return self._parts(file).dtype(name) if file.suffix == _SUFFIX else self.load(name).dtype

    def rows(self, name: str, begin: int, end: int, *, pace: Pace | None = None) -> Tensor:
        """Entries along the tensor's first dimension; of safetensors nothing else is read or mapped, and no faster than
        `pace` allows."""
        file = self._files[name]
        if file.suffix == _SUFFIX:
            return self._parts(file).rows(name, begin, end, pace=pace)
        rows = self.load(name)[begin:end]
        if pace is not None:
            pace.took(rows.nbytes)
        return rows

    def columns(self, name: str, begin: int, end: int) -> Tensor:
        """The same along the second dimension; of safetensors nothing is mapped."""
        file = self._files[name]
        return self._parts(file).columns(name, begin, end) if file.suffix == _SUFFIX else self.load(name)[:, begin:end]

    def _parts(self, file: Path) -> SafetensorsFile:
        if file not in self._in_parts:
            self._in_parts[file] = SafetensorsFile(file)
        return self._in_parts[file]

    def _locate(self) -> dict[str, Path]:
        """Which file holds which tensor. Safetensors are preferred; pickled files may hold tensors only."""
        for name in (_SAFETENSORS, _PICKLED):
            file, index = self.folder / name, self.folder / f"{name}.index.json"
            if file.is_file():
                opened = self._open(file)
                return dict.fromkeys(opened if isinstance(opened, dict) else opened.keys(), file)
            if index.is_file():
                return _from_index(index)
        raise ModelFolderError(
            f"{self.folder}: no weights found; {_SAFETENSORS} or {_PICKLED} is expected, or their shards with an index"
        )

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = _open(file)
        return self._opened[file]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor in its file. Several threads may read at once."""

    files: TensorFiles
    name: str

    @property
    def dtype(self) -> torch.dtype:
        return self.files.dtype(self.name)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.files.shape(self.name)) * self.dtype.itemsize

    def rows(self, begin: int | None = None, end: int | None = None, *, pace: Pace | None = None) -> Tensor:
        """Entries along the first dimension, in the file's dtype, on the CPU."""
        size = self.files.shape(self.name)[0]
        return self.files.rows(self.name, begin or 0, size if end is None else end, pace=pace)

    def columns(self, columns: range | None) -> Tensor:
        """The same along the second dimension."""
        begin, end = (0, self.files.shape(self.name)[1]) if columns is None else (columns.start, columns.stop)
        return self.files.columns(self.name, begin, end)


class ModelWeights:
    """Hands a model its tensors by the names inside it (`embeddings.…`, `encoder.…`), then accounts for the rest.

    `roots` are the first parts of the model's own names. The prefix before them (`bert.`, `model.`, none) is found by
    looking for `anchor`, a tensor that every file of the family has. `heads` are first parts of names that belong to
    the model too and never have a prefix (`lm_head`).
    """

    def __init__(
        self,
        folder: Path,
        *,
        anchor: str,
        roots: Sequence[str],
        heads: Sequence[str] = (),
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._files = TensorFiles(folder)
        self._precision = precision
        self._device = device
        prefix = _prefix(self._files, anchor)
        self._stored_names: dict[str, str] = {}
        for stored in self._files.names:
            name = _modern_name(stored.removeprefix(prefix))
            if stored.startswith(prefix) and name.partition(".")[0] in roots:
                self._stored_names[name] = stored
            elif stored.partition(".")[0] in heads:
                self._stored_names[stored] = stored
        self._unused = {name for name in self._stored_names if not name.endswith(_DERIVED)}
        self._missing: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._stored_names

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> Tensor:
        """The tensor in the dtype of arithmetic, on the device; or some of its rows, or of its columns."""
        return self.take_rows([name], *shape, rows=rows, columns=columns)

    def take_rows(
        self, names: Sequence[str], *shape: int, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Several tensors of one shape, or the same part of each, one below the other."""
        size = _part_shape(shape, rows, columns)
        num_rows = size[0]
        fused = torch.empty((num_rows * len(names), *size[1:]), dtype=self._precision.compute, device=self._device)
        for number, name in enumerate(names):
            part = self._read(name, shape, rows, columns)
            fused[number * num_rows : (number + 1) * num_rows] = part.to(self._precision.weights)
        return fused

    def take_table(self, name: str, *shape: int, rows: range | None = None) -> Tensor:
        """An embedding table, kept in the dtype of weights: its rows are converted when they are looked up."""
        return self._read(name, shape, rows).to(self._device, self._precision.weights, copy=True)

    def take_exact(self, name: str, *shape: int) -> Tensor:
        """The tensor in float32, not rounded, on the device."""
        return self._read(name, shape).to(self._device, torch.float32, copy=True)

    def claim(self, name: str, *shape: int) -> StoredTensor | None:
        """The tensor to be read later and in parts; None, and missing, if the folder has none."""
        self._unused.discard(name)
        stored = self._stored_names.get(name)
        if stored is None:
            self._missing.append(name)
            return None
        _check_shape(self._files.shape(stored), stored, shape, self._files.file_of(stored))
        return StoredTensor(files=self._files, name=stored)

    def finish(self, passed_over: Sequence[str] = ()) -> None:
        """Raises `ModelFolderError` if tensors were missing, or if the model has some that nobody took; names that
        begin with one of `passed_over` do not count."""
        if self._missing:
            raise ModelFolderError(
                f"{self._files.folder}: the weights lack {listed(self._missing)}, which config.json asks for"
            )
        unused = [name for name in self._unused if not name.startswith(tuple(passed_over))]
        if unused:
            names = sorted(self._stored_names[name] for name in unused)
            raise ModelFolderError(
                f"{self._files.file_of(names[0])}: unexpected {listed(names)}; the architecture in config.json has no "
                "such tensors, so they would be left out"
            )

    def _read(self, name: str, shape: Sequence[int], rows: range | None = None, columns: range | None = None) -> Tensor:
        size = _part_shape(shape, rows, columns)
        if size != tuple(shape):
            stored_tensor = self.claim(name, *shape)
            if stored_tensor is None:
                return torch.zeros(size)
            return stored_tensor.columns(columns) if rows is None else stored_tensor.rows(rows.start, rows.stop)
        self._unused.discard(name)
        stored = self._stored_names.get(name)
        if stored is None:
            self._missing.append(name)
            return torch.zeros(tuple(shape))
        tensor = self._files.load(stored)
        _check(tensor, stored, tuple(shape), self._files.file_of(stored))
        return tensor


def _part_shape(shape: Sequence[int], rows: range | None, columns: range | None) -> tuple[int, ...]:
    """Of a tensor's rows, or of its columns."""
    assert rows is None or columns is None
    if columns is not None:
        return (shape[0], len(columns), *shape[2:])
    return (shape[0] if rows is None else len(rows), *shape[1:])


def read_module_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """The tensors of a module behind pooling, in float32; exactly those named in `shapes`."""
    files = TensorFiles(folder)
    if missing := sorted(set(shapes) - set(files.names)):
        raise ModelFolderError(f"{folder}: the weights lack {listed(missing)}, which config.json asks for")
    if unexpected := sorted(set(files.names) - set(shapes)):
        raise ModelFolderError(f"{folder}: unexpected {listed(unexpected)} in the weights")
    weights = {}
    for name, shape in shapes.items():
        tensor = files.load(name)
        _check(tensor, name, shape, files.file_of(name))
        weights[name] = tensor.to(device, torch.float32, copy=True)
    return weights


def _check_shape(found: tuple[int, ...], name: str, shape: tuple[int, ...], file: Path) -> None:
    if found != shape:
        raise ModelFolderError(
            f"{file}: tensor {name!r} has shape {list(found)}, but config.json implies {list(shape)}"
        )


def _check(tensor: Tensor, name: str, shape: tuple[int, ...], file: Path) -> None:
    _check_shape(tuple(tensor.shape), name, shape, file)
    if not tensor.is_floating_point():
        raise ModelFolderError(f"{file}: tensor {name!r} has dtype {tensor.dtype}; floating point is expected")


def _prefix(files: TensorFiles, anchor: str) -> str:
    found = sorted({name[: -len(anchor)] for name in files.names if name.endswith(anchor)})
    prefixes = [prefix for prefix in found if not prefix or prefix.endswith(".")]
    if len(prefixes) == 1:
        return prefixes[0]
    if prefixes:
        raise ModelFolderError(f"{files.folder}: the weights hold several models: {', '.join(map(repr, prefixes))}")
    raise ModelFolderError(
        f"{files.folder}: the weights have no tensor {anchor!r}, with or without a prefix; they are not those of the "
        "architecture in config.json"
    )


def _modern_name(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


# --- files --------------------------------------------------------------------------------------------------------


def _from_index(index: Path) -> dict[str, Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{index}: field 'weight_map' must say which file holds which tensor")
    files = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelFolderError(f"{index}: field 'weight_map.{name}' is {file_name!r}; a file name is expected")
        files[name] = index.parent / file_name
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise ModelFolderError(f"{index}: names the file {file.name}, which is not there")
    return files


def _open(file: Path) -> Any:
    """A dictionary of tensors for a pickled file, else an open safetensors file."""
    with _readable(file):
        if file.suffix == _SUFFIX:
            return safe_open(file, framework="pt", device="cpu")
        # Only torch's zip format can be mapped; older files are read whole.
        mapped = zipfile.is_zipfile(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelFolderError(f"{file}: a dictionary of tensors is expected")
    return tensors


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ModelFolderError(f"{file} is damaged or not a safetensors file: {error}") from None
    except pickle.UnpicklingError as error:
        raise ModelFolderError(
            f"{file} is not a file of plain tensors, and loading anything else could run code from it. Convert it to "
            f"safetensors where you trust it. ({str(error).splitlines()[0]})"
        ) from None
    except (EOFError, OSError, RuntimeError) as error:
        raise ModelFolderError(f"{file} cannot be read: {error}") from None
