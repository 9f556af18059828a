"""Cuts of a length into neighbouring parts: rows over ranks, layers over stages.

Owns boundaries as integers; it knows no tensor, layer or rank.
"""

from __future__ import annotations

import itertools

from rankmesh.errors import PlanError


def even(total: int, parts: int) -> tuple[int, ...]:
    """Boundaries of `parts` neighbouring slices of range(total): parts + 1 entries, 0 to total.

    The first `total % parts` slices are one longer. With total < parts the last ones are empty.
    """
    if parts < 1 or total < 0:
        raise PlanError(f"cannot cut {total} into {parts} parts: at least 0 and 1 are needed")
    size, longer = divmod(total, parts)
    return tuple(part * size + min(part, longer) for part in range(parts + 1))


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, in order, each layer once; sizes differ by at most one.

    80 layers on 4 stages: 0-19, 20-39, 40-59, 60-79. Raises PlanError where a stage would be empty.
    """
    if num_layers < num_stages:
        raise PlanError(
            f"num_layers {num_layers} is less than the number of stages {num_stages}: "
            f"a stage would hold no layer; nearest: {num_layers} stages"
        )
    return tuple(range(low, high) for low, high in itertools.pairwise(even(num_layers, num_stages)))
