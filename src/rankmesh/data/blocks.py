"""Inputs cut into blocks: some whole documents as bytes, and the place where reading goes on.

Owns opening, unpacking and cutting. It must not know what makes a document good, nor tokenizers.
The cuts decide nothing but how work is shared out. Memory is bounded by a block, or by the longest
document, of at most MAX_DOCUMENT bytes: longer ones are passed over as they stream by.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rankmesh.data.extras import load_extra
from rankmesh.data.inputs import PARQUET, TEXT, Input
from rankmesh.errors import DataError

# What a block holds: lines, each a document; items of given sizes: whole files or rows of a table.
LINES, FILES, ROWS = "lines", "files", "rows"

# Sizes of items that have no bytes.
MISSING, TOO_LONG = -1, -2

BLOCK = 1 << 20
MAX_DOCUMENT = 1 << 30
# Files of a block: each costs a system call or more, however small it is.
_MAX_ITEMS = 1024


@dataclass(frozen=True)
class Position:
    """Where reading goes on: `offset` bytes (unpacked) and `number` lines or rows into an input."""

    input: int = 0
    offset: int = 0
    number: int = 0


@dataclass(frozen=True)
class Block:
    """Documents back to back in `payload`.

    sizes: bytes of each item of FILES and ROWS, or MISSING or TOO_LONG; empty for LINES. paths: of
    each item of FILES, else one. first: number, from 1, of the first line or row. end: where the
    next block begins. read: bytes on disk up to there, of all inputs.
    """

    kind: str
    payload: bytes
    sizes: tuple[int, ...]
    paths: tuple[Path, ...]
    first: int
    end: Position
    read: int

    def place(self, item: int, line: int) -> str:
        """What a person looks up, "file:line", for a line of an item (lines count from 1)."""
        if self.kind == FILES:
            return f"{self.paths[item]}:{line}"
        return f"{self.paths[0]}:{self.first + item}"


def read_blocks(
    inputs: Sequence[Input], key: str, start: Position | None = None
) -> Iterator[Block]:
    """The blocks of all inputs, in order, from `start` on. key: the column of parquet files.

    Raises DataError, naming the file, where one cannot be read to its end.
    """
    position = start or Position()
    before = sum(one.size for one in inputs[: position.input])
    while position.input < len(inputs):
        one = inputs[position.input]
        if one.kind == TEXT:
            block = _files(inputs, position.input, before)
            yield block
            position, before = block.end, block.read
            continue
        try:
            yield from (_rows if one.kind == PARQUET else _lines)(one, position, before, key)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(one.path, error) from error
        position, before = Position(position.input + 1), before + one.size


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return DataError(f"{path}: cannot be read: {reason}")


@contextmanager
def _opened(one: Input) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The unpacked content of a file, and the file itself, which says how much of it was read."""
    with one.path.open("rb") as raw:
        unpacked: Any = raw
        if one.packing == ".gz":
            unpacked = gzip.GzipFile(fileobj=raw)
        elif one.packing == ".zst":
            owner: Any = load_extra(".zst")
            unpacked = io.BufferedReader(owner.ZstdReader(raw), BLOCK)
        yield unpacked, raw


def _files(inputs: Sequence[Input], first: int, before: int) -> Block:
    """Text files from `first` on, as many as fit into a block; one at least."""
    contents, sizes, read = list[bytes](), list[int](), before
    for one in inputs[first : first + _MAX_ITEMS]:
        if one.kind != TEXT or (sizes and sum(map(len, contents)) + one.size > BLOCK):
            break
        try:
            with _opened(one) as (stream, _):
                content = stream.read(MAX_DOCUMENT + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(one.path, error) from error
        fits = len(content) <= MAX_DOCUMENT
        sizes.append(len(content) if fits else TOO_LONG)
        contents.append(content if fits else b"")
        read += one.size
    stop = first + len(sizes)
    paths = tuple(one.path for one in inputs[first:stop])
    return Block(FILES, b"".join(contents), tuple(sizes), paths, 1, Position(stop), read)


def _lines(one: Input, start: Position, before: int, key: str) -> Iterator[Block]:
    with _opened(one) as (stream, raw):
        if stream is raw:
            raw.seek(start.offset)
        else:
            _skip(stream, start.offset)
        offset, number = start.offset, start.number
        for payload, taken in cut_lines(stream.read, MAX_DOCUMENT):
            offset += taken
            count = payload.count(b"\n") + (not payload.endswith(b"\n")) if payload else 1
            yield Block(
                kind=LINES if payload else ROWS,
                payload=payload,
                sizes=() if payload else (TOO_LONG,),
                paths=(one.path,),
                first=number + 1,
                end=Position(start.input, offset, number + count),
                read=before + min(raw.tell(), one.size),
            )
            number += count


def _skip(stream: BinaryIO, count: int) -> None:
    while count:
        got = len(stream.read(min(count, BLOCK)))
        if not got:
            raise EOFError("shorter than when the interrupted job read it")
        count -= got


def cut_lines(read: Callable[[int], bytes], limit: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines, about a block at a time, and how many bytes of the stream they took.

    A line of more than `limit` bytes (at least BLOCK) comes alone, as b"": it is not held in
    memory.
    """
    # The line that is not complete yet; pieces are dropped once it is over the limit.
    pieces, size = list[bytes](), 0
    while chunk := read(BLOCK):
        first, last = chunk.find(b"\n") + 1, chunk.rfind(b"\n") + 1
        if first and size + first > limit:
            yield b"", size + first
            pieces, size, chunk, last = [], 0, chunk[first:], last - first
        if last:
            yield b"".join((*pieces, chunk[:last])), size + last
            pieces, size = [], 0
        size += len(chunk) - last
        pieces = [*pieces, chunk[last:]] if size <= limit else []
    if size:
        yield b"".join(pieces), size


def _rows(one: Input, start: Position, before: int, key: str) -> Iterator[Block]:
    owner: Any = load_extra(".parquet")
    total = max(1, owner.num_rows(one.path))
    number = start.number
    for content, sizes in owner.read_column(one.path, key, number):
        ends = np.cumsum(np.maximum(sizes, 0))
        low = 0
        while low < len(sizes):
            begin = int(ends[low - 1]) if low else 0
            high = max(low + 1, int(np.searchsorted(ends, begin + BLOCK, "right")))
            fits = int(ends[high - 1]) - begin <= MAX_DOCUMENT
            yield Block(
                kind=ROWS,
                payload=content[begin : ends[high - 1]] if fits else b"",
                sizes=tuple(sizes[low:high].tolist()) if fits else (TOO_LONG,),
                paths=(one.path,),
                first=number + 1,
                end=Position(start.input, 0, number + high - low),
                read=before + one.size * (number + high - low) // total,
            )
            number += high - low
            low = high
