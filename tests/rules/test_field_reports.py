"""Every known fault of such systems is tested here, planned, or explained."""

import ast
import re
import tomllib
from collections import defaultdict
from typing import Any

from tests.rules import tree

FILE = tree.TESTS / "field_reports.toml"
KEYS = {"test", "issue", "reason"}
ISSUE = re.compile(r"^[1-9] of 9$")
# "Field report G01", "Field reports T01, T02 and D13"
MENTION = re.compile(r"[Ff]ield reports?:?\s+((?:[A-Z]\d\d(?:\s*,\s*|\s+and\s+|\s*/\s*)?)+)")
ID = re.compile(r"[A-Z]\d\d")


def _load() -> tuple[list[str], dict[str, dict[str, Any]]]:
    content = tomllib.loads(FILE.read_text(encoding="ascii"))
    return content["ids"], content["reports"]


def _tests(entry: dict[str, Any]) -> list[str]:
    named = entry.get("test", [])
    return [named] if isinstance(named, str) else list(named)


def _docstrings() -> dict[str, str]:
    """Docstrings of the suite by node: `tests/a.py`, `tests/a.py::test_b`, `...::Class::test_b`.

    A test's text is that of its file, its class and its own: each may name the report.
    """
    found: dict[str, str] = {}
    for source in tree.suite_files():
        if source.path.name.startswith("test_"):
            _gather(source.tree, source.name, "", found)
    return found


def _gather(node: Any, name: str, above: str, found: dict[str, str]) -> None:
    text = f"{above}\n{ast.get_docstring(node) or ''}"
    for child in node.body:
        if isinstance(child, ast.ClassDef) and child.name.startswith("Test"):
            _gather(child, f"{name}::{child.name}", text, found)
        elif isinstance(child, tree.FunctionNode) and child.name.startswith("test_"):
            found[f"{name}::{child.name}"] = f"{text}\n{ast.get_docstring(child) or ''}"


def mentioned(text: str) -> set[str]:
    """The ids that a docstring says it takes."""
    return {name for run in MENTION.findall(text) for name in ID.findall(run)}


def test_every_report_has_an_entry() -> None:
    """The list and the table hold the same ids, each once."""
    ids, reports = _load()
    assert len(ids) == len(set(ids)) == 110
    assert set(ids) == set(reports)


def test_every_entry_says_where() -> None:
    """A test, an issue or a reason; a reason stands alone."""
    findings = []
    for name, entry in _load()[1].items():
        if not entry or not set(entry) <= KEYS or ("reason" in entry and len(entry) > 1):
            findings.append(f"{name}: {entry}")
        if "issue" in entry and not ISSUE.match(entry["issue"]):
            findings.append(f"{name}: issue {entry['issue']!r}, expected 'N of 9'")
        if "reason" in entry and len(entry["reason"].split()) < 5:
            findings.append(f"{name}: a reason is a sentence")
    assert not findings, tree.report(findings)


def test_every_named_test_exists_and_names_its_report() -> None:
    """Renaming a test, or taking the id out of its docstring, breaks the entry."""
    docstrings = _docstrings()
    findings = []
    for name, entry in _load()[1].items():
        for test in _tests(entry):
            if test not in docstrings:
                findings.append(f"{name}: {test} does not exist")
            elif name not in mentioned(docstrings[test]):
                findings.append(f"{name}: {test} does not say 'Field report {name}'")
    assert not findings, tree.report(findings)


def test_a_report_named_in_a_test_is_mapped_to_a_test() -> None:
    """And no test names an id that is not in the list."""
    ids, reports = _load()
    tests_by_id: dict[str, list[str]] = defaultdict(list)
    for test, text in _docstrings().items():
        for name in mentioned(text):
            tests_by_id[name].append(test)
    findings = [
        f"{name} is unknown: {tests}" for name, tests in tests_by_id.items() if name not in ids
    ]
    findings += [
        f"{name} has no test in the table, but {tests[0]} takes it"
        for name, tests in sorted(tests_by_id.items())
        if name in ids and not _tests(reports[name])
    ]
    assert not findings, tree.report(findings)


def test_mentions_are_found_in_prose() -> None:
    """The rules above rest on this."""
    assert mentioned("Field report G01.") == {"G01"}
    assert mentioned("Field reports T01, T02 and D13: heads.") == {"T01", "T02", "D13"}
    assert mentioned("Field report G03 / U08; see F32.") == {"G03", "U08"}
    assert mentioned("No field report here, nor G01.") == set()
