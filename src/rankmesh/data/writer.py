"""Writing token files: ids and lengths are appended to a folder of parts, then put in place.

Owns the parts, the index made of them and the atomic last step. It must not know tokenizers, nor
why a job was interrupted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rankmesh.data.indexed import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    Tokens,
    index_path,
    meta_path,
    token_dtype,
    tokens_path,
)
from rankmesh.data.meta import TokenMeta
from rankmesh.errors import DataError

_MAX_LENGTH = 2**31 - 1
# Lengths of documents that are held at once while the index is written.
_BLOCK = 1 << 20
_BUFFER = 1 << 20


class TokenParts:
    """The parts of a token file to be, in `folder`: ids, and the length of each document.

    They are opened at `documents` and `tokens`: what lies beyond, of a job that was cut off, is
    cut away. Raises DataError where less is there.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], documents: int = 0, tokens: int = 0
    ) -> None:
        self._folder = folder
        self.dtype = dtype
        self._ids = _opened(folder / "ids", tokens * dtype.itemsize)
        try:
            self._lengths = _opened(folder / "lengths", documents * 4)
        except BaseException:
            self._ids.close()
            raise

    def append(self, ids: Tokens, lengths: NDArray[np.int32]) -> None:
        """Adds documents: `lengths` [D] in tokens, `ids` [sum(lengths)]; length 0 is allowed."""
        self._ids.write(np.ascontiguousarray(ids, dtype=self.dtype).tobytes())
        self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").tobytes())

    def sync(self) -> None:
        """Everything that was appended is on disk when this returns."""
        _sync(self._ids)
        _sync(self._lengths)

    def publish(self, prefix: str | Path, meta: TokenMeta | None) -> None:
        """Puts the finished files in place, the index last: with it the token file exists.

        An older file of that name is replaced and loses its index first: at no moment do old and
        new meet as a pair.
        """
        self.sync()
        with (self._folder / "idx").open("wb") as stream:
            self._write_index(stream)
            _sync(stream)
        if meta is not None:
            with (self._folder / "meta").open("wb") as stream:
                stream.write(meta.to_json().encode("ascii"))
                _sync(stream)
        index_path(prefix).unlink(missing_ok=True)
        meta_path(prefix).unlink(missing_ok=True)
        os.replace(self._folder / "ids", tokens_path(prefix))
        if meta is not None:
            os.replace(self._folder / "meta", meta_path(prefix))
        os.replace(self._folder / "idx", index_path(prefix))
        _sync_folder(index_path(prefix).parent)

    def close(self) -> None:
        """Closes the parts and leaves them where they are."""
        # Closing flushes, and on a full disk that fails a second time.
        for stream in (self._ids, self._lengths):
            with contextlib.suppress(OSError):
                stream.close()

    def _write_index(self, stream: BinaryIO) -> None:
        """The layout is that of `indexed.py`; each of its arrays is one pass over the lengths."""
        documents = self._lengths.tell() // 4
        sequences = sum(int(np.count_nonzero(block)) for block in self._length_blocks())
        code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == self.dtype)
        stream.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        for block in self._length_blocks():
            stream.write(block[block > 0].tobytes())
        start = 0
        for block in self._length_blocks():
            ends = np.cumsum(block[block > 0], dtype=np.int64) * self.dtype.itemsize + start
            stream.write(np.concatenate(([start], ends[:-1])).astype("<i8")[: ends.size].tobytes())
            start = int(ends[-1]) if ends.size else start
        stream.write(np.zeros(1, "<i8").tobytes())
        before = 0
        for block in self._length_blocks():
            bounds = np.cumsum(block > 0, dtype=np.int64) + before
            stream.write(bounds.astype("<i8").tobytes())
            before = int(bounds[-1])

    def _length_blocks(self) -> Iterator[NDArray[np.int32]]:
        with (self._folder / "lengths").open("rb") as stream:
            while (block := np.fromfile(stream, "<i4", _BLOCK)).size:
                yield block


class TokenWriter:
    """Writes one token file a document at a time, in memory of a few bytes a document.

    A context manager. Everything goes to a temporary folder beside PREFIX; `commit` puts the
    finished files in place; leaving the block without it removes them, so no reader ever sees a
    half-written file.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.prefix = str(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = 0
        self.num_documents = 0
        self.max_token = -1
        # Another name for each writer: two that race for one prefix never share a file.
        self._folder = Path(f"{self.prefix}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        self._folder.mkdir(parents=True)
        self._parts = TokenParts(self._folder, self.dtype)

    def add(self, tokens: Tokens | Sequence[int]) -> None:
        """Appends one document [length]. Raises DataError for an id outside [0, vocab_size)."""
        ids = np.asarray(tokens, dtype=np.int64 if len(tokens) == 0 else None)
        if ids.size > _MAX_LENGTH:
            raise DataError(
                f"document {self.num_documents} has {ids.size:,} tokens, "
                f"at most {_MAX_LENGTH:,} fit"
            )
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                raise DataError(
                    f"document {self.num_documents} has token id {low if low < 0 else high}, "
                    f"outside the vocabulary of {self.vocab_size}"
                )
            self.max_token = max(self.max_token, high)
        self._parts.append(ids, np.array([ids.size], np.int32))
        self.num_tokens += int(ids.size)
        self.num_documents += 1

    def commit(self, meta: TokenMeta | None = None) -> None:
        """Syncs everything and puts it in place."""
        self._parts.publish(self.prefix, meta)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parts.close()
        shutil.rmtree(self._folder)


def _opened(path: Path, size: int) -> BinaryIO:
    """The file, cut to `size` bytes, at its end."""
    stream: BinaryIO = path.open("r+b" if path.exists() else "w+b", buffering=_BUFFER)
    stream.seek(0, os.SEEK_END)
    if stream.tell() < size:
        found = stream.tell()
        stream.close()
        raise DataError(f"{path}: {found:,} bytes, expected at least {size:,}")
    stream.truncate(size)
    stream.seek(size)
    return stream


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
