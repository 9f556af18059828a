"""A model's shape from a family and a number of parameters.

Owns the choice of depth, width and heads. It writes nothing and knows no config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rankmesh.errors import ConfigError
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.theory.params import count_params

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmb]?)", re.IGNORECASE)
_MOST_LAYERS = 192


def parse_size(text: str) -> int:
    """`10m`, `1.5b`, `124000000` as a number. Raises ConfigError."""
    found = _SIZE.fullmatch(text.strip())
    number = round(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if number < 1:
        raise ConfigError(f"--size {text}: expected parameters such as 10m, 350m or 1.5b")
    return number


def shape_for(size: int, given: Mapping[str, Any]) -> ModelSpec:
    """The model nearest to `size` parameters, all counted, with the fields in `given` kept.

    Width is a multiple of the head's width; width / depth is near 64 for small models and 128 for
    large ones, as published models have it. Raises ConfigError where the size is out of reach.
    """
    best: tuple[float, ModelSpec] | None = None
    for hidden in _widths(given):
        for spec in _depths(size, hidden, given):
            error = abs(math.log(count_params(spec).total / size))
            shape = abs(math.log(hidden / spec.num_layers / (64 if size < 10**9 else 128)))
            score = error + 0.05 * shape
            if best is None or score < best[0]:
                best = score, spec
    assert best is not None
    spec, total = best[1], count_params(best[1]).total
    if not 0.5 < total / size < 2:
        raise ConfigError(
            f"--size {size:,}: the nearest {spec.family} model has {total:,} parameters, of which "
            f"{count_params(spec).embedding:,} are the table of {spec.vocab_size:,} token ids"
        )
    return spec


def _widths(given: Mapping[str, Any]) -> list[int]:
    if "hidden_size" in given:
        return [given["hidden_size"]]
    return [*range(32, 512, 32), *range(512, 2048, 64), *range(2048, 20481, 256)]


def _depths(size: int, hidden: int, given: Mapping[str, Any]) -> list[ModelSpec]:
    """The two models of that width whose parameters lie around `size`."""
    if "num_layers" in given:
        return [_spec(given, hidden, given["num_layers"])]
    one, two = (count_params(_spec(given, hidden, layers)).total for layers in (1, 2))
    depth = 1 + (size - one) / (two - one)
    around = {min(max(1, whole), _MOST_LAYERS) for whole in (math.floor(depth), math.ceil(depth))}
    return [_spec(given, hidden, number) for number in sorted(around)]


def _spec(given: Mapping[str, Any], hidden: int, layers: int) -> ModelSpec:
    head_dim = 32 if hidden < 512 else 64 if hidden < 2048 else 128
    chosen = {"num_layers": layers, "hidden_size": hidden, "num_heads": hidden // head_dim}
    return make_spec(**{**chosen, **given})
