"""Documents that repeat the code say what the code says."""

import ast
import re

from tests import outline
from tests.rules import tree


def test_every_file_has_one_line_in_the_architecture() -> None:
    """No file is missing, listed twice, or gone."""
    listed = outline.FILE_LINE.findall(outline.ARCHITECTURE.read_text(encoding="ascii"))
    files = [s.path.relative_to(tree.PACKAGE).as_posix() for s in tree.package_files()]
    findings = [f"missing: {name}" for name in sorted(set(files) - set(listed))]
    findings += [f"gone: {name}" for name in sorted(set(listed) - set(files))]
    findings += [f"twice: {name}" for name in sorted(set(listed)) if listed.count(name) > 1]
    assert not findings, tree.report([*findings, "renew with: python -m tests.outline"])


def test_the_list_of_exported_names_is_that_of_the_code() -> None:
    """A name enters or leaves a package's exports together with its line in docs/api.md."""
    page = outline.API.read_text(encoding="ascii")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    documented = {
        section.partition("\n")[0]: sorted(outline.NAME_LINE.findall(section))
        for section in sections
    }
    actual = {package.module: sorted(outline.exported(package)) for package in outline.packages()}
    assert documented == actual, "renew with: python -m tests.outline"


def test_exported_names_exist_and_are_documented() -> None:
    """Each is defined where its package takes it from; classes and functions have docstrings."""
    findings = []
    for package in outline.packages():
        for name in outline.exported(package):
            found = outline.origin(package, name)
            if found is None:
                findings.append(f"{package.module} exports {name}, which nothing defines")
            elif not outline.describe(package, name):
                findings.append(f"{package.module}.{name} has no docstring")
    assert not findings, tree.report(findings)


def test_a_package_exports_what_it_imports() -> None:
    """An `__init__` that gathers names has an `__all__` of just those names, sorted."""
    findings = []
    for source in tree.package_files():
        if source.path.name != "__init__.py":
            continue
        ours = [i for i in tree.imports(source) if i.module.partition(".")[0] == "rankmesh"]
        gathered = {item.name for item in ours}
        names = outline.exported(source)
        if gathered != set(names) or len(names) != len(set(names)):
            findings.append(f"{source.name}: imports {sorted(gathered)}, exports {sorted(names)}")
    assert not findings, tree.report(findings)


def test_all_is_true_everywhere() -> None:
    """A module's `__all__` lists only names that the module has at its top level."""
    findings = []
    for source in tree.package_files():
        bound = {item.name or item.module for item in tree.imports(source)}
        for node in source.tree.body:
            bound.update(outline.defines(node))
        missing = set(outline.exported(source)) - bound
        findings += [f"{source.name}: {name}" for name in sorted(missing)]
    assert not findings, tree.report(findings)


def test_first_sentence() -> None:
    """The lists rest on this."""
    assert outline.first_sentence("Owns x. It must not know y.") == "Owns x"
    assert outline.first_sentence("A (i.e. 8 bits)\n  of it.\n\nMore") == "A (i.e. 8 bits) of it"
    assert outline.first_sentence(ast.get_docstring(ast.parse(""))) == ""
