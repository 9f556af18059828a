"""Which names a config has, and what an unknown one may have been meant for.

Owns the list of keys and sections. It knows no value and no file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields

from rankmesh.config.fields import Refusal
from rankmesh.config.schema import RunConfig
from rankmesh.config.toml import ascii_line
from rankmesh.config.types import walk_keys

KEYS = tuple(key for key, _, _ in walk_keys(RunConfig))
SECTIONS = tuple(entry.name for entry in fields(RunConfig))


def unknown_key(key: str) -> Refusal:
    """The refusal of a dotted key: the same key elsewhere, else the nearest of its section, else
    all.
    """
    section, _, name = key.rpartition(".")
    of_section = [other for other in KEYS if other.rpartition(".")[0] == section]
    same_name = [other for other in KEYS if other.rpartition(".")[2] == name]
    hint = _did_you_mean(same_name or _close(key, of_section or KEYS))
    if of_section:
        known = (
            f"known in [{section}]: {', '.join(other.rpartition('.')[2] for other in of_section)}"
        )
    else:
        known = f"known sections: {', '.join(SECTIONS)}"
    return Refusal(key, f"unknown key {ascii_line(key)}; {hint or known}")


def unknown_section(name: str) -> Refusal:
    """Refuses a section: named is the nearest one, else all."""
    hint = _did_you_mean(difflib.get_close_matches(name, SECTIONS, n=1))
    known = f"known sections: {', '.join(SECTIONS)}"
    return Refusal(name, f"unknown section [{ascii_line(name)}]; {hint or known}")


def _close(key: str, candidates: Iterable[str]) -> list[str]:
    """The candidate whose last name is closest: a shared section would make all keys look alike."""
    by_name = {other.rpartition(".")[2]: other for other in candidates}
    return [
        by_name[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1)
    ]


def _did_you_mean(found: Iterable[str]) -> str:
    names = " or ".join(found)
    return f"did you mean {names}?" if names else ""
