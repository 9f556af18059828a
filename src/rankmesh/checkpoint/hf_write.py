"""Hugging Face folders, written tensor by tensor from any source of weights.

Owns which tensor goes to which file, the index, and that a folder is either absent or complete.
Names and layouts are data of specs/hf_tensors.py, the other files hf_carry.py's business.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankmesh.checkpoint.hf_carry import config_bytes
from rankmesh.checkpoint.hf_read import CONFIG, INDEX, SINGLE
from rankmesh.checkpoint.manifest import plain_file_name, read_json
from rankmesh.checkpoint.shelf import partial
from rankmesh.checkpoint.source import WeightSource
from rankmesh.checkpoint.tensorfile import Deferred, sync_folder, write_bytes, write_tensors
from rankmesh.errors import CheckpointError
from rankmesh.specs.hf import spec_to_hf
from rankmesh.specs.hf_tensors import TIED_HEAD, HFTensor, hf_tensors
from rankmesh.specs.placement import parts

Layout = Mapping[str, Sequence[str]]  # file -> names of its tensors

# transformers asks for it before it reads a file.
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Written:
    """What was written: tensors, their bytes, and the files that hold them."""

    tensors: int
    bytes: int
    files: tuple[str, ...]


def write_hf(
    folder: Path,
    source: WeightSource,
    beside: Mapping[str, Path],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
) -> Written:
    """Write the model of `source` as a Hugging Face folder.

    beside: name -> file that comes along. dtype: of all tensors; None = as stored. shard_bytes:
    most bytes of a file, unless one tensor has more; None = files as the index among `beside` has
    them, else 5e9. Nothing is written before all of it is known to be possible; then one tensor
    after the other is in memory. Raises CheckpointError naming the option that Hugging Face cannot
    express, or the folder that exists.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; it is not overwritten")
    fresh = spec_to_hf(source.spec)
    tensors = _deferred(source, dtype)
    index = _known_index(beside, tensors, source) if shard_bytes is None else None
    if index is not None and TIED_HEAD in index["weight_map"]:
        tensors.setdefault(TIED_HEAD, tensors[_embedding(source)])
    layout = _layout_of(index) if index is not None else _sharded(tensors, shard_bytes or 5 * 10**9)
    texts = {
        name: path.read_bytes() for name, path in beside.items() if name not in (CONFIG, INDEX)
    }
    texts[CONFIG] = config_bytes(source.spec, fresh, _main_dtype(tensors), beside)
    if set(layout) != {SINGLE}:
        kept = index is not None
        texts[INDEX] = beside[INDEX].read_bytes() if kept else _index_bytes(layout, tensors)
    temporary = partial(folder)
    try:
        _write_all(temporary, layout, tensors, texts)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{temporary}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Written(len(tensors), sum(map(_size, tensors.values())), tuple(layout))


def stored_dtype(source: WeightSource, name: str, shape: Sequence[int]) -> torch.dtype:
    """The dtype of a logical tensor, learnt from its first element."""
    return source.slice(name, tuple(slice(0, 1) for _ in shape)).dtype


def _deferred(source: WeightSource, dtype: torch.dtype | None) -> dict[str, Deferred]:
    """Every tensor of the folder, unread, by its Hugging Face name."""
    shapes = {part.name: part.shape for part in parts(source.spec)}
    made = {}
    for tensor in hf_tensors(source.spec):
        stored = {stored_dtype(source, name, shapes[name]) for name in tensor.parts}
        if len(stored) > 1 and dtype is None:
            raise CheckpointError(
                f"{source.folder}: {', '.join(tensor.parts)} have different dtypes, but are one "
                f"tensor there ({tensor.name}); give one dtype for all"
            )
        kind = dtype or stored.pop()
        made[tensor.name] = Deferred(tensor.shape, kind, _Load(source, tensor, shapes, kind))
    return made


@dataclass(frozen=True)
class _Load:
    """Makes one Hugging Face tensor from its logical parts."""

    source: WeightSource
    tensor: HFTensor
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        """The whole tensor, on the CPU."""
        rows = [
            self.source.slice(name, tuple(slice(0, size) for size in self.shapes[name]))
            for name in self.tensor.parts
        ]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        return (whole.t() if self.tensor.transpose else whole).to(self.dtype)


def _embedding(source: WeightSource) -> str:
    """Hugging Face's name of the table that a tied head is."""
    named = {part: tensor.name for tensor in hf_tensors(source.spec) for part in tensor.parts}
    return named["embed.weight"]


def _size(tensor: Deferred) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


def _main_dtype(tensors: Mapping[str, Deferred]) -> str:
    """The dtype of most tensors, such as bfloat16."""
    dtypes = [tensor.dtype for tensor in tensors.values()]
    return str(max(dtypes, key=dtypes.count)).removeprefix("torch.")


def _known_index(
    beside: Mapping[str, Path], tensors: Mapping[str, Deferred], source: WeightSource
) -> dict[str, Any] | None:
    """The index that came along, where it lists just what is to be written, in names and, if it
    says so, in bytes; it may list a tied head beside the embedding.
    """
    index = read_json(beside[INDEX]) if INDEX in beside else {}
    names = index.get("weight_map")
    if not isinstance(names, dict):
        return None
    total = sum(map(_size, tensors.values()))
    missing = set(names) - set(tensors)
    if missing == {TIED_HEAD} and source.spec.tie_embeddings:
        total += _size(tensors[_embedding(source)])
    elif missing:
        return None
    told = (index.get("metadata") or {}).get("total_size", total)
    return index if set(tensors) <= set(names) and told == total else None


def _layout_of(index: Mapping[str, Any]) -> Layout:
    layout: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        layout.setdefault(plain_file_name(INDEX, file), []).append(name)
    return layout


def _sharded(tensors: Mapping[str, Deferred], limit: int) -> Layout:
    """Tensors in order, a new file wherever the next one would pass the limit."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _size(tensor) > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += _size(tensor)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, start=1)
    }


def _index_bytes(layout: Layout, tensors: Mapping[str, Deferred]) -> bytes:
    held_in = {name: file for file, names in layout.items() for name in names}
    index = {
        "metadata": {"total_size": sum(map(_size, tensors.values()))},
        "weight_map": dict(sorted(held_in.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def _write_all(
    folder: Path, layout: Layout, tensors: Mapping[str, Deferred], texts: Mapping[str, bytes]
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, names in layout.items():
        # The order in which their own library writes them.
        ordered = sorted(names, key=lambda name: (-tensors[name].dtype.itemsize, name))
        write_tensors(folder / file, {name: tensors[name] for name in ordered}, _METADATA)
    for name, raw in texts.items():
        write_bytes(folder / name, raw)
    sync_folder(folder)
