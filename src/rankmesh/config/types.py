"""Type hints of config fields, taken apart.

Owns what a hint allows and how that is said in words. It knows no value, no section and no file.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeAlias, TypeGuard, Union, get_args, get_origin, get_type_hints

# A class, a union or a generic alias: Python has no common type for them.
Hint: TypeAlias = object

_WORDS: dict[Hint, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}


def alternatives(hint: Hint) -> tuple[Hint, ...]:
    """The members of a union without None; the hint itself where it is no union."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(arg for arg in get_args(hint) if arg is not type(None))
    return (hint,)


def is_optional(hint: Hint) -> bool:
    """Whether None, "not given", is allowed."""
    return type(None) in get_args(hint)


def is_table(hint: Hint) -> TypeGuard[type[Any]]:
    """Whether the hint is a dataclass, that is, a TOML table."""
    return isinstance(hint, type) and is_dataclass(hint)


def walk_keys(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Hint, Field[Any]]]:
    """(dotted key, hint, field) of every key of nested dataclasses, in the order of the schema.

    A table inside a section is a key itself, its own keys follow the section's; a section is none.
    """
    hints = get_type_hints(cls)
    tables: list[tuple[str, type[Any]]] = []
    for entry in fields(cls):
        key, hint = f"{prefix}{entry.name}", hints[entry.name]
        inner = [one for one in alternatives(hint) if is_table(one)]
        tables += [(f"{key}.", table) for table in inner]
        if prefix or not inner:
            yield key, hint, entry
    for start, table in tables:
        yield from walk_keys(table, start)


def element_hints(hint: Hint, length: int) -> tuple[Hint, ...] | None:
    """Hints of the `length` elements of a tuple hint; None where it takes another number of
    elements.
    """
    args = get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * length
    return args if len(args) == length else None


def describe(hint: Hint) -> str:
    """What the hint allows, in words: "a list of strings", "a list [number, number]"."""
    return " or ".join(_describe_one(one) for one in alternatives(hint))


def _describe_one(hint: Hint) -> str:
    if is_table(hint):
        return "a table"
    if get_origin(hint) is not tuple:
        return _WORDS[hint][0]
    args = get_args(hint)
    if args[-1] is not Ellipsis:
        return f"a list [{', '.join(_WORDS[arg][0].split()[-1] for arg in args)}]"
    inner = alternatives(args[0])
    if len(inner) == 1:
        return f"a list of {_WORDS[inner[0]][1]}"
    return "a list, each element " + describe(args[0])
