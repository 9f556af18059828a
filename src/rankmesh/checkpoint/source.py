"""One door to weights wherever they lie: our folder, a run's newest checkpoint, a Hugging Face
folder.

Owns telling them apart. Readers of weights depend on `WeightSource` alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rankmesh.checkpoint.hf_read import CONFIG, read_hf
from rankmesh.checkpoint.manifest import MANIFEST
from rankmesh.checkpoint.weights import Weights
from rankmesh.errors import CheckpointError
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts
from rankmesh.topology.params import Slices

CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d+)")


class WeightSource(Protocol):
    """Weights that can be read slice by slice under logical names."""

    folder: Path

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def step(self) -> int: ...

    @property
    def tokenizer(self) -> str | None:
        """What the token ids mean: "bytes", the path of a tokenizer.json, or None if unknown."""
        ...

    def slice(self, name: str, slices: Slices) -> Tensor:
        """The slice of logical tensor `name`, on the CPU in its stored dtype."""
        ...


def open_weights(path: Path) -> WeightSource:
    """The weights at `path`: a folder of weights, a run directory (newest checkpoint), a Hugging
    Face folder.

    Raises CheckpointError in one line for anything else.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if (path / MANIFEST).is_file():
        return Weights(path)
    if (path / CHECKPOINTS).is_dir():
        return Weights(newest_checkpoint(path / CHECKPOINTS))
    if (path / CONFIG).is_file():
        return read_hf(path)
    raise CheckpointError(
        f"{path}: no weights here; expected {MANIFEST} (weights), {CHECKPOINTS}/ (a run) "
        f"or {CONFIG} (Hugging Face)"
    )


def newest_checkpoint(folder: Path) -> Path:
    """The complete step-* folder of the highest step; raises CheckpointError where there is
    none."""
    found = [
        (int(match.group(1)), path)
        for path in folder.iterdir()
        if (match := _STEP.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    if not found:
        raise CheckpointError(f"{folder}: holds no complete checkpoint")
    return max(found)[1]


def check_same_model(source: WeightSource, spec: ModelSpec) -> None:
    """Refuse weights whose tensors are not those of `spec`; raises CheckpointError naming the
    first."""
    held = {part.name: part.shape for part in parts(source.spec)}
    for part in parts(spec):
        if held.pop(part.name, None) != part.shape:
            shape = {p.name: p.shape for p in parts(source.spec)}.get(part.name, "missing")
            raise CheckpointError(
                f"{source.folder}: tensor {part.name} is {shape}, the model needs {part.shape}"
            )
    if held:
        raise CheckpointError(
            f"{source.folder}: tensor {next(iter(held))} has no place in the model"
        )
