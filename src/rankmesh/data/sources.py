"""Documents out of input files: text (a file is a document) and JSON lines (a line is a document).

Owns what counts as a bad document, and where it is. It must not know tokenizers or token files.
At most one document is held at a time.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmesh.errors import DataError

# Why a document is left out; the words that statistics and errors use.
INVALID_UTF8 = "invalid UTF-8"
BROKEN_JSON = "broken JSON"
NOT_AN_OBJECT = "not a JSON object"
MISSING_KEY = "missing key"
NOT_TEXT = "value is not text"
NUL = "NUL character"
LONE_SURROGATE = "lone surrogate"
EMPTY = "empty"
WHITESPACE = "only white space"
NO_TOKENS = "no tokens"


@dataclass(frozen=True)
class Document:
    """A text to tokenize, its length in UTF-8, and the place that it came from."""

    text: str
    num_bytes: int
    path: Path
    line: int


@dataclass(frozen=True)
class BadDocument:
    """A text or line that cannot be used, with the place that a person would look at."""

    reason: str
    path: Path
    line: int


Found = Document | BadDocument
Reader = Callable[[Path, str], Iterator[Found]]


def read_documents(path: Path, kind: str, key: str) -> Iterator[Found]:
    """The documents of one file, in order, good and bad.

    kind: "text", "jsonl", or "auto", which goes by the file's ending. key: the JSON key that
    holds the text. Raises DataError if the file cannot be read or its ending names a kind that is
    not supported.
    """
    reader = READERS[_kind_of(path) if kind == "auto" else kind]
    try:
        yield from reader(path, key)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _kind_of(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in _UNSUPPORTED:
        raise DataError(f"{path}: {suffix} files are not read; give text or JSON lines")
    return "jsonl" if suffix in _JSON_LINES else "text"


def _read_text(path: Path, key: str) -> Iterator[Found]:
    raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        yield BadDocument(INVALID_UTF8, path, 1 + raw.count(b"\n", 0, error.start))
        return
    found = _judge(text, path, 1)
    if isinstance(found, BadDocument) and found.reason == NUL:
        found = BadDocument(NUL, path, 1 + text.count("\n", 0, text.index("\0")))
    yield found


def _read_json_lines(path: Path, key: str) -> Iterator[Found]:
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            yield _parse_line(raw.removeprefix(codecs.BOM_UTF8), key, path, number)


def _parse_line(raw: bytes, key: str, path: Path, number: int) -> Found:
    if b"\0" in raw:
        return BadDocument(NUL, path, number)
    try:
        line = raw.decode()
    except UnicodeDecodeError:
        return BadDocument(INVALID_UTF8, path, number)
    if not line.strip():
        return BadDocument(WHITESPACE if line.strip("\r\n") else EMPTY, path, number)
    try:
        value: Any = json.loads(line)
    # RecursionError: brackets nested thousands deep. ValueError: also numbers of thousands of
    # digits.
    except (ValueError, RecursionError):
        return BadDocument(BROKEN_JSON, path, number)
    if not isinstance(value, dict):
        return BadDocument(NOT_AN_OBJECT, path, number)
    if key not in value:
        return BadDocument(MISSING_KEY, path, number)
    text = value[key]
    return (
        _judge(text, path, number) if isinstance(text, str) else BadDocument(NOT_TEXT, path, number)
    )


def _judge(text: str, path: Path, line: int) -> Found:
    if not text:
        return BadDocument(EMPTY, path, line)
    if text.isspace():
        return BadDocument(WHITESPACE, path, line)
    if "\0" in text:
        return BadDocument(NUL, path, line)
    try:
        return Document(text, len(text.encode()), path, line)
    except UnicodeEncodeError:
        return BadDocument(LONE_SURROGATE, path, line)


READERS: Mapping[str, Reader] = {"text": _read_text, "jsonl": _read_json_lines}
_JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
_UNSUPPORTED = frozenset({".gz", ".zst", ".xz", ".bz2", ".zip", ".parquet", ".arrow"})
