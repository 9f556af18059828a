"""The config as JSON Schema (draft 2020-12), for editors that complete and check TOML.

Owns how type hints, rules and defaults are said in JSON Schema. It knows no key by name.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import MISSING, Field, fields
from typing import Any, cast, get_args, get_origin, get_type_hints

from rankmesh.config.fields import ANYTHING, OneOf, Range, Rule, doc_of, rule_of
from rankmesh.config.schema import FORMAT_VERSION, RunConfig
from rankmesh.config.types import Hint, alternatives, is_table

_TYPES: dict[Hint, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def json_schema() -> dict[str, Any]:
    """The schema of a whole config file, as plain JSON values."""
    found = _table(RunConfig)
    version = {"const": FORMAT_VERSION, "description": "written by this release; may be left out"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rankmesh config",
        **found,
        "properties": {"format_version": version, **found["properties"]},
    }


def _table(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {
        "type": "object",
        "description": " ".join((inspect.getdoc(cls) or "").split()),
        "properties": {
            entry.name: _key(hints[entry.name], entry) for entry in fields(cast(Any, cls))
        },
        "additionalProperties": False,
    }


def _key(hint: Hint, entry: Field[Any]) -> dict[str, Any]:
    """A key: its value, its doc string, and its default where it has one."""
    described = _value(hint, rule_of(entry))
    if doc_of(entry):
        described["description"] = doc_of(entry)
    if entry.default is not MISSING and entry.default is not None:
        described["default"] = _plain(entry.default)
    return described


def _value(hint: Hint, rule: Rule) -> dict[str, Any]:
    """What `hint` and `rule` allow; the rule holds for each plain value inside lists."""
    kinds = [_kind(kind, rule) for kind in alternatives(hint)]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _kind(kind: Hint, rule: Rule) -> dict[str, Any]:
    if is_table(kind):
        return _table(kind)
    if get_origin(kind) is not tuple:
        return {"type": _TYPES[kind], **_limits(kind, rule)}
    args = get_args(kind)
    if args[-1] is Ellipsis:
        return {"type": "array", "items": _value(args[0], rule)}
    places = [_value(arg, rule) for arg in args]
    exactly = {"minItems": len(places), "maxItems": len(places)}
    return {"type": "array", "prefixItems": places, "items": False, **exactly}


def _limits(kind: Hint, rule: Rule) -> dict[str, Any]:
    if isinstance(rule, OneOf):
        return {"enum": list(rule.choices)}
    if isinstance(rule, Range):
        low = "exclusiveMinimum" if rule.open_low else "minimum"
        high = "exclusiveMaximum" if rule.open_high else "maximum"
        ends = ((low, rule.low), (high, rule.high))
        return {name: bound for name, bound in ends if math.isfinite(bound)}
    assert rule == ANYTHING
    return {"minLength": 1} if kind is str else {}


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
