"""TOML file, or a dict, and overrides -> RunConfig.

Owns reading: one small recursive reader that follows the type hints of the dataclasses, and the
note of where each value came from. It knows no key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin, get_type_hints

from rankmesh.config.dump import dump
from rankmesh.config.fields import Refusal, refuse
from rankmesh.config.names import KEYS, unknown_key, unknown_section
from rankmesh.config.schema import FORMAT_VERSION, RunConfig
from rankmesh.config.toml import ascii_line, shown
from rankmesh.config.types import (
    Hint,
    alternatives,
    describe,
    element_hints,
    is_optional,
    is_table,
)
from rankmesh.errors import ConfigError

T = TypeVar("T")

_UNSET = "none"
_VERSION_KEY = "format_version"
_PYTHON_TYPES: Mapping[Hint, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
}


def load_config(
    config: str | PathLike[str] | Mapping[str, Any] | RunConfig | None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """The config of a TOML file with `section.key=value` overrides on top; later ones win.

    config: the file's path; or what such a file holds, as a dict of sections; or a RunConfig; None
    for defaults. An override's value is TOML; text that is no TOML is a string, so that quotes are
    rarely needed; `none` unsets a key that may be unset. Raises ConfigError, in one line that names
    the file or the override, the key, the value and what is allowed.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    if isinstance(config, RunConfig):
        if not overrides:
            return config
        config = tomllib.loads(dump(config))
    if isinstance(config, str | PathLike):
        tree, given = _read_file(Path(config)), _Overrides(file=f"{config}")
    else:
        tree, given = _sections(config), _Overrides(file="config")
    try:
        _check_version(tree)
        for text in overrides:
            given.apply(text, tree)
        return _Reader(given.texts).table(RunConfig, tree, "")
    except Refusal as refusal:
        raise ConfigError(f"{given.source(refusal.key)}: {refusal}") from None


def _sections(config: object) -> Any:
    """What a config file would hold, of a dict or None. Raises ConfigError for anything else."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"config: {shown(config)} is of type {type(config).__name__}; expected the path of a "
            "TOML file, a dict of sections or a RunConfig"
        )
    return _as_toml(config or {})


def _as_toml(value: Any) -> Any:
    """A dict from Python as TOML would give it: a copy, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        # What is None is not given, as TOML has no word for that.
        return {str(key): _as_toml(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_as_toml(item) for item in value]
    return str(value) if isinstance(value, PathLike) else value


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; a config is a TOML file") from None
    except (ValueError, RecursionError) as error:
        # tomllib lets both through: numbers of thousands of digits and brackets nested as deep.
        raise ConfigError(f"{path}: not valid TOML: {ascii_line(str(error))}") from None


def _check_version(tree: dict[str, Any]) -> None:
    version = tree.pop(_VERSION_KEY, FORMAT_VERSION)
    if type(version) is not int or version != FORMAT_VERSION:
        raise refuse(
            _VERSION_KEY, version, f"{FORMAT_VERSION}, the version that this release reads"
        )


@dataclass
class _Overrides:
    """Overrides applied so far, dotted key -> text as typed; the rest comes from `file`."""

    file: str
    texts: dict[str, str] = field(default_factory=dict)

    def apply(self, text: str, tree: dict[str, Any]) -> None:
        """Put one `section.key=value` into the tree. Raises Refusal."""
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or "." not in key:
            raise ConfigError(f"override {shown(key)}: expected section.key=value")
        # Set first, so that a refusal of this key names the override.
        self.texts[key] = value.strip()
        *parents, last = key.split(".")
        if key not in KEYS:
            raise unknown_key(key)
        table = tree
        for depth, name in enumerate(parents, start=1):
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise refuse(".".join(parents[:depth]), table, "a table")
        table[last] = _parse(value.strip())
        for inner in [other for other in self.texts if other.startswith(f"{key}.")]:
            del self.texts[inner]

    def source(self, key: str) -> str:
        """Who gave `key`: the nearest override above it, else the file."""
        key = key.partition("[")[0]
        while key:
            if key in self.texts:
                return "override"
            key = key.rpartition(".")[0]
        return self.file


def _parse(text: str) -> Any:
    """`text` as one TOML value, else as the string that it is."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text


@dataclass(frozen=True)
class _Reader:
    """Plain TOML values -> typed ones; `texts` are the overrides as typed."""

    texts: Mapping[str, str]

    def table(self, cls: type[T], given: Any, key: str) -> T:
        """A dataclass from a TOML table; absent keys keep their defaults. Raises Refusal."""
        if not isinstance(given, dict):
            raise refuse(key, given, "a table")
        hints = get_type_hints(cls)
        names = [entry.name for entry in fields(cast(Any, cls))]
        values = {}
        for name, value in given.items():
            dotted = f"{key}.{name}" if key else name
            if name not in names:
                raise (
                    unknown_section(name)
                    if not key and isinstance(value, dict)
                    else unknown_key(dotted)
                )
            values[name] = self.value(hints[name], value, dotted)
        return cls(**values)

    def value(self, hint: Hint, given: Any, key: str) -> Any:
        """`given` as the type that `hint` asks for. Raises Refusal."""
        kinds = alternatives(hint)
        text = self.texts.get(key)
        if text == _UNSET and is_optional(hint):
            return None
        if text is not None and kinds == (str,) and not isinstance(given, str):
            # A run folder named 2026 or 2026-01-31 is text, whatever TOML makes of it.
            given = text
        for kind in kinds:
            fits, found = self._fit(kind, given, key)
            if fits:
                return found
        raise refuse(key, given, describe(hint))

    def _fit(self, kind: Hint, given: Any, key: str) -> tuple[bool, Any]:
        """Whether `given` is of the kind, and what it becomes."""
        if is_table(kind):
            return True, self.table(kind, given, key)
        if get_origin(kind) is tuple:
            hints = element_hints(kind, len(given)) if isinstance(given, list) else None
            if hints is None:
                return False, None
            pairs = enumerate(zip(hints, given, strict=True))
            return True, tuple(self.value(hint, item, f"{key}[{i}]") for i, (hint, item) in pairs)
        if not isinstance(given, _PYTHON_TYPES[kind]) or isinstance(given, bool) != (kind is bool):
            return False, None
        if kind is float and isinstance(given, int):
            return True, _as_float(given, key)
        return True, given


def _as_float(given: int, key: str) -> float:
    try:
        return float(given)
    except OverflowError:
        raise refuse(key, given, "a finite number") from None
