"""PREFIX.meta.json, what is known of a token file beside its tokens: tokenizer, vocabulary,
counts.

Owns that one file's fields and their checks. It must not know Megatron's byte layout or how text
is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rankmesh.errors import DataError, reason

FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """What `rankmesh prepare` knew when it wrote a token file.

    tokenizer: the spec as given ("bytes" or a path). tokenizer_sha256: hash of what that spec
    meant. eod_id, bos_id: end- and begin-of-document ids, None if the tokenizer names none.
    append_eod, prepend_bos: whether each document has them. max_token: the largest id in the file,
    -1 when it has none. text_bytes: UTF-8 bytes of the documents kept. longest_document: in tokens.
    length_histogram[i]: documents of 2^i to 2^(i+1) - 1 tokens. skipped: documents or lines left
    out, by reason.
    """

    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int | None
    append_eod: bool
    num_documents: int
    num_tokens: int
    max_token: int
    text_bytes: int
    bos_id: int | None = None
    prepend_bos: bool = False
    longest_document: int = 0
    length_histogram: tuple[int, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


# What version 1 did not have yet.
_NEW = frozenset({"bos_id", "prepend_bos", "longest_document", "length_histogram"})


def read_meta(path: Path) -> TokenMeta | None:
    """The file's content, None without such a file (Megatron-LM writes none). Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error
    version = found.pop("format_version", None) if isinstance(found, dict) else None
    if version not in (1, FORMAT_VERSION):
        raise DataError(
            f"{path}: format_version is {version!r}, this version reads 1 and {FORMAT_VERSION}"
        )
    names = {entry.name for entry in dataclasses.fields(TokenMeta)} - {"format_version"}
    expected = names - _NEW if version == 1 else names
    if set(found) != expected:
        raise DataError(f"{path}: fields are {sorted(found)}, expected {sorted(expected)}")
    histogram = tuple(found.pop("length_histogram", ()))
    return TokenMeta(**found, length_histogram=histogram)
