"""One door to weights wherever they lie: our folder, a run's newest checkpoint, a Hugging Face
folder.

Owns telling them apart. Readers of weights depend on `WeightSource` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from rankmesh.checkpoint.hf_read import CONFIG, read_hf
from rankmesh.checkpoint.manifest import MANIFEST, compare, model_shapes
from rankmesh.checkpoint.shelf import CHECKPOINTS, find_checkpoint, shelf
from rankmesh.checkpoint.weights import Weights
from rankmesh.errors import CheckpointError
from rankmesh.specs.model import ModelSpec
from rankmesh.topology.params import Slices


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
    """The weights at `path`: a checkpoint, a run directory (its newest one), a Hugging Face folder.

    Raises CheckpointError in one line for anything else.
    """
    ours = (path / MANIFEST).is_file() or shelf(path).is_dir()
    if not ours and (path / CONFIG).is_file():
        return read_hf(path)
    if not ours and path.is_dir():
        raise CheckpointError(
            f"{path}: no weights here; expected {MANIFEST} (a checkpoint), {CHECKPOINTS}/ (a run) "
            f"or {CONFIG} (Hugging Face)"
        )
    return Weights(find_checkpoint(path))


def check_same_model(source: WeightSource, spec: ModelSpec) -> None:
    """Refuse weights whose tensors are not those of `spec`; raises one CheckpointError that lists
    all of them."""
    compare(str(source.folder), model_shapes(source.spec), model_shapes(spec))
