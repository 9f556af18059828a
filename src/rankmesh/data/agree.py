"""Whether token files, a config and weights mean the same by a token id.

Owns the comparison of tokenizers by their content. It loads no tokenizer and reads no tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rankmesh.data.samples import TokenSource
from rankmesh.data.tokenizer import BYTES, ByteTokenizer
from rankmesh.errors import DataError, reason

_SHOWN = 12


@dataclass(frozen=True)
class Named:
    """Something that says which tokenizer its ids come from. what: as messages call it. tokenizer:
    as given there. sha256: of what that meant, equal for equal content wherever it lies.
    """

    what: str
    tokenizer: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.what} ({self.tokenizer}, sha256 {self.sha256[:_SHOWN]})"


def named(what: str, tokenizer: str | None) -> list[Named]:
    """What a config or weights name: "bytes", a tokenizer.json, a folder with one; [] for None.

    Raises DataError where the file cannot be read.
    """
    if tokenizer is None:
        return []
    if tokenizer == BYTES:
        return [Named(what, BYTES, ByteTokenizer.sha256)]
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{what}: tokenizer {tokenizer!r} cannot be read: {reason(error)}; expected {BYTES!r}, "
            "a tokenizer.json or a folder that has one"
        ) from error
    return [Named(what, tokenizer, hashlib.sha256(content).hexdigest())]


def of_files(files: Iterable[TokenSource]) -> list[Named]:
    """What token files were made with; those that do not say are left out."""
    return [
        Named(file.name, file.meta.tokenizer, file.meta.tokenizer_sha256)
        for file in files
        if file.meta is not None
    ]


def check_same_tokenizer(all_named: Iterable[Named], remedy: str) -> None:
    """Raises DataError, with `remedy` at its end, for the first that has another tokenizer than the
    first of all."""
    first: Named | None = None
    for one in all_named:
        first = first or one
        if one.sha256 != first.sha256:
            raise DataError(f"{one} and {first} have different tokenizers; {remedy}")
