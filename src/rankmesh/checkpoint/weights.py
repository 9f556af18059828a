"""A folder of logical weights in this project's own format: written by many ranks, read by any.

Owns writing (temporary folder, sync, one rename) and slice-wise reading. It knows no mesh: callers
say which slices they hold, and hand in the barrier.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
    check_tensors,
    merge,
    read_json,
    read_manifest,
    tensor_entry,
    to_text,
)
from rankmesh.checkpoint.tensorfile import (
    TensorFiles,
    dtype_code,
    entry_of,
    show,
    sync_folder,
    write_bytes,
    write_tensors,
)
from rankmesh.errors import CheckpointError
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts
from rankmesh.topology.params import Slices

_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class LocalSlice:
    """What one rank contributes of a tensor: `tensor` is the box `slices` of the logical
    `shape`."""

    name: str
    shape: tuple[int, ...]
    slices: Slices
    tensor: Tensor


def write_weights(
    folder: Path,
    local: Iterable[LocalSlice],
    *,
    spec: ModelSpec,
    step: int,
    rank: int = 0,
    barrier: Callable[[], None] = lambda: None,
    tokenizer: str | None = None,
) -> None:
    """Write a model's weights; every rank calls it, each with the slices of which it is the first
    holder.

    Together the slices must tile every tensor of `spec` once; a rank may contribute none. `barrier`
    waits for all ranks and is called three times. Nothing is gathered: each rank writes its own
    file, rank 0 merges the lists and renames the folder into place, so that `folder` is either
    absent or complete. All ranks must share the file system. `tokenizer`, what the token ids mean:
    "bytes", a tokenizer.json or a folder with one, which is copied along. Raises CheckpointError
    where `folder` exists or the slices leave a gap.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; weights are never overwritten")
    temporary = folder.with_name(f".{folder.name}.partial")
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier()
    _write_own(temporary, tuple(local), rank)
    barrier()
    if rank == 0:
        _commit(temporary, folder, spec, step, tokenizer)
    barrier()


class Weights:
    """Weights in this project's format, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        """Reads the manifest alone. Raises CheckpointError in one line; see `read_manifest`."""
        self.folder = folder
        self._manifest = read_manifest(folder)
        self._files = TensorFiles(folder)

    @property
    def spec(self) -> ModelSpec:
        return self._manifest.spec

    @property
    def step(self) -> int:
        """Optimizer steps that made these weights."""
        return self._manifest.step

    @property
    def tokenizer(self) -> str | None:
        """What the token ids mean: "bytes", the path of a tokenizer.json, or None if unknown."""
        named = self._manifest.tokenizer
        return str(self.folder / TOKENIZER) if named == TOKENIZER else named

    def slice(self, name: str, slices: Slices) -> Tensor:
        """The slice of logical tensor `name`, on the CPU in its stored dtype; only its bytes are
        read.

        Raises CheckpointError for an unknown tensor or a slice that leaves its shape.
        """
        entry = self._entry(name, slices)
        found = None
        for piece in entry.pieces:
            box = _intersection(piece, slices)
            if box is None:
                continue
            inner = tuple(
                slice(low - start, high - start)
                for (low, high), start in zip(box, piece.offset, strict=True)
            )
            part = self._files.read(piece.file, piece.key, inner)
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
        """Read every byte of every file and compare the checksums; raises CheckpointError."""
        for name, file in self._manifest.files.items():
            if entry_of(self.folder / name).sha256 != file.sha256:
                raise CheckpointError(
                    f"{self.folder / name}: bytes differ from the checksum written"
                )

    def _entry(self, name: str, slices: Slices) -> TensorEntry:
        entry = self._manifest.tensors.get(name)
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


def _write_own(temporary: Path, local: Sequence[LocalSlice], rank: int) -> None:
    """This rank's data file, and beside it the list of its pieces for rank 0."""
    if not local:
        return
    file = f"weights-{rank:05d}.safetensors"
    entries = {}
    for held in local:
        shape = tuple(s.stop - s.start for s in held.slices)
        if tuple(held.tensor.shape) != shape or held.name in entries:
            raise CheckpointError(
                f"{held.name}: a tensor of shape {tuple(held.tensor.shape)} was given for slice "
                f"{show(held.slices)}, or the name came twice"
            )
        piece = Piece(file, held.name, tuple(s.start for s in held.slices), shape)
        code = dtype_code(held.name, held.tensor.dtype)
        entries[held.name] = TensorEntry(held.shape, code, (piece,))
    record = write_tensors(temporary / file, {held.name: held.tensor for held in local})
    content = {
        "file": file,
        "record": asdict(record),
        "tensors": {name: asdict(entry) for name, entry in entries.items()},
    }
    write_bytes(_list_path(temporary, rank), json.dumps(content).encode())


def _commit(
    temporary: Path, folder: Path, spec: ModelSpec, step: int, tokenizer: str | None
) -> None:
    """Rank 0's part: merge the lists, write the manifest, rename once everything is on disk."""
    lists = sorted(temporary.glob("pieces-*.json"))
    contents = [read_json(path) for path in lists]
    merged = merge(
        (name, tensor_entry(entry))
        for content in contents
        for name, entry in content["tensors"].items()
    )
    check_tensors(str(folder), spec, merged)
    files = {content["file"]: FileEntry(**content["record"]) for content in contents}
    if tokenizer is not None and tokenizer != BYTES:
        files |= _copy_tokenizer(Path(tokenizer), temporary)
        tokenizer = TOKENIZER
    manifest = Manifest(
        step=step,
        spec=spec,
        tensors={part.name: merged[part.name] for part in parts(spec)},
        files=files,
        tokenizer=tokenizer,
    )
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
    copies |= {path: name for name in _SIDE_FILES if (path := source.with_name(name)).is_file()}
    try:
        return {
            name: write_bytes(folder / name, path.read_bytes()) for path, name in copies.items()
        }
    except OSError as error:
        raise CheckpointError(f"tokenizer {source}: cannot be copied: {error}") from error


def _list_path(temporary: Path, rank: int) -> Path:
    return temporary / f"pieces-{rank:05d}.json"


def _intersection(piece: Piece, slices: Slices) -> tuple[tuple[int, int], ...] | None:
    """Global bounds, one pair a dim, of what `piece` and `slices` share; None where they share
    nothing."""
    box = tuple(
        (max(start, s.start), min(start + length, s.stop))
        for start, length, s in zip(piece.offset, piece.shape, slices, strict=True)
    )
    return box if all(low < high for low, high in box) else None
