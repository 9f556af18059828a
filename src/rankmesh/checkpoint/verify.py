"""Reads every byte of a checkpoint and compares it with the checksums in its manifest.

Owns that walk. It knows no torch and no meaning of a tensor.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rankmesh.checkpoint.manifest import FileEntry, Manifest, Piece

_BLOCK = 1 << 22


def damages(folder: Path, manifest: Manifest) -> Iterator[str]:
    """One line for each piece, header or other file whose bytes are not those that were written.

    The manifest has been checked when it was read.
    """
    pieces = defaultdict(list)
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            pieces[piece.file].append(piece)
    for name, file in manifest.files.items():
        try:
            yield from _damages(folder / name, file, pieces[name])
        except OSError as error:
            yield f"{folder / name}: cannot be read: {error.strerror}"


def _damages(path: Path, entry: FileEntry, pieces: Sequence[Piece]) -> Iterator[str]:
    rest = hashlib.sha256()
    position = 0
    with path.open("rb") as file:
        for piece in sorted(pieces, key=lambda piece: piece.bytes):
            if piece.bytes[0] < position:
                yield f"{path}: {piece.key} overlaps the piece before it"
                return
            _feed(file, piece.bytes[0] - position, rest)
            found = hashlib.sha256()
            _feed(file, piece.bytes[1] - piece.bytes[0], found)
            if found.hexdigest() != piece.sha256:
                yield f"{path}: {piece.key} differs from its checksum"
            position = piece.bytes[1]
        _feed(file, max(0, entry.bytes - position), rest)
    if rest.hexdigest() != entry.sha256:
        yield f"{path}: {'its header' if pieces else 'it'} differs from its checksum"


def _feed(file: BinaryIO, size: int, digest: Any) -> None:
    """The next `size` bytes of `file`, or as many as there are, into `digest`."""
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
