"""The order of samples: for each epoch a keyed permutation, evaluated anywhere without a table.

Owns the permutation; integers and numpy only. It must not know files, meshes or how far a run
goes: sample number k maps to the same sample on every mesh, at every run length and after every
resume.

Positions [0, n) lie in a grid of `rows` x `columns` >= n cells. Eight Feistel rounds add to one
coordinate a hash of the other, in turn, modulo its size: each round can be undone, so their
sequence is a bijection of the grid. A result outside [0, n) is sent through again (cycle
walking), which makes it a bijection of [0, n); the grid is larger than n by less than one row, so
this is rare.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK = 2**64 - 1
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
# Coordinates and their sums then stay inside int64 and uint64.
_MAX_SIZE = 2**62


def _mix(value: int) -> int:
    """A 64-bit integer hash (splitmix64's finaliser)."""
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def _mix_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return value ^ (value >> np.uint64(31))


class Order(Protocol):
    """Maps the k-th sample consumed to the index of a sample."""

    def index(self, k: int) -> int:
        """Index of sample number k."""


class Permutation:
    """A bijection of [0, size) chosen by (seed, epoch, source), unrelated to those of all others.

    source: None, or the number of one source among several.
    """

    def __init__(self, size: int, seed: int, epoch: int, source: int | None = None) -> None:
        if not 0 < size <= _MAX_SIZE:
            raise ValueError(f"a permutation needs 1 to 2^62 positions, not {size}")
        self.size = size
        self.rows = math.isqrt(size - 1) + 1
        self.columns = -(-size // self.rows)
        which = "" if source is None else f", source {source}"
        text = f"rankmesh sample order 1: seed {seed}, epoch {epoch}{which}"
        digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = struct.unpack(f"<{_ROUNDS}Q", digest)

    def at(self, position: int) -> int:
        """Where `position` goes."""
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} of {self.size}")
        position = self._encrypt(position)
        while position >= self.size:
            position = self._encrypt(position)
        return position

    def at_many(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """`at` for an array [P] of positions."""
        result = self._encrypt_array(np.asarray(positions).astype(np.uint64))
        while (outside := np.flatnonzero(result >= np.uint64(self.size))).size:
            result[outside] = self._encrypt_array(result[outside])
        return result.astype(np.int64)

    def _encrypt(self, position: int) -> int:
        row, column = divmod(position, self.columns)
        for i in range(0, _ROUNDS, 2):
            row = (row + _mix(column ^ self._keys[i])) % self.rows
            column = (column + _mix(row ^ self._keys[i + 1])) % self.columns
        return row * self.columns + column

    def _encrypt_array(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = np.uint64(self.rows), np.uint64(self.columns)
        row, column = np.divmod(positions, columns)
        for i in range(0, _ROUNDS, 2):
            # The hash is reduced first: unlike Python's, a 64-bit sum would wrap.
            row = (row + _mix_array(column ^ np.uint64(self._keys[i])) % rows) % rows
            column = (column + _mix_array(row ^ np.uint64(self._keys[i + 1])) % columns) % columns
        return row * columns + column


class SampleOrder:
    """Which sample is the k-th one consumed since the start: shuffled anew in every epoch.

    A pure function of (seed, num_samples, source, k): it keeps no state, so that any k may be asked
    for at any time. source: see `Permutation`.
    """

    def __init__(self, seed: int, num_samples: int, source: int | None = None) -> None:
        self.seed = seed
        self.num_samples = num_samples
        self._source = source
        self._epoch_0 = self._permutation_of(0)

    def index(self, k: int) -> int:
        """Sample index in [0, num_samples) of sample number k >= 0."""
        epoch, position = divmod(k, self.num_samples)
        return self._permutation(epoch).at(position)

    def indices(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """`index` for an array [K] of sample numbers."""
        epochs, positions = np.divmod(np.asarray(numbers, dtype=np.int64), self.num_samples)
        result = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._permutation(int(epoch)).at_many(positions[chosen])
        return result

    def _permutation(self, epoch: int) -> Permutation:
        if epoch < 0:
            raise IndexError("sample numbers start at 0")
        return self._epoch_0 if epoch == 0 else self._permutation_of(epoch)

    def _permutation_of(self, epoch: int) -> Permutation:
        return Permutation(self.num_samples, self.seed, epoch, self._source)


class FileOrder:
    """Samples as they lie in the files, once: the order of evaluation."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def index(self, k: int) -> int:
        """k itself; IndexError beyond the last sample."""
        if not 0 <= k < self.num_samples:
            raise IndexError(f"sample {k} of {self.num_samples}")
        return k
