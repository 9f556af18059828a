"""Build hook: it owns the one generated file, `rankmesh/_commit.txt`, which tells an installed
package the commit it was built from. It must not know anything else about the package."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GENERATED = "rankmesh/_commit.txt"


class CommitHook(BuildHookInterface[Any]):
    """Writes the commit beside the code; an editable install asks git at run time instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable" or (root / "src" / GENERATED).exists():
            return  # the second case: an unpacked sdist, which carries the file already
        commit = _commit(root)
        if commit is None:
            return
        folder = tempfile.mkdtemp(prefix="rankmesh-build-")
        generated = Path(folder) / "commit.txt"
        generated.write_text(commit + "\n", encoding="ascii")
        prefix = "src/" if self.target_name == "sdist" else ""
        build_data["force_include"][str(generated)] = prefix + GENERATED


def _commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, `-dirty` when it has changes; None without one."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
