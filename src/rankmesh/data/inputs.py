"""Which files are read, in which order, and what each one is: text, JSON lines or parquet.

Owns patterns, folders, endings and the refusals that need no reading. It must not know how a file
is opened or what is in it.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankmesh.errors import DataError

TEXT, JSON_LINES, PARQUET = "text", "jsonl", "parquet"
KINDS = ("auto", TEXT, JSON_LINES, PARQUET)

# Endings of compressed files: what follows is the ending of their content.
PACKINGS = (".gz", ".zst")
_ENDINGS = {
    ".txt": TEXT,
    ".text": TEXT,
    ".md": TEXT,
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".parquet": PARQUET,
}
_UNSUPPORTED = frozenset(
    {".xz", ".bz2", ".zip", ".7z", ".tar", ".tgz", ".lz4", ".arrow", ".feather", ".bin", ".idx"}
)
# Of an earlier `prepare`: metadata, not text, though it ends like JSON lines.
_META_ENDING = ".meta.json"


@dataclass(frozen=True)
class Input:
    """One file to read. packing: ".gz", ".zst" or "". size: bytes on disk. mtime_ns: with the size
    it tells whether an interrupted job may go on.
    """

    path: Path
    kind: str
    packing: str
    size: int
    mtime_ns: int


def find_inputs(patterns: Sequence[str | Path], kind: str = "auto") -> tuple[Input, ...]:
    """The files that `patterns` mean, in order: a file, a folder or a glob (`**` crosses folders).

    Files of one folder or glob are sorted by path. A folder gives its visible files whose endings
    are known (all visible ones, unless `kind` is "auto"). kind: "auto", which goes by the ending
    before .gz or .zst (an unknown one is text), or what all files are. Raises DataError where
    nothing is found, a file comes twice or an ending names a kind that is not read.
    """
    found: dict[Path, tuple[Input, str]] = {}
    for pattern in map(str, patterns):
        for path in _expand(pattern, kind):
            real = path.resolve()
            if real in found:
                other, first = found[real]
                raise DataError(
                    f"{path}: is an input twice, by {pattern!r} and by {first!r} ({other.path})"
                )
            found[real] = (_input(path, kind), pattern)
    return tuple(one for one, _ in found.values())


def _expand(pattern: str, kind: str) -> Iterator[Path]:
    path = Path(pattern)
    if path.is_file():
        yield path
    elif path.is_dir():
        paths = sorted(one for one in _visible(path) if kind != "auto" or _is_known(one))
        if not paths:
            raise DataError(f"{path}: a folder without files to read (see --format)")
        yield from paths
    elif glob.has_magic(pattern):
        paths = sorted(
            one for one in map(Path, glob.iglob(pattern, recursive=True)) if one.is_file()
        )
        if not paths:
            raise DataError(f"{pattern}: no such file, and as a pattern it matches none")
        yield from paths
    else:
        raise DataError(f"{path}: no such file")


def _visible(folder: Path) -> Iterator[Path]:
    """Files at any depth; neither they nor a folder above them begin with a dot."""
    for parent, folders, names in os.walk(folder):
        # In place: os.walk then stays out of them.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and not name.endswith(_META_ENDING):
                yield Path(parent) / name


def _split(path: Path) -> tuple[str, str]:
    """(ending of the content, packing): ("", ".gz") for `text.gz`."""
    packing = path.suffix.lower()
    if packing in PACKINGS:
        return path.with_suffix("").suffix.lower(), packing
    return packing, ""


def _is_known(path: Path) -> bool:
    return _split(path)[0] in _ENDINGS


def _input(path: Path, kind: str) -> Input:
    ending, packing = _split(path)
    if kind == "auto":
        if ending in _UNSUPPORTED:
            raise DataError(
                f"{path}: {ending} files are not read; give text, JSON lines or parquet, each also "
                "as .gz or .zst but for parquet"
            )
        kind = _ENDINGS.get(ending, TEXT)
    if kind == PARQUET and packing:
        raise DataError(f"{path}: parquet is compressed inside; {packing} around it is not read")
    status = path.stat()
    return Input(path, kind, packing, status.st_size, status.st_mtime_ns)
