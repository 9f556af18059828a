"""Text to token ids and back: the interface, the byte tokenizer, the table of the others.

It must not import a tokenizer package: `hf_tokenizer.py` owns that one, and is loaded only when
asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankmesh.data.extras import load_extra
from rankmesh.errors import DataError

Ids = NDArray[np.integer[Any]]

BYTES = "bytes"


class Tokenizer(Protocol):
    """What the project asks of a tokenizer.

    Encoding adds no mark of its own, whatever the tokenizer's settings say, and text that spells
    a mark stays text: begin and end marks are put where they are asked for, by the caller, and
    nowhere else.
    """

    @property
    def vocab_size(self) -> int:
        """Largest id plus one."""

    @property
    def eod_id(self) -> int | None:
        """Id of the end-of-document mark, None if the tokenizer names none."""

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-document mark, None if the tokenizer names none."""

    @property
    def sha256(self) -> str:
        """Hash of everything that turns text into ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without marks."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of many texts, the same as `encode` gives for each, faster and in less memory."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, marks left out; bytes that are no UTF-8 become U+FFFD."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and id 256 as end of document."""

    vocab_size: int = 257
    eod_id: int | None = 256
    bos_id: int | None = None
    sha256: str = hashlib.sha256(b"utf-8 bytes, end of document 256").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


def load_tokenizer(
    spec: str, eod_token: str | None = None, bos_token: str | None = None
) -> Tokenizer:
    """The tokenizer that `spec` means: "bytes", a tokenizer.json, or a folder with one.

    `eod_token` and `bos_token` name the marks that end and begin a document where the folder of a
    tokenizer.json does not, or name others. Raises DataError if the file is missing or broken, a
    mark unknown, or the extra not installed.
    """
    if spec == BYTES:
        if bos_token is not None:
            raise DataError(f"--bos-token {bos_token!r}: the byte tokenizer has no begin mark")
        if eod_token is not None:
            raise DataError(
                f"--eod-token {eod_token!r}: the byte tokenizer has its own mark, id 256"
            )
        return ByteTokenizer()
    path = Path(spec)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"tokenizer {spec!r}: no such file; "
            f"give {BYTES!r}, a tokenizer.json or a folder that has one"
        )
    owner: Any = load_extra("tokenizer.json")
    tokenizer: Tokenizer = owner.HFTokenizer(file, eod_token, bos_token)
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> None:
    """Trains a byte-level BPE of at most `vocab_size` ids; writes it as the tokenizer.json `out`.

    Its end-of-document mark is "<|endoftext|>". Raises DataError if the extra is not installed.
    """
    owner: Any = load_extra("tokenizer.json")
    owner.train_bpe(texts, vocab_size, out)
