"""The body of `rankmesh inspect`: what a checkpoint holds, for a person or for a machine.

Owns the figures and their print. It loads no torch: a manifest says all but the values.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankmesh.checkpoint.manifest import OPTIMIZER, Manifest, TensorEntry, read_manifest
from rankmesh.checkpoint.shelf import complete, find_checkpoint, shelf, unfinished
from rankmesh.checkpoint.verify import damages
from rankmesh.errors import CheckpointError
from rankmesh.specs.placement import num_params


def run(args: argparse.Namespace) -> int:
    """Prints the figures; raises CheckpointError for no checkpoint, or where --verify finds
    damage."""
    folder = find_checkpoint(args.checkpoint)
    manifest = read_manifest(folder)
    found = list(damages(folder, manifest)) if args.verify else None
    facts = {"path": str(folder), **_facts(manifest), "damages": found}
    if args.json:
        print(json.dumps(facts | {"tensors": _tensors(manifest)}))
    else:
        for name, text in _lines(facts, manifest, args.checkpoint):
            print(f"{name:<12}{text}")
    if found:
        raise CheckpointError(f"{len(found)} damaged: {'; '.join(found)}")
    return 0


def _facts(manifest: Manifest) -> dict[str, Any]:
    training = manifest.training
    weights = {n: e for n, e in manifest.tensors.items() if not n.startswith(OPTIMIZER)}
    state = {n: e for n, e in manifest.tensors.items() if n.startswith(OPTIMIZER)}
    return {
        "step": manifest.step,
        "model": manifest.spec.to_dict(),
        "parameters": num_params(manifest.spec),
        "tokenizer": manifest.tokenizer,
        "training": None if training is None else asdict(training),
        "weights": _sizes(weights),
        "optimizer": _sizes(state) | {"kinds": sorted({n.rpartition(".")[2] for n in state})},
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
    }


def _sizes(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Number of tensors, their elements, bytes and dtypes."""
    pieces = [piece for entry in entries.values() for piece in entry.pieces]
    return {
        "tensors": len(entries),
        "elements": sum(math.prod(entry.shape) for entry in entries.values()),
        "bytes": sum(piece.bytes[1] - piece.bytes[0] for piece in pieces),
        "dtypes": sorted({entry.dtype for entry in entries.values()}),
    }


def _tensors(manifest: Manifest) -> dict[str, Any]:
    return {
        name: {"shape": entry.shape, "dtype": entry.dtype, "pieces": len(entry.pieces)}
        for name, entry in manifest.tensors.items()
    }


def _lines(facts: Mapping[str, Any], manifest: Manifest, asked: Path) -> list[tuple[str, str]]:
    """(label, text) of each line for a person."""
    spec, training = manifest.spec, manifest.training
    lines = [
        ("checkpoint", facts["path"]),
        ("step", f"{manifest.step:,}"),
        (
            "model",
            f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, "
            f"{spec.num_heads} heads ({spec.num_kv_heads} KV), vocabulary {spec.vocab_size:,}; "
            f"{facts['parameters']:,} parameters",
        ),
        ("weights", _sizes_line(facts["weights"])),
    ]
    if training is None:
        lines.append(("training", "none: weights alone, which a new run may start from"))
    else:
        kinds = ", ".join(facts["optimizer"]["kinds"]) or "no state"
        lines.append(
            ("optimizer", f"{training.optimizer} ({kinds}): {_sizes_line(facts['optimizer'])}")
        )
        epoch = sum(training.sizes)
        lines.append(("samples", f"{training.samples:,} consumed, {epoch:,} an epoch"))
    if training is not None and training.frozen:
        lines.append(("frozen", ", ".join(training.frozen)))
    files = facts["files"]
    lines.append(("tokenizer", str(manifest.tokenizer or "none")))
    lines.append(("files", f"{len(files)}, {_bytes(sum(files.values()))}"))
    lines += _neighbours(asked)
    if facts["damages"] is not None:
        what = "every byte is as it was written" if not facts["damages"] else "DAMAGED, see below"
        lines.append(("verified", what))
    return lines


def _sizes_line(sizes: Mapping[str, Any]) -> str:
    dtypes = f" in {', '.join(sizes['dtypes'])}" if sizes["dtypes"] else ""
    return f"{sizes['tensors']:,} tensors{dtypes}, {_bytes(sizes['bytes'])}"


def _bytes(count: int) -> str:
    return f"{count:,} bytes" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def _neighbours(asked: Path) -> Sequence[tuple[str, str]]:
    """Of a run: which other checkpoints it has, and what is left of saves that were cut off."""
    names = [path.name for path in complete(shelf(asked))]
    cut = [path.name for path in unfinished(shelf(asked))]
    lines = [("of run", f"{len(names)} complete: {', '.join(names)}")] if names else []
    return [*lines, *([("unfinished", ", ".join(cut))] if cut else [])]
