"""manifest.json of a folder of weights: which piece of which logical tensor lies in which file.

Owns the format, its version and the check that pieces tile their tensors. It reads no weights and
knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankmesh.errors import CheckpointError, ConfigError
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.placement import parts

MANIFEST = "manifest.json"
BYTES = "bytes"
TOKENIZER = "tokenizer.json"
FORMAT = "rankmesh weights"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, from `offset` with `shape` in global indices, stored whole as `key` in
    `file`."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: unpadded global shape, dtype code of safetensors, and the pieces that tile
    it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class FileEntry:
    """Size and sha256 of a file beside the manifest."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of a folder of weights. Nothing in it tells which mesh wrote it.

    tokenizer: what the token ids mean, "bytes", "tokenizer.json" (in the folder) or None.
    """

    step: int
    spec: ModelSpec
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    tokenizer: str | None = None


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "tokenizer": manifest.tokenizer,
        "model": manifest.spec.to_dict(),
        "tensors": {name: asdict(entry) for name, entry in manifest.tensors.items()},
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
    }
    return json.dumps(content, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, checked against its own model: names, shapes, tiling, sizes of
    files.

    Raises CheckpointError in one line for a folder without a manifest, a newer format, a missing
    tensor, a wrong shape, a gap between pieces, a missing or truncated file.
    """
    path = folder / MANIFEST
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a manifest of this package ({FORMAT!r} is expected)")
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version {version} is newer than this version reads ({FORMAT_VERSION})"
        )
    try:
        manifest = Manifest(
            step=content["step"],
            spec=make_spec(**content["model"]),
            tensors={name: tensor_entry(entry) for name, entry in content["tensors"].items()},
            files={name: FileEntry(**entry) for name, entry in content["files"].items()},
            tokenizer=content.get("tokenizer"),
        )
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path}: damaged manifest: {error}") from error
    check_tensors(str(path), manifest.spec, manifest.tensors)
    if manifest.tokenizer not in (None, BYTES, TOKENIZER):
        raise CheckpointError(
            f"{path}: tokenizer {manifest.tokenizer!r}; allowed: {BYTES}, {TOKENIZER}"
        )
    _check_files(folder, manifest)
    return manifest


def check_tensors(where: str, spec: ModelSpec, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse tensors that are not exactly those of `spec`, each tiled by its pieces."""
    expected = {part.name: part.shape for part in parts(spec)}
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{where}: tensor {name} is missing")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {tensors[name].shape}, its model needs {shape}"
            )
        check_tiling(f"{where}: tensor {name}", shape, tensors[name].pieces)
    for name in tensors:
        if name not in expected:
            raise CheckpointError(f"{where}: tensor {name} has no place in its model")


def check_tiling(where: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """Refuse pieces that leave a gap, overlap, or reach out of `shape`."""
    for piece in pieces:
        if not _inside(piece, shape):
            raise CheckpointError(
                f"{where}: piece at {piece.offset} of {piece.shape} is outside of {shape}"
            )
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        raise CheckpointError(
            f"{where}: its {len(pieces)} pieces do not add up to shape {shape}; "
            "was it written by all ranks, to one shared folder?"
        )
    for index, first in enumerate(pieces):
        for second in pieces[index + 1 :]:
            if _overlap(first, second):
                raise CheckpointError(
                    f"{where}: pieces at {first.offset} and {second.offset} overlap"
                )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises CheckpointError in one line."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return content


def plain_file_name(where: str, name: object) -> str:
    """`name`, refused unless it is a file name without any folder: a manifest may not point
    elsewhere."""
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{where}: {name!r} is not the name of a file in this folder")
    return name


def merge(entries: Iterable[tuple[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """One entry a name, pieces in order of their offset. Raises CheckpointError where writers
    disagree."""
    merged: dict[str, TensorEntry] = {}
    for name, entry in entries:
        known = merged.setdefault(name, TensorEntry(entry.shape, entry.dtype, ()))
        if (known.shape, known.dtype) != (entry.shape, entry.dtype):
            raise CheckpointError(
                f"tensor {name}: writers disagree: {known.dtype} {known.shape} and "
                f"{entry.dtype} {entry.shape}"
            )
        pieces = sorted((*known.pieces, *entry.pieces), key=lambda piece: piece.offset)
        merged[name] = TensorEntry(entry.shape, entry.dtype, tuple(pieces))
    return merged


def tensor_entry(content: Mapping[str, Any]) -> TensorEntry:
    """The entry that `dataclasses.asdict` and JSON made of a TensorEntry."""
    pieces = tuple(
        Piece(
            plain_file_name(MANIFEST, piece["file"]),
            piece["key"],
            tuple(piece["offset"]),
            tuple(piece["shape"]),
        )
        for piece in content["pieces"]
    )
    return TensorEntry(tuple(content["shape"]), content["dtype"], pieces)


def _check_files(folder: Path, manifest: Manifest) -> None:
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                raise CheckpointError(f"{folder / MANIFEST}: {piece.file} has no checksum")
    for name, file in manifest.files.items():
        path = folder / plain_file_name(MANIFEST, name)
        if not path.is_file():
            raise CheckpointError(f"{path}: file is missing")
        size = path.stat().st_size
        if size != file.bytes:
            raise CheckpointError(
                f"{path}: truncated or changed: {size} bytes, {file.bytes} were written"
            )


def _inside(piece: Piece, shape: tuple[int, ...]) -> bool:
    return len(piece.offset) == len(piece.shape) == len(shape) and all(
        0 <= low and low + length <= size
        for low, length, size in zip(piece.offset, piece.shape, shape, strict=True)
    )


def _overlap(first: Piece, second: Piece) -> bool:
    return all(
        max(a, b) < min(a + la, b + lb)
        for a, la, b, lb in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    )
