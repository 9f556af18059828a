"""Weights from one format into another.

Owns our side: any source of weights written as one of our folders. The other side is hf_write.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rankmesh.checkpoint.hf_write import stored_dtype
from rankmesh.checkpoint.shelf import partial
from rankmesh.checkpoint.source import WeightSource
from rankmesh.checkpoint.tensorfile import Deferred
from rankmesh.checkpoint.weights import LocalSlice, write_weights
from rankmesh.specs.placement import parts
from rankmesh.topology.params import Slices


def write_ours(
    folder: Path,
    source: WeightSource,
    carried: Mapping[str, bytes],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of `source` (no optimizer state) as a checkpoint in our format.

    carried: other files of the folder, name -> content. dtype: of all tensors; None = as stored.
    At any time one tensor is in memory. Raises CheckpointError where `folder` exists. A failure
    leaves nothing behind.
    """
    try:
        write_weights(
            folder,
            _slices(source, dtype),
            spec=source.spec,
            step=source.step,
            tokenizer=source.tokenizer,
            carried=carried,
        )
    finally:
        shutil.rmtree(partial(folder), ignore_errors=True)


def _slices(source: WeightSource, dtype: torch.dtype | None) -> Iterator[LocalSlice]:
    for part in parts(source.spec):
        whole = tuple(slice(0, size) for size in part.shape)
        kind = dtype or stored_dtype(source, part.name, part.shape)
        load = _Load(source, part.name, whole, kind)
        yield LocalSlice(part.name, part.shape, whole, Deferred(part.shape, kind, load))


@dataclass(frozen=True)
class _Load:
    """Reads one tensor when its turn has come."""

    source: WeightSource
    name: str
    whole: Slices
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.source.slice(self.name, self.whole).to(self.dtype)
