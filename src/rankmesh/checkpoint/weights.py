"""A checkpoint, or weights alone, in this project's own format: written by many ranks, read by any.

Owns writing (temporary folder, sync, one rename) and slice-wise reading. It knows no mesh: callers
say which slices they hold, and hand in the barrier.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rankmesh.checkpoint.manifest import (
    BYTES,
    MANIFEST,
    TOKENIZER,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    Training,
    check_files,
    check_tensors,
    merge,
    model_shapes,
    read_json,
    read_manifest,
    tensor_entry,
    to_text,
)
from rankmesh.checkpoint.shelf import partial
from rankmesh.checkpoint.tensorfile import (
    Deferred,
    TensorFiles,
    dtype_code,
    show,
    sync_folder,
    write_bytes,
    write_tensors,
)
from rankmesh.checkpoint.verify import damages
from rankmesh.errors import CheckpointError, reason
from rankmesh.specs.model import ModelSpec
from rankmesh.topology.params import Slices

# Global bounds, a pair a dim.
Box = tuple[tuple[int, int], ...]

SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class LocalSlice:
    """What one rank contributes of a tensor: `tensor` is the box `slices` of the logical
    `shape`."""

    name: str
    shape: tuple[int, ...]
    slices: Slices
    tensor: Tensor | Deferred


def write_weights(
    folder: Path,
    local: Iterable[LocalSlice],
    *,
    spec: ModelSpec,
    step: int,
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
    tokenizer: str | None = None,
    training: Training | None = None,
    carried: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model's weights, and optimizer state beside them; every rank calls it with the slices
    that it alone writes.

    Together the slices must tile every tensor of `spec` once; a rank may contribute none, or
    several boxes of one tensor. Optimizer tensors have names of `state_name`. `barrier` waits for
    all ranks and is called three times. Nothing is gathered: each rank writes its own file, rank 0
    merges the lists and renames the folder into place, so that `folder` is either absent or
    complete. All ranks must share the file system. `tokenizer`, what the token ids mean: "bytes", a
    tokenizer.json or a folder with one, which is copied along. `training` makes it a checkpoint
    that a run can go on from. `carried`: other files that come along, name -> content. Raises
    CheckpointError where `folder` exists, the slices leave a gap or a file cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; checkpoints are never overwritten")
    temporary = partial(folder)
    try:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier()
        _write_own(temporary, tuple(local), rank)
        barrier()
        if rank == 0:
            plan = Manifest(step, spec, {}, {}, tokenizer, training)
            _commit(temporary, folder, plan, carried or {})
        barrier()
    except OSError as error:
        raise CheckpointError(f"{temporary}: cannot be written: {reason(error)}") from error


class Weights:
    """A checkpoint, or weights alone, in this project's format, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        """Reads the manifest alone. Raises CheckpointError in one line; see `read_manifest`."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._files = TensorFiles(folder)

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec

    @property
    def step(self) -> int:
        """Optimizer steps that made these weights."""
        return self.manifest.step

    @property
    def tokenizer(self) -> str | None:
        """What the token ids mean: "bytes", the path of a tokenizer.json, or None if unknown."""
        named = self.manifest.tokenizer
        return str(self.folder / TOKENIZER) if named == TOKENIZER else named

    def slice(self, name: str, slices: Slices) -> Tensor:
        """The slice of logical tensor `name`, on the CPU in its stored dtype; only its bytes are
        read.

        A piece that is read whole, as on the mesh that wrote it, is compared with its checksum.
        Raises CheckpointError for an unknown tensor, a slice that leaves its shape, damaged bytes.
        """
        entry = self._entry(name, slices)
        found = None
        for piece in entry.pieces:
            box = _intersection(piece, slices)
            if box is None:
                continue
            part = self._part(piece, box, entry.dtype)
            if part.shape == tuple(s.stop - s.start for s in slices):
                return part
            if found is None:
                found = torch.empty([s.stop - s.start for s in slices], dtype=part.dtype)
            target = tuple(
                slice(low - s.start, high - s.start)
                for (low, high), s in zip(box, slices, strict=True)
            )
            found[target] = part
        if found is None:
            raise CheckpointError(f"{self.folder}: {name} {show(slices)} is empty")
        return found

    def verify(self) -> None:
        """Read every byte and compare the checksums; raises CheckpointError for the first
        damage."""
        for damage in damages(self.folder, self.manifest):
            raise CheckpointError(damage)

    def _part(self, piece: Piece, box: Box, code: str) -> Tensor:
        """The part of a piece that lies in `box` (global bounds)."""
        inner = tuple(
            slice(low - start, high - start)
            for (low, high), start in zip(box, piece.offset, strict=True)
        )
        if inner == tuple(slice(0, size) for size in piece.shape):
            return self._files.piece(piece, code)
        return self._files.read(piece.file, piece.key, inner)

    def _entry(self, name: str, slices: Slices) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder}: no tensor {name}")
        fits = len(slices) == len(entry.shape) and all(
            0 <= s.start <= s.stop <= size for s, size in zip(slices, entry.shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {entry.shape}, which does not hold {show(slices)}"
            )
        return entry


def _key(held: LocalSlice) -> str:
    """A piece's name in its file: a box that is not the whole tensor carries its bounds, so that a
    file tells by itself what it holds."""
    whole = tuple(slice(0, size) for size in held.shape)
    return held.name if held.slices == whole else f"{held.name}{show(held.slices)}"


def _write_own(temporary: Path, local: Sequence[LocalSlice], rank: int) -> None:
    """This rank's data file, and beside it the list of its pieces for rank 0."""
    if not local:
        return
    tensors: dict[str, Tensor | Deferred] = {}
    for held in local:
        shape = tuple(s.stop - s.start for s in held.slices)
        key = _key(held)
        if tuple(held.tensor.shape) != shape or key in tensors:
            raise CheckpointError(
                f"{held.name}: a tensor of shape {tuple(held.tensor.shape)} was given for slice "
                f"{show(held.slices)}, or the slice came twice"
            )
        tensors[key] = held.tensor
    file = f"data-{rank:05d}.safetensors"
    written = write_tensors(temporary / file, tensors)
    entries = []
    for held in local:
        span, shape = written.spans[_key(held)], tuple(held.tensor.shape)
        offset = tuple(s.start for s in held.slices)
        piece = Piece(file, _key(held), offset, shape, span.bytes, span.sha256)
        code = dtype_code(held.name, held.tensor.dtype)
        entries.append((held.name, asdict(TensorEntry(held.shape, code, (piece,)))))
    content = {
        "file": file,
        "entry": asdict(FileEntry(written.bytes, written.sha256)),
        "tensors": entries,
    }
    write_bytes(temporary / f"pieces-{rank:05d}.json", json.dumps(content).encode())


def _commit(temporary: Path, folder: Path, plan: Manifest, carried: Mapping[str, bytes]) -> None:
    """Rank 0's part: merge the lists into `plan`, write the manifest, rename once everything is on
    disk."""
    lists = sorted(temporary.glob("pieces-*.json"))
    contents = [read_json(path) for path in lists]
    merged = merge(
        (name, tensor_entry(entry)) for content in contents for name, entry in content["tensors"]
    )
    check_tensors(str(folder), plan.spec, merged)
    shapes = model_shapes(plan.spec)
    names = (*shapes, *sorted(merged.keys() - shapes.keys()))
    files = {content["file"]: FileEntry(**content["entry"]) for content in contents}
    tokenizer = plan.tokenizer
    if tokenizer is not None and tokenizer != BYTES:
        files |= _copy_tokenizer(Path(tokenizer), temporary)
        tokenizer = TOKENIZER
    files |= {name: write_bytes(temporary / name, raw) for name, raw in carried.items()}
    manifest = replace(
        plan, tensors={name: merged[name] for name in names}, files=files, tokenizer=tokenizer
    )
    # Another host's file that this one does not see is one that is not on a shared file system.
    check_files(temporary, manifest)
    write_bytes(temporary / MANIFEST, to_text(manifest).encode())
    for path in lists:
        path.unlink()
    sync_folder(temporary)
    temporary.rename(folder)
    sync_folder(folder.parent)


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, FileEntry]:
    """Copy a tokenizer.json, and beside it the files that name its marks."""
    source = source / TOKENIZER if source.is_dir() else source
    copies = {source: TOKENIZER}
    copies |= {path: name for name in SIDE_FILES if (path := source.with_name(name)).is_file()}
    try:
        return {
            name: write_bytes(folder / name, path.read_bytes()) for path, name in copies.items()
        }
    except OSError as error:
        raise CheckpointError(f"tokenizer {source}: cannot be copied: {reason(error)}") from error


def _intersection(piece: Piece, slices: Slices) -> Box | None:
    """Global bounds, one pair a dim, of what `piece` and `slices` share; None where they share
    nothing."""
    box = tuple(
        (max(start, s.start), min(start + length, s.stop))
        for start, length, s in zip(piece.offset, piece.shape, slices, strict=True)
    )
    return box if all(low < high for low, high in box) else None
