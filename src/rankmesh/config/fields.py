"""What a config field is: a default with a doc string and a rule beside it.

Owns `option`, the rules, their check and the base class of sections. It knows no section's keys,
no file and no command line.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, cast

from rankmesh.config.toml import shown, toml_value
from rankmesh.errors import ConfigError

T = TypeVar("T")

_LARGEST_INT = 2**63 - 1


class Refusal(ConfigError):
    """A value that a key does not take; `key` is dotted, so that a reader can add where it came
    from.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def refuse(key: str, value: object, expected: str) -> Refusal:
    """The refusal of `value`: key, value and what is allowed, in one line."""
    return Refusal(key, f"{key} = {shown(value)}: expected {expected}")


@dataclass(frozen=True)
class Anything:
    """No rule beside the type."""

    def problem(self, value: Any) -> str | None:
        """What would be allowed instead of `value`; None if it is fine."""
        return None

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class OneOf:
    """One of `choices`. `later` maps values that are known but not offered yet to the reason."""

    choices: tuple[str | int, ...]
    later: Mapping[str, str] = field(default_factory=dict)

    def problem(self, value: Any) -> str | None:
        """What would be allowed instead of `value`; None if it is fine."""
        if value in self.choices:
            return None
        if value in self.later:
            return f"{self} ({self.later[value]})"
        close = difflib.get_close_matches(str(value), [str(choice) for choice in self.choices], n=1)
        return f"{self}; did you mean {close[0]}?" if close else str(self)

    def __str__(self) -> str:
        return "one of " + ", ".join(toml_value(choice) for choice in self.choices)


@dataclass(frozen=True)
class Range:
    """A number from `low` to `high`; an open end excludes its bound."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def problem(self, value: Any) -> str | None:
        """What would be allowed instead of `value`; None if it is fine."""
        below = value <= self.low if self.open_low else value < self.low
        above = value >= self.high if self.open_high else value > self.high
        return f"a number {self}" if below or above else None

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = f"{'below' if self.open_high else 'at most'} {self.high:g}"
        ends = [
            text for text, bound in ((low, self.low), (high, self.high)) if math.isfinite(bound)
        ]
        return " and ".join(ends)


Rule = Anything | OneOf | Range

ANYTHING = Anything()
POSITIVE = Range(low=0, open_low=True)
NOT_NEGATIVE = Range(low=0)
COUNT = Range(low=1)
FRACTION = Range(low=0, high=1, open_high=True)


def option(default: T, doc: str, rule: Rule = ANYTHING) -> T:
    """A dataclass field with its doc string and its rule; the rule holds for each element of a
    tuple.
    """
    # The declared type is the default's: dataclasses replace the field object by it.
    return field(default=default, metadata={"doc": doc, "rule": rule})


def rule_of(entry: Field[Any]) -> Rule:
    """The rule beside a field."""
    return cast(Rule, entry.metadata.get("rule", ANYTHING))


def doc_of(entry: Field[Any]) -> str:
    """The doc string beside a field."""
    return str(entry.metadata.get("doc", ""))


class Section:
    """Base of every section: values are checked when one is made, by a reader or by hand.

    `NAME` is the dotted name in messages. `check` is the hook for rules between keys.
    """

    NAME: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for entry in fields(cast(Any, self)):
            _check_value(f"{self.NAME}.{entry.name}", getattr(self, entry.name), rule_of(entry))
        self.check()

    def check(self) -> None:
        """Raises Refusal where two keys of the section do not fit each other."""


def _check_value(key: str, value: object, rule: Rule) -> None:
    for leaf in _leaves(value):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            raise refuse(key, value, "a finite number")
        if isinstance(leaf, int) and abs(leaf) > _LARGEST_INT:
            raise refuse(key, value, "an integer of 64 bits")
        if isinstance(leaf, str) and not _is_text(leaf):
            raise refuse(key, value, "text that is not empty, in UTF-8, without control characters")
        problem = rule.problem(leaf)
        if problem is not None:
            raise refuse(key, value, problem)


def _leaves(value: object) -> Iterator[object]:
    """The plain values inside nested tuples; not None (not given), and no table."""
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (bool, int, float, str)):
        yield value


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return value != "" and not any(ord(c) < 32 or ord(c) == 127 for c in value)
