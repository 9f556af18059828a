"""What no file of the package may do: unpickle, evaluate text, rebind globals, read the environment
outside one file, leave ASCII, or promise what it does not do.
"""

import ast
import re

import pytest

from tests.rules import tree

ENVIRONMENT_READER = "rankmesh.comm.environ"

PICKLING_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "copyreg"}
PICKLING_CALLS = {"torch.load", "torch.save", "numpy.load", "np.load", "yaml.load"}
OBJECT_COLLECTIVE = re.compile(r"^(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?$")
# Everything that multiprocessing sends through these is pickled.
PICKLING_CHANNELS = {"Queue", "SimpleQueue", "JoinableQueue", "Manager", "Pool"}
EVALUATION = {"eval", "exec", "compile"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def _pickling(node: ast.AST) -> str:
    """What in this node would pickle or unpickle; "" for nothing."""
    if isinstance(node, ast.Import):
        return ", ".join(alias.name for alias in node.names if alias.name in PICKLING_MODULES)
    if isinstance(node, ast.ImportFrom):
        if node.module in PICKLING_MODULES:
            return str(node.module)
        names = {alias.name for alias in node.names}
        channels = names & PICKLING_CHANNELS if "multiprocessing" in (node.module or "") else set()
        return ", ".join(channels | {name for name in names if OBJECT_COLLECTIVE.match(name)})
    if isinstance(node, ast.Attribute):
        name = tree.dotted(node)
        if name in PICKLING_CALLS or OBJECT_COLLECTIVE.match(node.attr):
            return name or node.attr
        owner = name.rpartition(".")[0]
        if node.attr in PICKLING_CHANNELS and owner in ("mp", "multiprocessing"):
            return name
    return ""


def _environment(node: ast.AST) -> str:
    """How this node reaches the environment; "" where it does not."""
    if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
        return tree.dotted(node) if tree.dotted(node.value) == "os" else ""
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return ", ".join(alias.name for alias in node.names if alias.name in ENVIRONMENT)
    return ""


def _evaluation(node: ast.AST) -> str:
    """The builtin by which this node runs text as code; "" where it does not."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id if node.func.id in EVALUATION else ""
    return ""


def test_nothing_is_pickled_or_unpickled() -> None:
    """A file or a message of somebody else's must not be able to run code here."""
    findings = [
        f"{source.name}:{getattr(node, 'lineno', 0)} uses {_pickling(node)}"
        for source in tree.package_files()
        for node in ast.walk(source.tree)
        if _pickling(node)
    ]
    assert not findings, tree.report(findings)


def test_no_text_is_run_as_code() -> None:
    """Neither eval nor exec."""
    findings = [
        f"{source.name}:{getattr(node, 'lineno', 0)} uses {_evaluation(node)}"
        for source in tree.package_files()
        for node in ast.walk(source.tree)
        if _evaluation(node)
    ]
    assert not findings, tree.report(findings)


def test_the_environment_is_read_in_one_file() -> None:
    """So that one place says which variables matter."""
    findings = [
        f"{source.name}:{getattr(node, 'lineno', 0)} uses {_environment(node)}"
        for source in tree.package_files()
        if source.module != ENVIRONMENT_READER
        for node in ast.walk(source.tree)
        if _environment(node)
    ]
    assert not findings, tree.report(findings)


def test_no_global_statement() -> None:
    """State is passed, never rebound in a module."""
    findings = [
        f"{source.name}:{node.lineno} global {', '.join(node.names)}"
        for source in tree.package_files() + tree.suite_files() + tree.other_files()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    assert not findings, tree.report(findings)


def test_nothing_is_left_unfinished() -> None:
    """No note to do it later, no body that raises NotImplementedError, no empty body that its
    docstring does not explain.
    """
    findings = []
    for source in tree.package_files():
        findings += [
            f"{source.name}:{number} {line.strip()}"
            for number, line in enumerate(source.text.splitlines(), start=1)
            if UNFINISHED.search(line)
        ]
        protocols = [node for node in ast.walk(source.tree) if _is_protocol(node)]
        abstract = {id(method) for node in protocols for method in ast.walk(node)}
        findings += [
            f"{source.name}:{node.lineno} {node.name} is a stub"
            for node in tree.functions(source)
            if id(node) not in abstract and not ast.get_docstring(node) and _is_empty(node)
        ]
    assert not findings, tree.report(findings)


def _is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "Protocol" in {tree.dotted(b) for b in node.bases}


def _is_empty(function: tree.FunctionNode) -> bool:
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def test_everything_is_ascii() -> None:
    """Sources, documents and settings alike."""
    suffixes = {".py", ".toml", ".md", ".txt", ".cfg", ".sh"}
    folders = [tree.ROOT / name for name in ("src", "tests", "docs", "benchmarks", "examples")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    paths += [path for path in tree.ROOT.iterdir() if path.suffix in suffixes]
    findings = [
        f"{path.relative_to(tree.ROOT)}:{number}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if not line.isascii()
    ]
    assert len(paths) > 20
    assert not findings, tree.report(findings)


@pytest.mark.parametrize(
    ("text", "finder"),
    [
        ("import pickle", _pickling),
        ("from pickle import loads", _pickling),
        ("torch.load(path)", _pickling),
        ("np.load(path, allow_pickle=True)", _pickling),
        ("dist.broadcast_object_list(x)", _pickling),
        ("from torch.distributed import all_gather_object", _pickling),
        ("multiprocessing.Queue()", _pickling),
        ("from torch.multiprocessing import Pool", _pickling),
        ("os.environ['HOME']", _environment),
        ("os.getenv('HOME')", _environment),
        ("from os import environ", _environment),
        ("eval('1')", _evaluation),
        ("exec('1')", _evaluation),
    ],
)
def test_the_finders_find(text: str, finder: object) -> None:
    """A rule that could not fail would be no rule."""
    assert callable(finder)
    assert any(finder(node) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize("text", ["module.eval()", "torch.compile(f)", "mesh.environ"])
def test_the_finders_leave_innocent_code_alone(text: str) -> None:
    """Methods that only sound alike are fine."""
    nodes = list(ast.walk(ast.parse(text)))
    assert not any(_pickling(node) or _environment(node) or _evaluation(node) for node in nodes)
