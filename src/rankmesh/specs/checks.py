"""Checks of single values, and the words of their refusals.

Owns what a size and a number are, and the nearest right name. It knows no model.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from rankmesh.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known name, else the whole list."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


def check_size(name: str, value: object, *, least: int = 1) -> None:
    """Raises ConfigError unless model.`name` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"model.{name} is {value!r}; allowed: a whole number of at least {least}")


def check_number(
    name: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Raises ConfigError unless model.`name` is a finite number in [low, high), or in (low, high)
    when `open_low`.
    """
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (low < value if open_low else low <= value)
        and value < high
    )
    if not fits:
        above = f"above {low:g}" if open_low else f"of at least {low:g}"
        below = "" if high == math.inf else f" and below {high:g}"
        raise ConfigError(f"model.{name} is {value!r}; allowed: a number {above}{below}")
