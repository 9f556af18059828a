"""The form of the code: sizes, headers, docstrings, and tests that can fail."""

import ast
from collections.abc import Iterator

from tests import budgets
from tests.rules import tree

MOST_LINES_IN_A_FILE = 400
MOST_LINES_IN_A_FUNCTION = 60

# Torch calls these by name; their class says what they do.
TORCH_HOOKS = {"forward", "backward", "extra_repr"}

# Every command's file has these two; `rankmesh.cli.main.Command` says what they do.
COMMAND_PARTS = {"add_arguments", "run"}


Definition = ast.ClassDef | tree.FunctionNode


def _lines(node: tree.FunctionNode) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Public functions and classes of a body, and the public methods of public classes."""
    for node in body:
        if not isinstance(node, ast.ClassDef | tree.FunctionNode) or node.name.startswith("_"):
            continue
        if prefix and node.name in TORCH_HOOKS:
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, f"{node.name}.")


def _is_overload(node: Definition) -> bool:
    """Overloads and property setters share the docstring of their first definition."""
    names = [tree.dotted(decorator) for decorator in node.decorator_list]
    return any(name.endswith(("overload", ".setter")) for name in names)


def test_files_are_short() -> None:
    """A file that outgrows the limit owns more than one thing."""
    findings = [
        f"{source.name}: {len(source.text.splitlines())} lines"
        for source in tree.package_files() + tree.suite_files() + tree.other_files()
        if len(source.text.splitlines()) > MOST_LINES_IN_A_FILE
    ]
    assert not findings, tree.report(findings)


def test_functions_are_short() -> None:
    """A function is read on one screen."""
    findings = [
        f"{source.name}:{node.lineno} {node.name}: {_lines(node)} lines"
        for source in tree.package_files() + tree.suite_files() + tree.other_files()
        for node in tree.functions(source)
        if _lines(node) > MOST_LINES_IN_A_FUNCTION
    ]
    assert not findings, tree.report(findings)


def test_every_file_says_what_it_owns() -> None:
    """The first statement is a docstring."""
    findings = [
        source.name
        for source in tree.package_files() + tree.suite_files() + tree.other_files()
        if not ast.get_docstring(source.tree)
    ]
    assert not findings, tree.report(findings)


def test_what_is_public_is_documented() -> None:
    """Every public class, function and method has a docstring; a method of one statement may let
    its name speak.
    """
    findings = [
        f"{source.name}:{node.lineno} {name}"
        for source in tree.package_files()
        for name, node in _public(source.tree.body)
        if not ast.get_docstring(node) and not _is_overload(node)
        if not ("." in name and len(node.body) == 1)
        if not (source.folder == "cli" and name in COMMAND_PARTS)
    ]
    assert not findings, tree.report(findings)


def test_every_test_can_fail() -> None:
    """A test asserts, expects an exception, or calls a helper that does."""
    findings = []
    for source in tree.suite_files():
        helpers = {node.name for node in tree.functions(source) if _checks_something(node)}
        findings += [
            f"{source.name}:{node.lineno} {node.name}"
            for node in tree.functions(source)
            if node.name.startswith("test_")
            and node.name not in helpers
            and not helpers & _called(node)
        ]
    assert not findings, tree.report(findings)


def _called(node: ast.AST) -> set[str]:
    """The last names of everything that is called: `check` for `parity.check(...)`."""
    calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {tree.dotted(call).rpartition(".")[2] for call in calls}


def _checks_something(test: tree.FunctionNode) -> bool:
    """It has an assert, or calls something whose name says that it checks."""
    if any(isinstance(node, ast.Assert) for node in ast.walk(test)):
        return True
    checking = ("raises", "fail", "assert_", "check_", "expect_")
    return any(name.startswith(checking) for name in _called(test))


def test_every_test_file_lies_in_a_rung() -> None:
    """So that budgets count it, under a name that pytest collects."""
    findings = [
        source.name
        for source in tree.suite_files()
        if source.path.name.startswith("test_")
        and budgets.rung_of(source.path) not in budgets.RUNGS
    ]
    assert not findings, tree.report(findings)
