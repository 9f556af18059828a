"""Train, validation and test parts of one token file, cut between documents.

Owns the rule that turns ratios into bounds. It must not know samples, nor what the parts are for.

With D documents and ratios r1, r2, ... of sum R, part i begins at document
round(D * (r1 + ... + r(i-1)) / R) and ends where the next one begins: exact arithmetic on the
ratios as they are written, halves to the even side. This is Megatron-LM's rule (of sequences there,
which for its own tool are documents), free of its rounding of floats. The parts are disjoint and
cover the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from rankmesh.data.indexed import TokenFile, Tokens
from rankmesh.data.meta import TokenMeta


class DocumentRange:
    """Documents [first, last) of `file`, as a file of their own; see `TokenFile`."""

    def __init__(self, file: TokenFile, first: int, last: int) -> None:
        self._file = file
        self._start = file.document_start(first)
        self.num_tokens = file.document_start(last) - self._start
        self.num_documents = last - first
        self.name = f"{file.name} (documents {first:,} to {last:,} of {file.num_documents:,})"

    @property
    def meta(self) -> TokenMeta | None:
        """That of the whole file: counts and the largest id are not the range's own."""
        return self._file.meta

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the range: a read-only view [stop - start]."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.name}")
        return self._file.tokens(self._start + start, self._start + stop)


def split_bounds(num_documents: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Bounds [len(ratios) + 1] of the parts, from 0 to `num_documents`.

    ratios: at least 0, not all 0; only their proportions count.
    """
    sums = [Fraction(0), *itertools.accumulate(Fraction(str(ratio)) for ratio in ratios)]
    return tuple(round(num_documents * part / sums[-1]) for part in sums)


def split_documents(file: TokenFile, ratios: Sequence[float]) -> tuple[DocumentRange, ...]:
    """The parts of `file`, one a ratio; a part may hold no documents."""
    bounds = split_bounds(file.num_documents, ratios)
    return tuple(DocumentRange(file, low, high) for low, high in itertools.pairwise(bounds))
