"""manifest.json of a checkpoint: which piece of which logical tensor lies in which bytes of which
file, and how far the run had come.

Owns the format, its version, and the checks that need no data: names, shapes, tiling, sizes. It
reads no tensor and knows no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankmesh.errors import CheckpointError, ConfigError, reason
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.placement import parts

MANIFEST = "manifest.json"
BYTES = "bytes"
TOKENIZER = "tokenizer.json"
FORMAT = "rankmesh checkpoint"
FORMAT_VERSION = 1

# Before the names of optimizer state; a parameter's own name has none of it.
OPTIMIZER = "optimizer/"
STEP_FOLDER = re.compile(r"step-(\d+)")
_MOST_NAMES = 60

Shape = tuple[int, ...]
Phases = tuple[tuple[int, tuple[float, ...]], ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, from `offset` with `shape` in global indices, stored whole, row by row.

    key: its name in the safetensors file `file`. bytes: first and one past the last byte in the
    file. sha256: of those bytes.
    """

    file: str
    key: str
    offset: Shape
    shape: Shape
    bytes: tuple[int, int]
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: unpadded global shape, dtype code of safetensors, and the pieces that tile
    it."""

    shape: Shape
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class FileEntry:
    """Size of a file beside the manifest, and the sha256 of those of its bytes that are in no
    piece: of the header of a tensor file, of the whole of any other."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a resume needs beside the tensors.

    samples: consumed since the start of training. sizes: samples in each training set. phases:
    (sample number, weights of the sets from there on) where sets are mixed by weight. optimizer:
    its name. frozen: parameters that were not trained, and so have no optimizer state. config: the
    resolved config as plain values. loss_scale: its value, good steps and skipped steps, where
    there is one.
    """

    samples: int
    sizes: Shape
    phases: Phases
    optimizer: str
    frozen: tuple[str, ...]
    config: Mapping[str, Any]
    loss_scale: tuple[float, int, int] | None = None


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint. Nothing in it tells which mesh may read it.

    tokenizer: what the token ids mean, "bytes", "tokenizer.json" (in the folder) or None. training:
    None for weights alone.
    """

    step: int
    spec: ModelSpec
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    tokenizer: str | None = None
    training: Training | None = None


def state_name(parameter: str, kind: str) -> str:
    """Logical name of an optimizer tensor, such as optimizer/norm.weight.m."""
    return f"{OPTIMIZER}{parameter}.{kind}"


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, a tensor a line, with a checksum of its own content."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "tokenizer": manifest.tokenizer,
        "training": None if manifest.training is None else asdict(manifest.training),
        "model": manifest.spec.to_dict(),
        "tensors": {name: asdict(entry) for name, entry in manifest.tensors.items()},
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
    }
    content["sha256"] = checksum(content)
    lines = []
    for key, value in content.items():
        text = json.dumps(value)
        if key in ("tensors", "files") and value:
            inner = [f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()]
            text = "{\n" + ",\n".join(inner) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def checksum(content: Mapping[str, Any]) -> str:
    """sha256 of a manifest's content without its own checksum, whatever its layout as text."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`, checked against its own model: names, shapes, tiling, sizes of
    files.

    Raises CheckpointError in one line for a folder without a manifest, another or a newer format, a
    changed manifest, a missing tensor, a wrong shape, a gap between pieces, a missing or truncated
    file, a folder of another step.
    """
    path = folder / MANIFEST
    content = _read_content(path)
    try:
        manifest = _manifest(content)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path}: damaged manifest: {error}") from error
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named.group(1)) != manifest.step:
        raise CheckpointError(f"{path}: is of step {manifest.step}, which its folder is not")
    check_tensors(str(path), manifest.spec, manifest.tensors)
    if manifest.tokenizer not in (None, BYTES, TOKENIZER):
        raise CheckpointError(
            f"{path}: tokenizer {manifest.tokenizer!r}; allowed: {BYTES}, {TOKENIZER}"
        )
    check_files(folder, manifest)
    return manifest


def _read_content(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r}; this version reads {FORMAT!r}"
        )
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version {version} is newer than this version reads ({FORMAT_VERSION})"
        )
    if content.get("sha256") != checksum(content):
        raise CheckpointError(f"{path}: differs from its own checksum: damaged, or edited by hand")
    return content


