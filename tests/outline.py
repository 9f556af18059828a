"""Writes the two lists that documents repeat from the code: files (docs/architecture.md) and
exported names (docs/api.md). `python -m tests.outline` renews both; the rules compare them.

It must not import the package: it reads source text, as the rules do.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

from tests.rules import tree

ARCHITECTURE = tree.ROOT / "docs" / "architecture.md"
API = tree.ROOT / "docs" / "api.md"
MARKS = ("<!-- files: begin -->", "<!-- files: end -->")
FILE_LINE = re.compile(r"^- `([^`]+\.py)`: \S", re.MULTILINE)
SENTENCE_END = re.compile(r"(?<!i\.e)(?<!e\.g)(?<!et al)(?<!\b[A-Z])\. (?!\d)")
NAME_LINE = re.compile(r"^- `([^`]+)`: \S", re.MULTILINE)


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, on one line, without its full stop."""
    paragraph = re.split(r"\n\s*\n", text or "", maxsplit=1)[0]
    flat = " ".join(paragraph.split())
    return SENTENCE_END.split(flat, maxsplit=1)[0].rstrip(".:;")


def file_list() -> str:
    """One line for each file of the package, under a heading for each folder."""
    folders: dict[str, list[str]] = defaultdict(list)
    for source in tree.package_files():
        relative = source.path.relative_to(tree.PACKAGE).as_posix()
        folder = relative.rpartition("/")[0]
        line = f"- `{relative}`: {first_sentence(ast.get_docstring(source.tree))}"
        folders[folder].append(line)
    blocks = []
    for folder, lines in sorted(folders.items()):
        title = f"### {folder}/" if folder else "### rankmesh"
        blocks.append("\n".join([title, "", *lines]))
    return "\n\n".join(blocks)


def exported(source: tree.Source) -> list[str]:
    """`__all__` of a package's `__init__`; empty where it has none."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and [tree.dotted(t) for t in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def packages() -> list[tree.Source]:
    """The `__init__` of every package that exports names."""
    return [s for s in tree.package_files() if s.path.name == "__init__.py" and exported(s)]


def origin(package: tree.Source, name: str) -> tuple[tree.Source, ast.stmt] | None:
    """The file and statement that define an exported name; None where nothing does."""
    modules = {source.module: source for source in tree.package_files()}
    where = [item.module for item in tree.imports(package) if item.name == name]
    home = modules.get(where[0]) if where else package
    if home is None:
        return None
    for node in home.tree.body:
        if name in defines(node):
            return home, node
    return None


def defines(node: ast.stmt) -> list[str]:
    """The names that a statement binds: a class, a function, a constant."""
    if isinstance(node, ast.ClassDef | tree.FunctionNode):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [tree.dotted(target) for target in node.targets]
    if isinstance(node, ast.AnnAssign):
        return [tree.dotted(node.target)]
    return []


def describe(package: tree.Source, name: str) -> str:
    """The first sentence of a name's docstring; a constant is shown by its home."""
    found = origin(package, name)
    if found is None:
        return ""
    home, node = found
    if isinstance(node, ast.ClassDef | tree.FunctionNode):
        return first_sentence(ast.get_docstring(node))
    return f"a value of `{home.module}`"


def api_text() -> str:
    """docs/api.md: the exported names of each package."""
    blocks = [
        "# Exported names\n\nWhat each package exports. A rule test compares this page with the "
        "code; `python -m tests.outline`\nrenews it."
    ]
    for package in packages():
        lines = [f"- `{name}`: {describe(package, name)}" for name in sorted(exported(package))]
        blocks.append("\n".join([f"## {package.module}", "", *lines]))
    return "\n\n".join(blocks) + "\n"


def architecture_text(page: str) -> str:
    """The page with the part between the marks renewed."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n\n{file_list()}\n\n{MARKS[1]}{after}"


def main() -> int:
    """Renews both pages."""
    page = ARCHITECTURE.read_text(encoding="ascii")
    _write(ARCHITECTURE, architecture_text(page))
    _write(API, api_text())
    return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")


if __name__ == "__main__":
    sys.exit(main())
