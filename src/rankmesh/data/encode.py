"""A block of documents -> token ids with marks: all the work that is shared out.

Owns where begin and end marks go and the tally of what was left out. It must not know files,
processes or the layout of token files beyond the dtype of ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rankmesh.data.indexed import Tokens, token_dtype
from rankmesh.data.sources import NO_TOKENS, BadDocument, Document, read_documents
from rankmesh.data.tokenizer import Ids, Tokenizer, load_tokenizer
from rankmesh.errors import DataError

# A batch is tokenized at once: large enough to keep a tokenizer's threads busy where it has some,
# small enough for a tokenizer that needs hundreds of bytes a character.
_BATCH_BYTES = 1 << 18
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How documents become ids; see `PrepareOptions`. Plain values, so that a worker can be told.

    key: of the text in a JSON line.
    """

    tokenizer: str
    key: str = "text"
    append_eod: bool = True
    prepend_bos: bool = False
    eod_token: str | None = None
    bos_token: str | None = None


@dataclass(frozen=True)
class TokenizerFacts:
    """What the writer must know of a tokenizer; see `Tokenizer`."""

    vocab_size: int
    eod_id: int | None
    bos_id: int | None
    sha256: str


@dataclass(frozen=True)
class Skipped:
    """How many documents were left out for one reason; item and line of the first of them."""

    count: int
    item: int
    line: int


@dataclass(frozen=True)
class Encoded:
    """A block as ids: `lengths` [D] int32 in tokens, marks included, `ids` [sum] in the file's
    dtype. text_bytes: of the documents kept. skipped: by reason.
    """

    lengths: NDArray[np.int32]
    ids: Tokens
    text_bytes: int
    skipped: Mapping[str, Skipped]


@dataclass
class _Gathered:
    """The parts of a block's result, in order."""

    pieces: list[Tokens] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    text_bytes: int = 0
    skipped: dict[str, Skipped] = field(default_factory=dict)

    def leave_out(self, bad: BadDocument) -> None:
        before = self.skipped.get(bad.reason, Skipped(0, bad.item, bad.line))
        # A text without tokens is found out late, after those that follow it in its batch.
        first = min((before.item, before.line), (bad.item, bad.line))
        self.skipped[bad.reason] = Skipped(before.count + 1, *first)


class Encoder:
    """Encodes blocks. Raises DataError where `options` cannot be met by the tokenizer."""

    def __init__(self, options: EncodeOptions) -> None:
        self._key = options.key
        tokenizer = load_tokenizer(options.tokenizer, options.eod_token, options.bos_token)
        self._tokenizer: Tokenizer = tokenizer
        self.facts = TokenizerFacts(
            tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id, tokenizer.sha256
        )
        self._dtype = token_dtype(tokenizer.vocab_size)
        begin = _mark(options.prepend_bos, tokenizer.bos_id, options, "begin", "bos")
        end = _mark(options.append_eod, tokenizer.eod_id, options, "end", "eod")
        self._begin, self._end = (np.array(mark, self._dtype) for mark in (begin, end))

    def encode(self, kind: str, payload: bytes, sizes: Sequence[int]) -> Encoded:
        """The documents of a block (see `Block`) as ids. Raises DataError for an id outside the
        vocabulary.
        """
        out = _Gathered()
        for batch in _batches(read_documents(kind, payload, sizes, self._key), out):
            out.pieces.append(self._encode_batch(batch, out))
        ids = np.concatenate(out.pieces) if out.pieces else np.empty(0, self._dtype)
        return Encoded(np.array(out.lengths, np.int32), ids, out.text_bytes, out.skipped)

    def _encode_batch(self, batch: list[Document], out: _Gathered) -> Tokens:
        """Ids of the batch, marks in their places; lengths and the tally go to `out`."""
        pieces: list[Ids] = []
        found = self._tokenizer.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, found, strict=True):
            # Some tokenizers turn a text of unknown characters into nothing.
            if not ids.size:
                out.leave_out(BadDocument(NO_TOKENS, document.item))
                continue
            pieces += (self._begin, ids, self._end)
            out.lengths.append(self._begin.size + ids.size + self._end.size)
            out.text_bytes += document.num_bytes
        if not pieces:
            return np.empty(0, self._dtype)
        joined = np.concatenate(pieces)
        low, high = int(joined.min()), int(joined.max())
        if low < 0 or high >= self.facts.vocab_size:
            raise DataError(
                f"the tokenizer gave ids from {low} to {high}, its vocabulary is "
                f"0 to {self.facts.vocab_size - 1}"
            )
        return joined.astype(self._dtype, copy=False)


def _mark(wanted: bool, id: int | None, options: EncodeOptions, use: str, flag: str) -> list[int]:
    """The mark as a list of one id or none. Raises DataError if it is wanted and not known."""
    if not wanted:
        return []
    if id is None:
        other = "--no-append-eod" if flag == "eod" else "no --prepend-bos"
        raise DataError(
            f"tokenizer {options.tokenizer!r} names no {use}-of-document token: "
            f"give --{flag}-token or {other}"
        )
    return [id]


def _batches(found: Iterable[Document | BadDocument], out: _Gathered) -> Iterator[list[Document]]:
    """Good documents, some at a time; bad ones go to `out`."""
    batch: list[Document] = []
    size = 0
    for document in found:
        if isinstance(document, BadDocument):
            out.leave_out(document)
            continue
        batch.append(document)
        size += document.num_bytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
