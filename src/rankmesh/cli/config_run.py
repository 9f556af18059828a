"""The body of `rankmesh config`: keys explained, and the schema.

Owns the print. What a key means is said where the key is declared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from rankmesh.config.explain import KeyInfo, explain, keys
from rankmesh.config.json_schema import json_schema
from rankmesh.config.names import KEYS, SECTIONS, unknown_section


def run(args: argparse.Namespace) -> int:
    """Prints; returns 0. Raises ConfigError, naming the nearest, for a key that does not exist."""
    if args.part == "schema":
        print(json.dumps(json_schema(), indent=2))
        return 0
    found = [info for key in args.keys for info in _found(key)]
    if args.json:
        print(json.dumps([{**dataclasses.asdict(info), "allowed": info.allowed} for info in found]))
    else:
        print("\n".join(_lines(found)))
    return 0


def _found(name: str) -> list[KeyInfo]:
    """One key, or every key of a section."""
    if name in KEYS or "." in name:
        return [explain(name)]
    if name in SECTIONS:
        return [info for info in keys() if info.key.startswith(f"{name}.")]
    if any(key.rpartition(".")[2] == name for key in KEYS):
        return [explain(name)]  # raises, naming the key with its section
    raise unknown_section(name)


def _lines(found: Sequence[KeyInfo]) -> list[str]:
    lines = []
    for info in found:
        default = info.default or "not set"
        lines += [
            "",
            info.key,
            f"  {info.doc}",
            f"  value    {info.allowed}",
            f"  default  {default}",
        ]
    return lines[1:]
