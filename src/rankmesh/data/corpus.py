"""The demo's corpus: the Python standard library's own sources, text that every machine has.

Owns which files belong to it and which of them are held out. It must not know models or training.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankmesh.data.indexed import TokenFile
from rankmesh.data.prepare import PrepareOptions, prepare
from rankmesh.data.tokenizer import train_bpe
from rankmesh.errors import DataError

# One file in this many is held out for validation.
HELD_OUT = 20
# Folders at any depth that are not the library itself, or are tables rather than text (the code
# pages).
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)


@dataclass(frozen=True)
class DemoData:
    """Prefixes of the token files, and the tokenizer.json, that `make_demo_data` wrote."""

    train_prefix: str
    valid_prefix: str
    tokenizer_path: str


@dataclass(frozen=True)
class Corpus:
    """Files to train on and files held out, each sorted by path."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]


def stdlib_corpus(max_bytes: int | None = None, root: Path | None = None) -> Corpus:
    """The standard library's .py files (or those under `root`), about 5% of them held out.

    The side that a file falls on hangs on a hash of its path within the library alone. Under
    `max_bytes` each side takes its share of files, in the order of that hash, as far as they fit.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    train: list[Path] = []
    valid: list[Path] = []
    for name in sorted(_names(folder), key=_hash):
        (train if _hash(name) % HELD_OUT else valid).append(folder / name)
    if max_bytes is not None:
        train = _capped(train, max_bytes - max_bytes // HELD_OUT)
        valid = _capped(valid, max_bytes // HELD_OUT)
    corpus = Corpus(tuple(sorted(train)), tuple(sorted(valid)))
    if not corpus.train or not corpus.valid:
        raise DataError(
            f"{folder}: {len(corpus.train)} files to train on and {len(corpus.valid)} held out; "
            f"both are needed (max_bytes {max_bytes})"
        )
    return corpus


def make_demo_data(
    out_dir: str | Path, vocab_size: int = 2048, max_bytes: int | None = None
) -> DemoData:
    """Trains a BPE tokenizer on the corpus; writes train and validation token files; takes seconds.

    Does nothing if `out_dir` already holds the result of the same call on the same Python. Raises
    DataError if the package `tokenizers` is missing or the files cannot be written.
    """
    folder = Path(out_dir)
    data = DemoData(
        train_prefix=str(folder / "train"),
        valid_prefix=str(folder / "valid"),
        tokenizer_path=str(folder / "tokenizer.json"),
    )
    recipe = json.dumps(
        {"vocab_size": vocab_size, "max_bytes": max_bytes, "python": platform.python_version()}
    )
    done = folder / "demo.json"
    if _is_done(done, recipe, data):
        return data
    corpus = stdlib_corpus(max_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    train_bpe(_texts(corpus.train), vocab_size, Path(data.tokenizer_path))
    for prefix, files in ((data.train_prefix, corpus.train), (data.valid_prefix, corpus.valid)):
        prepare(
            PrepareOptions(inputs=files, tokenizer=data.tokenizer_path, out=prefix, kind="text")
        )
    done.write_text(recipe, encoding="ascii")
    return data


def _is_done(done: Path, recipe: str, data: DemoData) -> bool:
    if not done.is_file() or done.read_text(encoding="ascii") != recipe:
        return False
    try:
        TokenFile(data.train_prefix)
        TokenFile(data.valid_prefix)
    except DataError:
        return False
    return Path(data.tokenizer_path).is_file()


def _names(folder: Path) -> Iterator[Path]:
    """Paths of the corpus's files relative to `folder`."""
    for parent, folders, files in os.walk(folder):
        # In place: os.walk then stays out of them, and site-packages may be large.
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in files:
            if name.endswith(".py"):
                yield (Path(parent) / name).relative_to(folder)


def _capped(files: list[Path], max_bytes: int) -> list[Path]:
    """The files, in order, that fit: one that does not is passed over."""
    kept, total = [], 0
    for path in files:
        size = path.stat().st_size
        if total + size <= max_bytes:
            kept.append(path)
            total += size
    return kept


def _hash(name: Path) -> int:
    return int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:8], "little")


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        yield path.read_text(encoding="utf-8", errors="ignore")
