"""JSON as this project writes it: valid, versioned, masked, and never half a file.

Owns the encoding and the atomic write. It knows no file's fields.

JSON has no NaN and no infinity. They are written as the strings "NaN", "Infinity" and "-Infinity":
null would hide them, and bare NaN is not JSON. Readers here turn them back into floats.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankmesh.errors import RankmeshError, UserError, reason
from rankmesh.obs.secrets import masked

FORMAT_VERSION = 1

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: object, *, indent: int | None = None) -> str:
    """`value` as JSON text: secrets masked, non-finite floats as strings."""
    return json.dumps(_finite(masked(value)), indent=indent, allow_nan=False)


def decode(text: str) -> Any:
    """The value of JSON text that `encode` wrote, non-finite floats restored. Raises ValueError."""
    return _restored(json.loads(text))


def write_json(path: Path, fields: Mapping[str, object]) -> None:
    """Write `fields` and `format_version` so that a reader sees the old file or the new one,
    whole.
    """
    write_text(path, encode({"format_version": FORMAT_VERSION, **fields}, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a whole text file: under another name, to disk, then renamed into place.

    Raises RankmeshError naming the file where that fails, as on a full disk; an old one stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise RankmeshError(f"{path}: cannot be written: {reason(error)}") from error


def write_last_words(path: Path, fields: Mapping[str, object]) -> None:
    """Write as `write_json` does; where the disk has no room for a second file, over the old one.

    For the end of a run, which may have come because the disk is full. Never raises.
    """
    try:
        write_json(path, fields)
    except RankmeshError:
        text = encode({"format_version": FORMAT_VERSION, **fields}, indent=2) + "\n"
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.write(text.encode())
            file.truncate()


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote. Raises UserError naming the file where it is missing or no such
    file.
    """
    try:
        found = decode(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version is {version!r}; this release reads {FORMAT_VERSION}"
        )
    assert isinstance(found, dict)
    return found


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, special in _SPECIAL.items() if str(special) == str(value))
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _SPECIAL.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
