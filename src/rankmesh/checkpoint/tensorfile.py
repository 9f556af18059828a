"""Safetensors files: written as a stream, read slice by slice.

Owns bytes, checksums and sync to disk. What the tensors mean it does not know.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rankmesh.checkpoint.manifest import FileEntry
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
_BLOCK = 1 << 22


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write `tensors` to `path` in the safetensors format, synced to disk.

    One tensor at a time is on the CPU; the checksum is taken from the bytes on their way out.
    Raises CheckpointError for a dtype that the format lacks.
    """
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": dtype_code(key, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format aligns the data to 8 bytes with blanks after the header.
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            file.write(block)
            digest.update(block)
        for tensor in tensors.values():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(raw)
            digest.update(raw)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(8 + len(text) + end, digest.hexdigest())


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


def entry_of(path: Path) -> FileEntry:
    """Size and sha256 of an existing file, read in blocks."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileEntry(size, digest.hexdigest())


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
