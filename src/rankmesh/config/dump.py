"""RunConfig -> TOML text that reads back equal.

Owns the layout of a written config. It knows no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rankmesh.config.schema import FORMAT_VERSION, RunConfig
from rankmesh.config.toml import toml_value


def dump(config: RunConfig) -> str:
    """Every key in TOML, defaults included; keys that are not given (None) are left out."""
    return f"format_version = {FORMAT_VERSION}\n" + "".join(
        "\n".join(["", f"[{name}]", *lines, ""]) for name, lines in _tables(config, "")
    )


def _tables(section: Any, name: str) -> Iterator[tuple[str, list[str]]]:
    values = {entry.name: getattr(section, entry.name) for entry in fields(section)}
    inner = {key: value for key, value in values.items() if is_dataclass(value)}
    if name:
        yield (
            name,
            [
                f"{key} = {toml_value(value)}"
                for key, value in values.items()
                if value is not None and key not in inner
            ],
        )
    for key, value in inner.items():
        yield from _tables(value, f"{name}.{key}" if name else key)
