"""Hugging Face folders, read slice by slice under this project's logical names.

Owns finding the files and the tensors in them. Names and config come from specs/hf.py; nothing
pickled is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rankmesh.checkpoint.manifest import TOKENIZER, plain_file_name, read_json
from rankmesh.checkpoint.tensorfile import TensorFiles, show
from rankmesh.errors import CheckpointError, ConfigError
from rankmesh.specs.hf import spec_from_hf
from rankmesh.specs.hf_tensors import (
    TIED_HEAD,
    HFTensor,
    bare_name,
    hf_sources,
    hf_tensors,
    is_ignored,
)
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts
from rankmesh.topology.params import Slices

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_TIED_ROWS = 64


class HFFolder:
    """Weights of a Hugging Face folder, with the interface of `Weights`."""

    def __init__(
        self, folder: Path, spec: ModelSpec, files: TensorFiles, held_in: Mapping[str, str]
    ) -> None:
        """`held_in`: Hugging Face tensor name -> the file that holds it. Use `read_hf` to make
        one."""
        self.folder = folder
        self.spec = spec
        self._files = files
        self._held_in = held_in
        self._sources = hf_sources(spec)
        self._tensors = {tensor.name: tensor for tensor in hf_tensors(spec)}
        self._shapes = {part.name: part.shape for part in parts(spec)}

    @property
    def step(self) -> int:
        """Always 0: a Hugging Face folder does not know how it was trained."""
        return 0

    @property
    def tokenizer(self) -> str | None:
        """The path of the folder's tokenizer.json, None where it has none."""
        path = self.folder / TOKENIZER
        return str(path) if path.is_file() else None

    def slice(self, name: str, slices: Slices) -> Tensor:
        """The slice of logical tensor `name`, on the CPU in its stored dtype; only its bytes are
        read.

        Raises CheckpointError for an unknown tensor, a slice that leaves its shape, or a file whose
        tensor has another shape than config.json says.
        """
        if name not in self._sources:
            raise CheckpointError(f"{self.folder}: no tensor {name}")
        shape = self._shapes[name]
        fits = len(slices) == len(shape) and all(
            0 <= s.start <= s.stop <= size for s, size in zip(slices, shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {shape}, which does not hold {show(slices)}"
            )
        source = self._sources[name]
        rows = slice(slices[0].start + source.offset, slices[0].stop + source.offset)
        stored = (rows, *slices[1:])
        key, file = self._located(self._tensors[source.name])
        index = stored[::-1] if source.transpose else stored
        return self._files.read(file, key, index, source.transpose)

    def holds(self, key: str) -> bool:
        """Whether a tensor of that Hugging Face name is stored."""
        return key in self._held_in

    def stored_names(self) -> tuple[str, ...]:
        """Hugging Face names of all tensors in the folder."""
        return tuple(self._held_in)

    def stored(self, key: str, slices: Slices) -> Tensor:
        """The slice of a tensor by its Hugging Face name, as it lies there."""
        return self._files.read(self._held_in[key], key, slices)

    def _located(self, tensor: HFTensor) -> tuple[str, str]:
        """Name and file of a tensor as stored, once its shape is known to be right."""
        key = tensor.name if tensor.name in self._held_in else bare_name(self.spec, tensor.name)
        file = self._held_in[key]
        shape = self._files.shape(file, key)
        if shape != tensor.shape:
            raise CheckpointError(
                f"{self.folder / file}: {key} has shape {shape}, {CONFIG} needs {tensor.shape}"
            )
        return key, file


def read_hf(folder: Path) -> HFFolder:
    """Open a Hugging Face folder of safetensors; reads config.json and the list of tensors, no
    weights.

    Raises CheckpointError in one line: no config, an option that this project cannot express, only
    pickled files, a missing tensor, or one that the model has no place for.
    """
    config = read_json(folder / CONFIG)
    try:
        spec = spec_from_hf(config)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {CONFIG} has a value of a wrong type: {error}") from error
    files = TensorFiles(folder)
    held_in = _held_in(folder, files)
    expected = {tensor.name for tensor in hf_tensors(spec)}
    bare = {bare_name(spec, name) for name in expected}
    for name in sorted(expected):
        if name not in held_in and bare_name(spec, name) not in held_in:
            raise CheckpointError(f"{folder}: tensor {name} is missing")
    for name in held_in:
        if name not in expected and name not in bare and not is_ignored(spec, name):
            raise CheckpointError(
                f"{folder}: tensor {name} has no place in the {spec.family} model of {CONFIG}"
            )
    source = HFFolder(folder, spec, files, held_in)
    _check_tied(source)
    return source


def _check_tied(source: HFFolder) -> None:
    """Refuse a head that is stored beside the table to which config.json ties it, and differs.

    Rows spread over the vocabulary are compared: matrices that were trained apart differ in each.
    """
    if not source.spec.tie_embeddings or not source.holds(TIED_HEAD):
        return
    vocab, hidden = source.spec.vocab_size, source.spec.hidden_size
    for row in range(0, vocab, -(-vocab // _TIED_ROWS)):
        rows = (slice(row, row + 1), slice(0, hidden))
        if not torch.equal(source.slice("embed.weight", rows), source.stored(TIED_HEAD, rows)):
            raise CheckpointError(
                f"{source.folder}: {TIED_HEAD} differs from the embedding in row {row}, but "
                f"{CONFIG} has tie_word_embeddings; set that to false"
            )


def _held_in(folder: Path, files: TensorFiles) -> dict[str, str]:
    """Tensor name -> file, from the index of a sharded folder or from the one file."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX}: no weight_map in it")
        return {name: plain_file_name(INDEX, file) for name, file in weight_map.items()}
    if (folder / SINGLE).is_file():
        return {name: SINGLE for name in files.keys(SINGLE)}
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise CheckpointError(
            f"{folder}: holds only pickled weights ({pickled[0]}), which are never read; "
            "save it as safetensors"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
