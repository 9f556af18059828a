"""Safetensors files: written as a stream, read slice by slice.

Owns bytes, checksums and sync to disk. What the tensors mean it does not know.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rankmesh.checkpoint.manifest import FileEntry, Piece
from rankmesh.errors import CheckpointError
from rankmesh.topology.params import Slices

DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class Deferred:
    """A tensor that is made only when its turn to be written has come, and then let go."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in its file, first and one past the last byte, and the sha256 of these
    bytes."""

    bytes: tuple[int, int]
    sha256: str


@dataclass(frozen=True)
class Written:
    """A file of tensors: its size, the sha256 of its header, and the span of each tensor."""

    bytes: int
    sha256: str
    spans: Mapping[str, Span]


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | Deferred],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write `tensors` to `path` in the safetensors format, synced to disk.

    One tensor at a time is on the CPU; checksums are taken from the bytes on their way out.
    `metadata` goes into the header. Raises CheckpointError for a dtype that the format lacks, or a
    deferred tensor that is not what was announced.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, tensor in tensors.items():
        numel = torch.Size(tensor.shape).numel()
        start, end = end, end + numel * tensor.dtype.itemsize
        header[key] = {
            "dtype": dtype_code(key, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format aligns the data to 8 bytes with blanks after the header.
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    spans = {}
    with path.open("wb") as file:
        file.write(head)
        for key, tensor in tensors.items():
            raw = _raw(key, tensor)
            file.write(raw)
            low, high = header[key]["data_offsets"]
            spans[key] = Span((len(head) + low, len(head) + high), hashlib.sha256(raw).hexdigest())
        file.flush()
        os.fsync(file.fileno())
    return Written(len(head) + end, hashlib.sha256(head).hexdigest(), spans)


def _raw(key: str, tensor: Tensor | Deferred) -> memoryview:
    """The bytes of a tensor, row by row, on the CPU."""
    if isinstance(tensor, Deferred):
        made = tensor.load()
        if (tuple(made.shape), made.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"{key}: {made.dtype} {tuple(made.shape)} came where {tensor.dtype} "
                f"{tuple(tensor.shape)} was announced"
            )
        tensor = made
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_bytes(path: Path, raw: bytes) -> FileEntry:
    """Write a whole file, synced to disk."""
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(raw), hashlib.sha256(raw).hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names inside `folder` survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def dtype_code(name: str, dtype: torch.dtype) -> str:
    """The safetensors code of `dtype`; raises CheckpointError where there is none."""
    if dtype not in DTYPE_CODES:
        raise CheckpointError(
            f"{name}: dtype {dtype} cannot be written; allowed: {list(DTYPE_CODES)}"
        )
    return DTYPE_CODES[dtype]


def show(slices: Slices) -> str:
    """Slices as a person writes them: [0:4, 8:16]."""
    return f"[{', '.join(f'{s.start}:{s.stop}' for s in slices)}]"


class TensorFiles:
    """Slices of tensors in the safetensors files of one folder; files are mapped when first
    needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}

    def keys(self, file: str) -> tuple[str, ...]:
        """Names of the tensors in `file`."""
        return tuple(self._handle(file).keys())

    def shape(self, file: str, key: str) -> tuple[int, ...]:
        """Shape of tensor `key`; raises CheckpointError where it is missing."""
        return tuple(self._view(file, key).get_shape())

    def piece(self, piece: Piece, code: str) -> Tensor:
        """A whole piece of a checkpoint, of dtype `code`, once its checksum has been found right.

        Raises CheckpointError naming the file.
        """
        path = self.folder / piece.file
        if code not in _DTYPES:
            raise CheckpointError(f"{path}: {piece.key} has the unknown dtype {code}")
        tensor = torch.empty(piece.shape, dtype=_DTYPES[code])
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(piece.bytes[0])
                left = raw
                while left and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        size = piece.bytes[1] - piece.bytes[0]
        if left or size != len(raw) or hashlib.sha256(raw).hexdigest() != piece.sha256:
            raise CheckpointError(f"{path}: {piece.key} differs from its checksum: damaged")
        return tensor

    def read(self, file: str, key: str, slices: Slices, transpose: bool = False) -> Tensor:
        """The slice, transposed if asked, as a contiguous CPU tensor in its stored dtype.

        Bytes outside of it are not read. The memory is the tensor's own: the library's view would
        keep the file mapped and break when that is removed.
        """
        view = self._view(file, key)
        # The library clips a slice that leaves the tensor; here it is an error.
        inside = len(slices) == len(view.get_shape()) and all(
            0 <= s.start <= s.stop <= size for s, size in zip(slices, view.get_shape(), strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{self.folder / file}: {key} has shape {view.get_shape()}, "
                f"which does not hold {show(slices)}"
            )
        try:
            mapped: Tensor = view[slices]
            tensor = (mapped.t() if transpose else mapped).clone(
                memory_format=torch.contiguous_format
            )
        except (SafetensorError, IndexError, OSError) as error:
            raise CheckpointError(f"{self.folder / file}: {key} cannot be read: {error}") from error
        return tensor

    def _view(self, file: str, key: str) -> Any:
        try:
            return self._handle(file).get_slice(key)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file}: no tensor {key}") from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path}: file is missing") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged or truncated: {error}") from error
        return self._open[file]
