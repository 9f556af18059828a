"""How far a job has come, and what it has counted: the one state of `prepare`.

Owns the counting and its form as JSON. It must not know files or processes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankmesh.data.blocks import Block, Position
from rankmesh.data.encode import Encoded


@dataclass(frozen=True)
class Reason:
    """Documents left out for one reason, and the place, "file:line", of the first of them."""

    count: int
    first: str


@dataclass(frozen=True)
class Tally:
    """The documents kept and left out up to `position`, in the order of the inputs.

    read: bytes of the inputs up to there. max_token: the largest id, -1 without any. text_bytes:
    UTF-8 of the documents kept. longest: tokens of the longest document. histogram[i]: documents
    of 2^i to 2^(i+1) - 1 tokens. skipped: by reason.
    """

    position: Position = field(default_factory=Position)
    read: int = 0
    documents: int = 0
    tokens: int = 0
    max_token: int = -1
    text_bytes: int = 0
    longest: int = 0
    histogram: tuple[int, ...] = ()
    skipped: Mapping[str, Reason] = field(default_factory=dict)

    def plus(self, block: Block, encoded: Encoded) -> Tally:
        """The tally after one block more, which must be the next one."""
        lengths, ids = encoded.lengths, encoded.ids
        return Tally(
            position=block.end,
            read=block.read,
            documents=self.documents + lengths.size,
            tokens=self.tokens + ids.size,
            max_token=max(self.max_token, int(ids.max()) if ids.size else -1),
            text_bytes=self.text_bytes + encoded.text_bytes,
            longest=max(self.longest, int(lengths.max()) if lengths.size else 0),
            histogram=_added(self.histogram, lengths),
            skipped={**self.skipped, **dict(self._reasons(block, encoded))},
        )

    def _reasons(self, block: Block, encoded: Encoded) -> Iterator[tuple[str, Reason]]:
        for name, new in encoded.skipped.items():
            old = self.skipped.get(name) or Reason(0, block.place(new.item, new.line))
            yield name, Reason(old.count + new.count, old.first)

    @property
    def num_skipped(self) -> int:
        """Documents left out, for all reasons."""
        return sum(reason.count for reason in self.skipped.values())

    def to_fields(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Tally:
        """What `to_fields` gave, turned back. Raises TypeError or KeyError for anything else."""
        reasons = {name: Reason(**value) for name, value in fields["skipped"].items()}
        position = Position(**fields["position"])
        histogram = tuple(fields["histogram"])
        return Tally(**{**fields, "position": position, "histogram": histogram, "skipped": reasons})


def _added(histogram: tuple[int, ...], lengths: NDArray[np.int32]) -> tuple[int, ...]:
    """The histogram with more lengths, each at least 1."""
    # frexp: a length in [2^i, 2^(i+1)) has the exponent i + 1.
    new = np.bincount(np.frexp(lengths.astype(np.float64))[1] - 1)
    pairs = itertools.zip_longest(histogram, new.tolist(), fillvalue=0)
    return tuple(old + more for old, more in pairs)
