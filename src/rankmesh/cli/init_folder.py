"""What a config that starts from a folder of weights must know of it: the model and its tokenizer.

Owns reading both without torch. What a run then reads is checkpoint/source.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankmesh.checkpoint.manifest import MANIFEST, TOKENIZER, read_json, read_manifest
from rankmesh.checkpoint.shelf import CHECKPOINTS, find_checkpoint, shelf
from rankmesh.errors import CheckpointError
from rankmesh.specs.hf import spec_from_hf
from rankmesh.specs.model import ModelSpec

_HF_CONFIG = "config.json"


@dataclass(frozen=True)
class WeightsFacts:
    """tokenizer: "bytes", the folder that has a tokenizer.json, or None where nothing is said."""

    spec: ModelSpec
    tokenizer: str | None


def weights_facts(path: Path) -> WeightsFacts:
    """Of a checkpoint, a run directory (its newest one) or a Hugging Face folder.

    Raises CheckpointError or ConfigError in one line for anything else.
    """
    if (path / MANIFEST).is_file() or shelf(path).is_dir():
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
        ours = str(folder) if manifest.tokenizer == TOKENIZER else manifest.tokenizer
        return WeightsFacts(manifest.spec, ours)
    if not (path / _HF_CONFIG).is_file():
        raise CheckpointError(
            f"{path}: no model here; expected {MANIFEST} (a checkpoint), {CHECKPOINTS}/ (a run) or "
            f"{_HF_CONFIG} (Hugging Face)"
        )
    config = read_json(path / _HF_CONFIG)
    try:
        spec = spec_from_hf(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / _HF_CONFIG}: has a value of a wrong type: {error}"
        ) from error
    return WeightsFacts(spec, str(path) if (path / TOKENIZER).is_file() else None)
