"""Seeded faults: what they are, and how a worker process comes to run one.

Owns mutants.toml's form and the import of one module from altered text. Nothing on disk changes,
and only the forked worker sees the fault. It must not import torch or any module that a fault may
be in.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

FOLDER = Path(__file__).parent
PACKAGE = FOLDER.parents[1] / "src" / "rankmesh"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """`find`, which the file (a path inside the package) must hold exactly once, gives way to
    `replace`.
    """

    file: str
    find: str
    replace: str

    @property
    def module(self) -> str:
        """The dotted name of the file."""
        return "rankmesh." + self.file.removesuffix(".py").replace("/", ".")

    def apply(self, text: str) -> str:
        """The altered text. Raises ValueError where `find` does not occur exactly once."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"{self.file} holds {self.find!r} {count} times, not once")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault in one line of words, the check (of checks.py) that must fail, and what its
    AssertionError says then (a regular expression). `fast`: run in the first tier too.
    """

    id: str
    what: str
    edit: Edit
    check: str
    says: str
    fast: bool = False


def mutants() -> list[Mutant]:
    """All of mutants.toml."""
    entries = tomllib.loads((FOLDER / "mutants.toml").read_text(encoding="ascii"))["mutant"]
    return [_mutant(entry) for entry in entries]


def _mutant(entry: dict[str, Any]) -> Mutant:
    edit = Edit(**{key: entry.pop(key) for key in ("file", "find", "replace")})
    return Mutant(edit=edit, **entry)


def job(edit: Edit | None, target: str, args: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `run` for the JSON that a job travels as."""
    return {"edit": asdict(edit) if edit else None, "check": target, "args": args}


def run(worker: Any, *, edit: dict[str, str] | None, check: str, args: dict[str, Any]) -> Any:
    """The pool's target: import package and tests anew, one file with `edit` applied, and call
    `check` ("module:function") with a Worker made of the new code.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rankmesh", "tests")]:
        del sys.modules[name]
    if edit is not None:
        sys.meta_path.insert(0, _Finder(Edit(**edit)))
    fresh = importlib.import_module("rankmesh.testing.worker")
    module, _, function = check.partition(":")
    target = getattr(importlib.import_module(module), function)
    return target(
        fresh.Worker(worker.rank, worker.world_size, worker.folder, worker.timeout), **args
    )


class _Finder:
    """Finds the one altered module; leaves all others to Python."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.edit.module:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self.edit)
        return spec


class _Loader(SourceFileLoader):
    """Compiles the altered text, never cached bytecode."""

    def __init__(self, name: str, path: str, edit: Edit) -> None:
        super().__init__(name, path)
        self.edit = edit

    def get_code(self, fullname: str) -> CodeType:
        text = self.edit.apply(self.get_data(self.path).decode("ascii"))
        code: CodeType = self.source_to_code(text.encode(), self.path)
        return code
