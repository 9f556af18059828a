"""Cuts of a length into neighbouring parts: rows over ranks, layers over stages.

Owns boundaries as integers; it knows no tensor, layer or rank. Costs are numbers that it is given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rankmesh.errors import PlanError

Costs = NDArray[np.float64]


def even(total: int, parts: int) -> tuple[int, ...]:
    """Boundaries of `parts` neighbouring slices of range(total): parts + 1 entries, 0 to total.

    The first `total % parts` slices are one longer. With total < parts the last ones are empty.
    """
    if parts < 1 or total < 0:
        raise PlanError(f"cannot cut {total} into {parts} parts: at least 0 and 1 are needed")
    size, longer = divmod(total, parts)
    return tuple(part * size + min(part, longer) for part in range(parts + 1))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[slice, ...]]:
    """The elements [start, stop) of a row-major array as boxes, in order: at most 2 n - 1 of n
    dims.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    size = math.prod(shape[1:])
    first, last = -(-start // size), stop // size
    if first > last:  # within one row
        row = start // size
        inner = boxes(shape[1:], start - row * size, stop - row * size)
        return [(slice(row, row + 1), *box) for box in inner]
    head = boxes(shape[1:], size - (first * size - start), size) if start % size else []
    tail = boxes(shape[1:], 0, stop - last * size)
    whole = [(slice(first, last), *(slice(0, n) for n in shape[1:]))] if first < last else []
    return [
        *((slice(first - 1, first), *box) for box in head),
        *whole,
        *((slice(last, last + 1), *box) for box in tail),
    ]


def layers_of_stages(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[range, ...]:
    """The layers of each stage, in order, each layer once and at least one a stage.

    costs: of each layer, in any unit; first, last: what the first and the last stage have to do
    beside their layers. The dearest stage is as cheap as can be; among the cuts of which that is
    true the sum of squares of the stages' costs is least; of equal ones the earlier stages are the
    longer ones. 80 equal layers on 4 stages: 0-19, 20-39, 40-59, 60-79. Raises PlanError where a
    stage would be empty.
    """
    layers = len(costs)
    if layers < num_stages:
        raise PlanError(
            f"num_layers {layers} is less than the number of stages {num_stages}: "
            f"a stage would hold no layer; nearest: {layers} stages"
        )
    loads = [_loads(costs, s, num_stages, first, last) for s in range(num_stages)]
    dearest, _ = _best(loads, np.maximum)
    limit = dearest * _SAME
    squares = [np.where(load <= limit, load**2, np.inf) for load in loads]
    _, starts = _best(squares, np.add)
    return tuple(itertools.starmap(range, itertools.pairwise([*starts, layers])))


def given_layers(counts: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage where their numbers are given."""
    ends = list(itertools.accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


# Sums of equal costs in another order differ by rounding.
_SAME = 1.0 + 1e-9


def _loads(costs: Sequence[float], stage: int, stages: int, first: float, last: float) -> Costs:
    """[i, j]: what the stage costs with layers i to j - 1; infinite where it would have none."""
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    loads = ends[None, :] - ends[:, None]
    loads += first * (stage == 0) + last * (stage == stages - 1)
    return np.where(np.tri(len(ends), dtype=bool), np.inf, loads)


def _best(loads: list[Costs], join: np.ufunc) -> tuple[float, list[int]]:
    """The cheapest cut, and the first layer of each stage; `join` adds a stage to those before."""
    best = np.full(len(loads[0]), np.inf)
    best[0] = 0.0
    origins = []
    for load in loads:
        reached = join(best[:, None], load)
        best = reached.min(axis=0)
        # Of equal cuts the latest one: it makes the earlier stages longer.
        equal = reached <= best * _SAME
        origins.append(len(best) - 1 - np.argmax(equal[::-1], axis=0))
    end, starts = len(best) - 1, []
    for origin in reversed(origins):
        end = int(origin[end])
        starts.append(end)
    return float(best[-1]), starts[::-1]
