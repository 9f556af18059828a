"""Owns how the rules read the source: files, their syntax trees, and what each imports.

It must not import the package itself: a rule judges text, and so works on code that is broken.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "rankmesh"
TESTS = ROOT / "tests"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its path from the repository's root, as messages show it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Its dotted name, for a file of the package: `rankmesh.topology.plan`."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def folder(self) -> str:
        """The unit of the import table: a folder of the package, or a file directly in it."""
        first = self.path.relative_to(PACKAGE).parts[0]
        return first.removesuffix(".py")


@dataclass(frozen=True)
class Import:
    """One imported name: `module` as written, `line`, and where it stands.

    `hidden`: inside a function or another block. `typing`: under `if TYPE_CHECKING:`, so that it
    never runs.
    """

    module: str
    name: str
    line: int
    hidden: bool
    typing: bool


def _read(folder: Path) -> tuple[Source, ...]:
    sources = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        sources.append(Source(path, text, ast.parse(text, filename=str(path))))
    return tuple(sources)


@cache
def package_files() -> tuple[Source, ...]:
    """Every Python file of the package."""
    return _read(PACKAGE)


@cache
def suite_files() -> tuple[Source, ...]:
    """Every Python file under tests/."""
    return _read(TESTS)


@cache
def other_files() -> tuple[Source, ...]:
    """Every Python file of the repository outside src/ and tests/."""
    return _read(ROOT / "benchmarks") + _read(ROOT / "examples")


def imports(source: Source) -> Iterator[Import]:
    """All imports of a file. The package never uses relative ones, so neither does this."""
    top = {id(node) for node in source.tree.body}
    typing = {
        id(inner)
        for node in source.tree.body
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
        for inner in node.body
    }
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        hidden = id(node) not in top | typing
        for alias in node.names:
            module, name = alias.name, ""
            if isinstance(node, ast.ImportFrom):
                module, name = "." * node.level + (node.module or ""), alias.name
            yield Import(module, name, node.lineno, hidden, id(node) in typing)


def functions(source: Source) -> Iterator[FunctionNode]:
    """Every function and method of a file, nested ones too."""
    for node in ast.walk(source.tree):
        if isinstance(node, FunctionNode):
            yield node


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, and "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def report(findings: list[str]) -> str:
    """The message of a failed rule: one finding a line."""
    return "\n" + "\n".join(findings)
