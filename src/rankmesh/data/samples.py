"""Samples: stretches of seq_len + 1 consecutive tokens, cut from token files by arithmetic alone.

Owns where a sample lies. It must not know the order in which samples are used, nor batches.

A file of N * seq_len + 1 tokens holds N samples; sample i is tokens [i * seq_len, (i + 1) *
seq_len], so that neighbours share one token and every token but a file's first is a target
exactly once. Samples run across documents, never across files. The last (num_tokens - 1) %
seq_len tokens of a file are in no sample.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rankmesh.data.indexed import Tokens
from rankmesh.data.meta import TokenMeta
from rankmesh.errors import DataError


class TokenSource(Protocol):
    """What samples are cut from: a `TokenFile`, or a part of one."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def meta(self) -> TokenMeta | None:
        """What is known of the file; None where another program wrote it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of all documents back to back."""


class Samples:
    """The samples of several files as one list, in memory that does not grow with them.

    weights: how often each file's samples are used, for the order that is made of them (see
    `blend.py`); None: all alike. Raises DataError if a file is too short for one sample. Where
    `vocab_size`, the model's, is given, a sample with a larger id raises DataError when fetched:
    the only way for files that came without PREFIX.meta.json.
    """

    def __init__(
        self,
        files: Sequence[TokenSource],
        seq_len: int,
        vocab_size: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not files:
            raise DataError("no token files were given")
        if seq_len < 1:
            raise DataError(f"seq_len is {seq_len}, at least 1 is needed")
        for file in files:
            if file.num_tokens <= seq_len:
                raise DataError(
                    f"{file.name}: {file.num_tokens:,} tokens, one sample of seq_len "
                    f"{seq_len:,} needs {seq_len + 1:,}"
                )
        self.files = tuple(files)
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.weights = None if weights is None else tuple(weights)
        self.sizes = tuple((file.num_tokens - 1) // seq_len for file in files)
        self._starts = [0, *itertools.accumulate(self.sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def sample(self, index: int) -> NDArray[np.int64]:
        """Tokens [seq_len + 1] of sample `index`, a copy."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect.bisect_right(self._starts, index) - 1
        start = (index - self._starts[number]) * self.seq_len
        tokens = self.files[number].tokens(start, start + self.seq_len + 1).astype(np.int64)
        if self.vocab_size is not None:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.vocab_size:
                raise DataError(
                    f"{self.files[number].name}: token id {low if low < 0 else high} near "
                    f"token {start:,}, the model's vocabulary has {self.vocab_size}"
                )
        return tokens


def check_vocab(files: Sequence[TokenSource], vocab_size: int) -> None:
    """Raises DataError if a file is known to hold an id outside a model's vocabulary.

    It is known from PREFIX.meta.json, at no cost. A file without one passes; see Samples.
    """
    for file in files:
        if file.meta is not None and file.meta.max_token >= vocab_size:
            raise DataError(
                f"{file.name}: largest token id {file.meta.max_token}, the model's "
                f"vocabulary has {vocab_size} (that of the tokenizer {file.meta.vocab_size})"
            )
