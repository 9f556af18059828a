"""Which folder may import which, and what may be imported at all.

The table is the architecture: it has no cycle, so the package has none between folders.
"""

import ast
import sys

import pytest

from tests.rules import tree

CORE = {"errors", "topology"}
RUN = {
    "errors", "topology", "schedule", "specs", "theory", "config", "obs", "comm", "nn", "models",
    "parallel", "optim", "checkpoint", "data",
}  # fmt: skip

# folder -> folders of this package that it may import
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "topology": {"errors"},
    "schedule": {"errors"},
    "specs": CORE,
    "theory": CORE | {"schedule", "specs"},
    "config": CORE | {"specs"},
    "obs": {"errors", "theory"},
    "comm": CORE | {"obs"},
    "nn": {"errors"},
    "models": CORE | {"specs", "nn"},
    "parallel": CORE | {"schedule", "comm", "nn", "models", "obs"},
    "optim": CORE | {"comm", "obs"},
    "checkpoint": CORE | {"specs", "comm", "obs"},
    "data": CORE | {"obs"},
    "train": RUN | {"version"},
    "planner": CORE | {"schedule", "specs", "theory", "config", "obs"},
    "report": CORE | {"schedule", "specs", "theory", "config", "obs"},
    "testing": CORE | {"comm", "nn", "models"},
    "cli": RUN | {"train", "planner", "report", "testing", "version"},
    "__main__": {"cli"},
    "api": {"errors", "config", "obs", "train"},
    "__init__": {"errors", "version", "api", "config", "train"},
}

# folder -> packages of others that it may import beside the standard library
THIRD_PARTY: dict[str, set[str]] = {
    "topology": {"numpy"},
    "schedule": {"numpy"},
    "theory": {"numpy"},
    "planner": {"numpy"},
    "obs": {"numpy", "rich", "torch"},
    "comm": {"numpy", "torch"},
    "nn": {"torch"},
    "models": {"numpy", "torch"},
    "parallel": {"torch"},
    "optim": {"torch"},
    "checkpoint": {"numpy", "safetensors", "torch"},
    "data": {"numpy", "torch"},
    "train": {"numpy", "safetensors", "torch"},
    "testing": {"numpy", "torch"},
    "cli": {"numpy", "rich", "torch"},
}

# An optional extra has one owner: it imports the extra at its top, and is itself loaded only by
# the choice that asks for it.
EXTRAS = {
    "tokenizers": "rankmesh.data.hf_tokenizer",
    "zstandard": "rankmesh.data.zst",
    "pyarrow": "rankmesh.data.parquet",
    "tensorboard": "rankmesh.obs.trackers_tensorboard",
    "wandb": "rankmesh.obs.trackers_wandb",
    "mlflow": "rankmesh.obs.trackers_mlflow",
    "trackio": "rankmesh.obs.trackers_trackio",
}

# The modules that load another by its name. There is no other hidden import.
LOADERS = {
    "rankmesh",
    "rankmesh.api",
    "rankmesh.cli.main",
    "rankmesh.data.extras",
    "rankmesh.obs.trackers",
    "rankmesh.testing.worker",
}

# The front door names the types of what it loads only when it is used.
FRONT = {"rankmesh", "rankmesh.api"}

# The oracle must not share a mistake with what it judges.
ORACLE = "rankmesh.testing.oracle"
ORACLE_MAY = {"torch", "rankmesh.nn"}


def _parts(name: str) -> tuple[str, str]:
    """(top package, folder of ours): ("rankmesh", "topology"), ("torch", "nn")."""
    top, _, rest = name.partition(".")
    return top, rest.partition(".")[0]


def _own_imports(source: tree.Source, *, typing: bool = True) -> list[tuple[str, int]]:
    """Modules of this package that a file imports, `from rankmesh import x` resolved to x.

    `typing=False` leaves out what only a type checker follows.
    """
    found = []
    for item in tree.imports(source):
        if _parts(item.module)[0] == "rankmesh" and (typing or not item.typing):
            module = item.module
            if item.name and _is_module(f"{module}.{item.name}"):
                module = f"{module}.{item.name}"
            found.append((module, item.line))
    return found


def _is_module(name: str) -> bool:
    return any(source.module == name for source in tree.package_files())


def _third_party(source: tree.Source) -> list[tuple[str, int]]:
    tops = [(_parts(item.module)[0], item.line) for item in tree.imports(source)]
    known = sys.stdlib_module_names | {"rankmesh", "__future__"}
    return [(top, line) for top, line in tops if top not in known]


