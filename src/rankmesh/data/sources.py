"""Documents out of the bytes of a block: text as it stands, or a value of a JSON line.

Owns what counts as a bad document. It must not know files, tokenizers or token files. One document
is decoded at a time.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rankmesh.data.blocks import FILES, LINES, MISSING, TOO_LONG

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
OVERLONG = "over 1 GiB"

_NO_BYTES = {MISSING: NOT_TEXT, TOO_LONG: OVERLONG}


@dataclass(frozen=True)
class Document:
    """A text to tokenize, its length in UTF-8, and which item of the block it is."""

    text: str
    num_bytes: int
    item: int


@dataclass(frozen=True)
class BadDocument:
    """An item that cannot be used, why, and the line in it that a person would look at."""

    reason: str
    item: int
    line: int = 1


Found = Document | BadDocument


def read_documents(kind: str, payload: bytes, sizes: Sequence[int], key: str) -> Iterator[Found]:
    """The documents of a block, in order, good and bad; the arguments are those of `Block`.

    key: the JSON key that holds the text.
    """
    if kind == LINES:
        for item, line in enumerate(io.BytesIO(payload)):
            yield _from_line(line.removeprefix(codecs.BOM_UTF8), key, item)
        return
    start = 0
    for item, size in enumerate(sizes):
        if size < 0:
            yield BadDocument(_NO_BYTES[size], item)
            continue
        raw = payload[start : start + size]
        start += size
        yield _from_text(raw.removeprefix(codecs.BOM_UTF8) if kind == FILES else raw, item)


def _from_text(raw: bytes, item: int) -> Found:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return BadDocument(INVALID_UTF8, item, 1 + raw.count(b"\n", 0, error.start))
    found = _judge(text, item)
    if isinstance(found, BadDocument) and found.reason == NUL:
        return BadDocument(NUL, item, 1 + raw.count(b"\n", 0, raw.index(b"\0")))
    return found


def _from_line(raw: bytes, key: str, item: int) -> Found:
    if b"\0" in raw:
        return BadDocument(NUL, item)
    try:
        line = raw.decode()
    except UnicodeDecodeError:
        return BadDocument(INVALID_UTF8, item)
    if not line.strip():
        return BadDocument(WHITESPACE if line.strip("\r\n") else EMPTY, item)
    try:
        value: Any = json.loads(line)
    # RecursionError: brackets nested thousands deep. ValueError: also numbers of thousands of
    # digits.
    except (ValueError, RecursionError):
        return BadDocument(BROKEN_JSON, item)
    if not isinstance(value, dict):
        return BadDocument(NOT_AN_OBJECT, item)
    if key not in value:
        return BadDocument(MISSING_KEY, item)
    text = value[key]
    return _judge(text, item) if isinstance(text, str) else BadDocument(NOT_TEXT, item)


def _judge(text: str, item: int) -> Found:
    if not text:
        return BadDocument(EMPTY, item)
    if text.isspace():
        return BadDocument(WHITESPACE, item)
    if "\0" in text:
        return BadDocument(NUL, item)
    try:
        return Document(text, len(text.encode()), item)
    except UnicodeEncodeError:
        return BadDocument(LONE_SURROGATE, item)