def _manifest(content: Mapping[str, Any]) -> Manifest:
    training = content["training"]
    if training is not None:
        phases = tuple((start, tuple(weights)) for start, weights in training["phases"])
        sizes, frozen = tuple(training["sizes"]), tuple(training["frozen"])
        given = {**training, "phases": phases, "sizes": sizes, "frozen": frozen}
        scale = training.get("loss_scale")
        given["loss_scale"] = None if scale is None else (scale[0], scale[1], scale[2])
        training = Training(**given)
    return Manifest(
        step=content["step"],
        spec=make_spec(**content["model"]),
        tensors={name: tensor_entry(entry) for name, entry in content["tensors"].items()},
        files={name: FileEntry(**entry) for name, entry in content["files"].items()},
        tokenizer=content["tokenizer"],
        training=training,
    )


def tensor_entry(content: Mapping[str, Any]) -> TensorEntry:
    """The entry that `dataclasses.asdict` and JSON made of a TensorEntry."""
    pieces = tuple(
        Piece(
            plain_file_name(MANIFEST, piece["file"]),
            piece["key"],
            tuple(piece["offset"]),
            tuple(piece["shape"]),
            (piece["bytes"][0], piece["bytes"][1]),
            piece["sha256"],
        )
        for piece in content["pieces"]
    )
    return TensorEntry(tuple(content["shape"]), content["dtype"], pieces)


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


def model_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Logical name -> shape of every parameter of a model, in order of use."""
    return {part.name: part.shape for part in parts(spec)}


def compare(where: str, held: Mapping[str, Shape], needed: Mapping[str, Shape]) -> None:
    """Refuse `held` tensors (name -> shape) that are not exactly the `needed` ones.

    Raises one CheckpointError that lists what is missing, what has no place, what has another
    shape.
    """
    missing = [name for name in needed if name not in held]
    strange = [name for name in held if name not in needed]
    other = [
        f"{name} (shape {held[name]}, the model needs {shape})"
        for name, shape in needed.items()
        if name in held and held[name] != shape
    ]
    faults = [
        f"{len(names)} {one if len(names) == 1 else many}: {_list(names)}"
        for names, one, many in (
            (missing, "tensor is missing", "tensors are missing"),
            (strange, "tensor has no place in the model", "tensors have no place in the model"),
            (other, "tensor has another shape", "tensors have another shape"),
        )
        if names
    ]
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}")


def _list(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def check_tensors(where: str, spec: ModelSpec, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse tensors that are not those of `spec`, and optimizer state of its parameters, each
    tiled by its pieces."""
    needed = model_shapes(spec)
    for name, entry in tensors.items():
        parameter = name.removeprefix(OPTIMIZER).rpartition(".")[0]
        if name.startswith(OPTIMIZER) and parameter in needed:
            # A scalar, such as a step count, or an element for each of the parameter's.
            needed[name] = needed[parameter] if entry.shape else ()
    compare(where, {name: entry.shape for name, entry in tensors.items()}, needed)
    for name, entry in tensors.items():
        check_tiling(f"{where}: tensor {name}", entry.shape, entry.pieces)


def check_tiling(where: str, shape: Shape, pieces: Sequence[Piece]) -> None:
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


def check_files(folder: Path, manifest: Manifest) -> None:
    """Refuse files of a checkpoint that are missing or have another size than was written."""
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                raise CheckpointError(f"{folder / MANIFEST}: {piece.file} is not in its files")
    for name, file in manifest.files.items():
        path = folder / plain_file_name(MANIFEST, name)
        if not path.is_file():
            raise CheckpointError(f"{path}: file is missing")
        size = path.stat().st_size
        if size != file.bytes:
            raise CheckpointError(
                f"{path}: truncated or changed: {size} bytes, {file.bytes} were written"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises CheckpointError in one line."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return content


def plain_file_name(where: str, name: object) -> str:
    """`name`, refused unless it is a file name without any folder: a manifest may not point
    elsewhere."""
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{where}: {name!r} is not the name of a file in this folder")
    return name


def _inside(piece: Piece, shape: Shape) -> bool:
    return len(piece.offset) == len(piece.shape) == len(shape) and all(
        0 <= low and low + length <= size
        for low, length, size in zip(piece.offset, piece.shape, shape, strict=True)
    )


def _overlap(first: Piece, second: Piece) -> bool:
    return all(
        max(a, b) < min(a + la, b + lb)
        for a, la, b, lb in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    )
