"""Mixing sources by weight: which source, and its how-many-th sample, sample number k is.

Owns the rule and the order made of it. It must not know files: a source is a number of samples.

The sources are the leaves of a Huffman tree of their weights. Of the first n samples that reach a
node, round(n * l / (l + r)) go to its left side (halves up), l and r being the weights below: the
choice at number n follows from n alone, and with it the number at the next node down.

After any k samples a source has been drawn k * w times, give or take less than 1.7: each level adds
at most 1/2 and passes on what came from above in proportion, and in a Huffman tree weights grow
upwards at least as the Fibonacci numbers do, whose reciprocals sum up to 3.36. For two sources it
is 1/2, for three 1. Arithmetic is exact, on the weights as they are written: no k is too large.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rankmesh.data.order import FileOrder, Order, SampleOrder
from rankmesh.data.samples import Samples

BOUND = 1.7


@dataclass(frozen=True)
class _Node:
    """An inner node: `left` of the `total` weight goes to the left side."""

    left: int
    total: int
    sides: tuple[_Node | int, _Node | int]

    def before(self, number: int) -> int:
        """How many of the first `number` samples went left."""
        return (2 * number * self.left + self.total) // (2 * self.total)


class Blend:
    """Draws from sources by weight (at least 0, not all 0; only proportions count)."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self.num_sources = len(weights)
        # The middle element breaks ties, by the order of the sources, then of the nodes' making.
        heap: list[tuple[int, int, _Node | int]] = [
            (weight, source, source) for source, weight in enumerate(whole) if weight
        ]
        heapq.heapify(heap)
        for tie in itertools.count(len(weights)):
            if len(heap) == 1:
                break
            (low, _, right), (high, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            # The heavier side comes first; of equal ones the earlier source does.
            sides = (left, right) if low < high else (right, left)
            heapq.heappush(heap, (low + high, tie, _Node(high, low + high, sides)))
        self._root = heap[0][2]

    def at(self, number: int) -> tuple[int, int]:
        """(source, how many samples of it came before) of sample `number` >= 0."""
        if number < 0:
            raise IndexError("sample numbers start at 0")
        node = self._root
        while isinstance(node, _Node):
            left = node.before(number)
            if node.before(number + 1) > left:
                node, number = node.sides[0], left
            else:
                node, number = node.sides[1], number - left
        return node, number

    def counts(self, number: int) -> list[int]:
        """How many of the first `number` samples each source gives."""
        found = [0] * self.num_sources
        open_nodes = [(self._root, number)]
        while open_nodes:
            node, count = open_nodes.pop()
            if isinstance(node, _Node):
                left = node.before(count)
                open_nodes += [(node.sides[0], left), (node.sides[1], count - left)]
            else:
                found[node] = count
        return found


@dataclass(frozen=True)
class Phase:
    """From sample number `start` on, sources are drawn by `weights`."""

    start: int
    weights: tuple[float, ...]


class BlendOrder:
    """Which sample is the k-th one consumed: sources mixed by weight, each in an order of its own.

    Sources lie one after the other in the list of samples; `sizes` [S] are their samples. Each
    source goes through its own epochs, shuffled anew in each (seed None: in file order). Where the
    weights change on the way, in `phases` of rising start from 0, each source goes on at its next
    sample: none is skipped or repeated.
    """

    def __init__(self, seed: int | None, sizes: Sequence[int], phases: Sequence[Phase]) -> None:
        self._sizes = tuple(sizes)
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._orders = None
        if seed is not None:
            self._orders = [SampleOrder(seed, size, source) for source, size in enumerate(sizes)]
        self._starts = [phase.start for phase in phases]
        if self._starts[0] != 0 or self._starts != sorted(set(self._starts)):
            raise ValueError(f"phases start at {self._starts}, expected to rise from 0")
        self._blends = [Blend(phase.weights) for phase in phases]
        self._used = [[0] * len(sizes)]
        for blend, (low, high) in zip(self._blends, itertools.pairwise(self._starts), strict=False):
            more = blend.counts(high - low)
            self._used.append([a + b for a, b in zip(self._used[-1], more, strict=True)])

    def source(self, k: int) -> tuple[int, int]:
        """(source, its how-many-th sample) of sample number k >= 0."""
        phase = bisect.bisect_right(self._starts, k) - 1
        source, number = self._blends[phase].at(k - self._starts[phase])
        return source, self._used[phase][source] + number

    def index(self, k: int) -> int:
        """Index, in the list of all sources' samples, of sample number k >= 0."""
        source, number = self.source(k)
        if self._orders is None:
            return self._offsets[source] + number % self._sizes[source]
        return self._offsets[source] + self._orders[source].index(number)

    @property
    def num_samples(self) -> int:
        """How many samples come before the first one that comes twice."""
        low, high = 0, 1
        while self._is_once(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_once(middle) else (low, middle)
        return low

    def _is_once(self, number: int) -> bool:
        phase = bisect.bisect_right(self._starts, number) - 1
        counts = self._blends[phase].counts(number - self._starts[phase])
        used = [a + b for a, b in zip(self._used[phase], counts, strict=True)]
        return all(count <= size for count, size in zip(used, self._sizes, strict=True))


def training_order(seed: int, samples: Samples) -> Order:
    """Endless: all files shuffled as one list, or mixed by their weights where they have some."""
    if samples.weights is None:
        return SampleOrder(seed, len(samples))
    return BlendOrder(seed, samples.sizes, [Phase(0, samples.weights)])


def evaluation_order(samples: Samples) -> FileOrder | BlendOrder:
    """In file order, each sample once; of files with weights up to where the first one ends."""
    if samples.weights is None:
        return FileOrder(len(samples))
    return BlendOrder(None, samples.sizes, [Phase(0, samples.weights)])
