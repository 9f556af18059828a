"""Owns what this installation calls itself: package version, commit, and torch's version.

It must not import torch, and importing it starts no process.
"""

import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["__version__", "commit", "describe", "torch_version"]

_PACKAGE = Path(__file__).resolve().parent


def _installed(package: str, otherwise: str) -> str:
    """The version in the package's metadata; `otherwise` where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return otherwise


# Source that runs without being installed (a bare PYTHONPATH) has no version to read.
__version__ = _installed("rankmesh", "0+source")


def commit() -> str:
    """The commit of this code: written at build time, else asked of git in a checkout of ours.

    Ends in `-dirty` where a checkout has changes; "unknown" where nothing can tell.
    """
    generated = _PACKAGE / "_commit.txt"
    if generated.exists():
        return generated.read_text(encoding="ascii").strip()
    root = _PACKAGE.parent.parent
    # Without the first check an installed copy would report the commit of whatever repository
    # its environment happens to lie in.
    if not (root / "src" / "rankmesh").exists() or not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def torch_version() -> str:
    """The version of the installed torch, read from its metadata; "missing" without one."""
    return _installed("torch", "missing")


def describe() -> str:
    """One line: package version, commit, torch's version."""
    return f"rankmesh {__version__} (commit {commit()}, torch {torch_version()})"
