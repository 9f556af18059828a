"""Megatron's token files: PREFIX.bin holds ids back to back, PREFIX.idx says where each text lies.

Owns the byte layout and the checks at open; `writer.py` writes it. It must not know tokenizers,
samples or order.

PREFIX.idx, little-endian: magic (9 bytes), version 1 (uint64), dtype code (uint8), number of
sequences N and number of document bounds D (uint64 each), then N sequence lengths in tokens
(int32), N byte offsets into PREFIX.bin (int64), D bounds (int64: sequences before each document,
then N). A document of rankmesh is one sequence; an empty document is a bound without a sequence,
as in Megatron-LM.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankmesh.data.meta import TokenMeta, read_meta
from rankmesh.errors import DataError

Tokens = NDArray[np.integer[Any]]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
UINT16_VOCAB_LIMIT = 65_500
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_CODES = (6, 7)
# Documents checked at once: few enough to stay in a cache.
_CHECK_BLOCK = 1 << 15


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 below 65,500 tokens of vocabulary, else int32: Megatron-LM's rule."""
    return np.dtype("<u2" if vocab_size < UINT16_VOCAB_LIMIT else "<i4")


def index_path(prefix: str | Path) -> Path:
    """PREFIX.idx."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    """PREFIX.bin."""
    return Path(f"{prefix}.bin")


def meta_path(prefix: str | Path) -> Path:
    """PREFIX.meta.json."""
    return Path(f"{prefix}.meta.json")


class TokenFile:
    """One token file, memory-mapped: the cost of opening does not grow with its tokens.

    `prefix` is the path without .bin and .idx (either ending is taken off). Raises DataError, in
    one line with file name, expected and real size, if either file is missing, foreign, truncated
    or contradicts the other. `meta` is the content of PREFIX.meta.json, or None where another
    program wrote the file.
    """

    def __init__(self, prefix: str | Path) -> None:
        text = str(prefix)
        self.prefix = text[:-4] if text.endswith((".bin", ".idx")) else text
        index = index_path(self.prefix)
        raw = _map(index)
        self.dtype, num_sequences, num_bounds = _read_header(index, raw)
        lengths_end = HEADER.size + 4 * num_sequences
        offsets_end = lengths_end + 8 * num_sequences
        self._lengths: NDArray[np.int32] = raw[HEADER.size : lengths_end].view("<i4")
        self._offsets: NDArray[np.int64] = raw[lengths_end:offsets_end].view("<i8")
        self._bounds: NDArray[np.int64] = raw[offsets_end : offsets_end + 8 * num_bounds].view(
            "<i8"
        )
        self._check_bounds(index)
        num_bytes = self._check_sequences(index)
        self._tokens: Tokens = self._map_tokens(num_bytes)
        self.meta: TokenMeta | None = self._read_meta()

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(tokens_path(self.prefix))

    @property
    def num_tokens(self) -> int:
        return int(self._tokens.size)

    @property
    def num_documents(self) -> int:
        return int(self._bounds.size) - 1

    @property
    def num_sequences(self) -> int:
        return int(self._lengths.size)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary of the tokenizer that wrote the file, None if unknown."""
        return None if self.meta is None else self.meta.vocab_size

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of all documents back to back: a read-only view [stop - start]."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.prefix}")
        return self._tokens[start:stop]

    def document(self, number: int) -> Tokens:
        """All tokens of one document, a read-only view; empty for an empty document."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents} in {self.prefix}")
        return self._tokens[self.document_start(number) : self.document_start(number + 1)]

    def document_start(self, number: int) -> int:
        """How many tokens lie before document `number`, in [0, num_documents]."""
        if not 0 <= number <= self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents} in {self.prefix}")
        return self._token_offset(int(self._bounds[number]))

    def _token_offset(self, sequence: int) -> int:
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self._offsets[sequence]) // self.dtype.itemsize

    def _check_bounds(self, index: Path) -> None:
        bounds, total = self._bounds, self.num_sequences
        falls = any(
            np.any(np.diff(bounds[low : low + _CHECK_BLOCK + 1]) < 0)
            for low in range(0, bounds.size, _CHECK_BLOCK)
        )
        if bounds.size == 0 or bounds[0] != 0 or bounds[-1] != total or falls:
            raise DataError(
                f"{index}: corrupt: document bounds do not rise from 0 to {total:,} sequences"
            )

    def _check_sequences(self, index: Path) -> int:
        """Bytes that PREFIX.bin must have. Sequences that do not follow each other are refused."""
        end = 0
        for low in range(0, self.num_sequences, _CHECK_BLOCK):
            lengths = self._lengths[low : low + _CHECK_BLOCK].astype(np.int64)
            offsets = self._offsets[low : low + _CHECK_BLOCK]
            ends = np.cumsum(lengths) * self.dtype.itemsize + end
            wrong = np.flatnonzero(
                (lengths < 0) | (offsets != ends - lengths * self.dtype.itemsize)
            )
            if wrong.size:
                first = int(wrong[0])
                raise DataError(
                    f"{index}: corrupt: sequence {low + first} has {lengths[first]} tokens at byte "
                    f"{offsets[first]}, which does not follow the sequence before it"
                )
            end = int(ends[-1])
        return end

    def _map_tokens(self, num_bytes: int) -> Tokens:
        path = tokens_path(self.prefix)
        raw = _map(path)
        if raw.size != num_bytes:
            raise DataError(
                f"{path}: {raw.size:,} bytes, expected {num_bytes:,} "
                f"for {num_bytes // self.dtype.itemsize:,} tokens of {self.dtype.itemsize} bytes"
            )
        return raw.view(self.dtype)

    def _read_meta(self) -> TokenMeta | None:
        path = meta_path(self.prefix)
        meta = read_meta(path)
        counts = (self.num_documents, self.num_tokens)
        if meta is not None and (meta.num_documents, meta.num_tokens) != counts:
            raise DataError(
                f"{path}: {meta.num_documents:,} documents and {meta.num_tokens:,} tokens, but the "
                f"token file beside it has {counts[0]:,} and {counts[1]:,}"
            )
        return meta


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, mode="r"))
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file (a token file is a pair, PREFIX.bin and PREFIX.idx)"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read_header(path: Path, raw: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """Token dtype, number of sequences, number of document bounds; DataError unless all fits."""
    head = raw[: HEADER.size].tobytes()
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise DataError(f"{path}: not a token index: begins with {head[:9]!r}, expected {MAGIC!r}")
    if len(head) < HEADER.size:
        raise DataError(
            f"{path}: truncated: {raw.size:,} bytes, expected at least the header's {HEADER.size}"
        )
    _, version, code, num_sequences, num_bounds = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: index version {version}, expected {VERSION}")
    if code not in DTYPE_CODES:
        kind = (
            "floats, not token ids"
            if code in _FLOAT_CODES
            else f"one of {sorted(DTYPE_CODES)} expected"
        )
        raise DataError(f"{path}: dtype code {code} ({kind})")
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if raw.size != expected:
        modes = raw.size == expected + num_sequences
        remark = "one mode byte a sequence: multimodal, not read" if modes else "damaged or foreign"
        raise DataError(
            f"{path}: {raw.size:,} bytes, expected {expected:,} for {num_sequences:,} sequences "
            f"and {num_bounds:,} document bounds ({remark})"
        )
    return np.dtype(DTYPE_CODES[code]), num_sequences, num_bounds