def test_the_table_has_no_cycle() -> None:
    """Folders can be sorted so that each imports only what stands before it."""
    order: list[str] = []
    while len(order) < len(ALLOWED):
        free = [name for name, may in ALLOWED.items() if name not in order and may <= set(order)]
        assert free, f"a cycle among {sorted(set(ALLOWED) - set(order))}"
        order += free


def test_every_folder_is_in_the_table() -> None:
    """A new folder needs a line that says what it may import."""
    unknown = {source.folder for source in tree.package_files()} - set(ALLOWED)
    assert not unknown


def test_type_imports_stay_inside_their_folder() -> None:
    """`if TYPE_CHECKING:` is for two files of one folder that name each other's types."""
    findings = [
        f"{source.name}:{item.line} imports {item.module}"
        for source in tree.package_files()
        for item in tree.imports(source)
        if item.typing
        and _parts(item.module) != ("rankmesh", source.folder)
        and source.module not in FRONT
    ]
    assert not findings, tree.report(findings)


def test_folders_import_what_the_table_allows() -> None:
    """No import leaves the table."""
    findings = []
    for source in tree.package_files():
        may = ALLOWED.get(source.folder, set()) | {source.folder}
        for module, line in _own_imports(source):
            folder = _parts(module)[1]
            if folder not in may:
                findings.append(f"{source.name}:{line} imports {module}")
    assert not findings, tree.report(findings)


def test_third_party_imports_stay_in_their_folders() -> None:
    """Torch above all: plans, specs, schedules and configs are usable without it."""
    findings = []
    for source in tree.package_files():
        may = set(THIRD_PARTY.get(source.folder, set()))
        may |= {extra for extra, owner in EXTRAS.items() if owner == source.module}
        for top, line in _third_party(source):
            if top not in may:
                findings.append(f"{source.name}:{line} imports {top}")
    assert not findings, tree.report(findings)


def test_no_import_hides() -> None:
    """Imports stand at the top of a file; loading by name is left to a short list."""
    findings = []
    for source in tree.package_files():
        findings += [
            f"{source.name}:{item.line} imports {item.module} inside a block"
            for item in tree.imports(source)
            if item.hidden
        ]
        if source.module not in LOADERS:
            findings += [
                f"{source.name}:{node.lineno} loads a module by name"
                for node in ast.walk(source.tree)
                if isinstance(node, ast.Call)
                and tree.dotted(node.func) in ("importlib.import_module", "__import__")
            ]
    assert not findings, tree.report(findings)


def test_imports_are_absolute_and_explicit() -> None:
    """No relative import, no star."""
    findings = [
        f"{source.name}:{item.line} imports {item.module or '.'} {item.name}"
        for source in tree.package_files()
        for item in tree.imports(source)
        if item.module.startswith(".") or item.name == "*"
    ]
    assert not findings, tree.report(findings)


def test_an_extra_is_imported_by_its_owner_only() -> None:
    """And nobody imports the owner at the top of a file."""
    findings = [
        f"{source.name}:{line} imports {module}, the owner of an extra"
        for source in tree.package_files()
        for module, line in _own_imports(source)
        if module in EXTRAS.values()
    ]
    assert not findings, tree.report(findings)


def test_modules_have_no_import_cycle() -> None:
    """Inside a folder too; types that two files of a folder share do not count."""
    edges = {
        source.module: {module for module, _ in _own_imports(source, typing=False)}
        for source in tree.package_files()
    }
    left = dict(edges)
    while True:
        free = [name for name, uses in left.items() if not (uses & set(left)) - {name}]
        if not free:
            break
        for name in free:
            del left[name]
    assert not left, f"a cycle among, or above, {sorted(left)}"


def test_the_oracle_is_independent() -> None:
    """It knows torch, nn and the standard library: no table, mesh, seam or optimizer of ours."""
    sources = [source for source in tree.package_files() if source.module == ORACLE]
    assert sources, f"{ORACLE} is missing"
    findings = []
    for item in tree.imports(sources[0]):
        top = _parts(item.module)[0]
        ours = item.module == "rankmesh.nn" or item.module.startswith("rankmesh.nn.")
        if not ours and top not in ORACLE_MAY and top not in sys.stdlib_module_names:
            findings.append(f"{sources[0].name}:{item.line} imports {item.module}")
    assert not findings, tree.report(findings)


@pytest.mark.parametrize("module", ["rankmesh.nn.block", "rankmesh"])
def test_parts_splits_names(module: str) -> None:
    """The rules above rest on this."""
    assert _parts(module) == ("rankmesh", module.removeprefix("rankmesh").strip(".").split(".")[0])
