"""The checkpoints of one run, side by side in one folder: which are complete, which is the newest,
which may go.

Owns their names and their removal. It reads no checkpoint and knows no torch. Only the run that
holds the lock of its run folder may remove anything.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from rankmesh.checkpoint.manifest import MANIFEST, STEP_FOLDER
from rankmesh.errors import CheckpointError, reason

CHECKPOINTS = "checkpoints"
_HIDDEN = re.compile(r"\.step-\d+\.(partial|removed)")


def shelf(run_dir: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run_dir / CHECKPOINTS


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` lies."""
    return shelf(run_dir) / f"step-{step:08d}"


def partial(folder: Path) -> Path:
    """Where a checkpoint is written until one rename makes it `folder`."""
    return folder.with_name(f".{folder.name}.partial")


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, by step; [] where there is no such folder."""
    if not folder.is_dir():
        return []
    found = [
        (int(match.group(1)), path)
        for path in folder.iterdir()
        if (match := STEP_FOLDER.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return [path for _, path in sorted(found)]


def find_checkpoint(path: Path) -> Path:
    """The folder of the checkpoint that `path` means: itself, or the newest complete one of a run.

    Raises CheckpointError in one line.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if (path / MANIFEST).is_file():
        return path
    if not shelf(path).is_dir():
        raise CheckpointError(
            f"{path}: neither a checkpoint ({MANIFEST}) nor a run ({CHECKPOINTS}/)"
        )
    found = complete(shelf(path))
    if not found:
        raise CheckpointError(f"{shelf(path)}: holds no complete checkpoint")
    return found[-1]


def unfinished(folder: Path) -> list[Path]:
    """What dead runs left in `folder`: saves and removals that were cut off, and folders named as
    checkpoints that are none."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if _HIDDEN.fullmatch(path.name)
        or (STEP_FOLDER.fullmatch(path.name) and not (path / MANIFEST).is_file())
    )


def sweep(folder: Path) -> list[str]:
    """Clear away what is no checkpoint before the first save; returns a line for each.

    What cut-off saves and removals left is removed. A folder with a checkpoint's own name is never
    removed: a commit is one rename, so that it was somebody else who made it what it is. It gets
    another name, for the run will need that one. Raises CheckpointError where it cannot.
    """
    return [
        f"{path}: no complete checkpoint, skipped and "
        + (_removed(path) if _HIDDEN.fullmatch(path.name) else _set_aside(path))
        for path in unfinished(folder)
    ]


def _removed(path: Path) -> str:
    shutil.rmtree(path, ignore_errors=True)
    return "left as it is" if path.exists() else "removed"


def _set_aside(path: Path) -> str:
    """Rename to NAME.incomplete, NAME.incomplete-2 and so on; returns what was done."""
    aside, number = path.with_name(f"{path.name}.incomplete"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.incomplete-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        raise CheckpointError(
            f"{path}: no complete checkpoint, and in the way of the save after that step; it "
            f"cannot be renamed to {aside.name}: {reason(error)}"
        ) from error
    return f"set aside as {aside.name}"


def retire(folder: Path, *, keep: int, keep_every: int) -> list[Path]:
    """Remove old checkpoints from `folder`; returns them. Called once a newer one is committed.

    Of the complete ones the newest `keep` stay (0: all), and those whose step is a multiple of
    `keep_every` (0: none); the newest always stays. A removal starts with a rename, so that what is
    being removed never passes for a checkpoint.
    """
    found = complete(folder)
    old = found[:-keep] if keep else []
    gone = []
    for path in old:
        step = int(path.name.partition("-")[2])
        if keep_every and step % keep_every == 0:
            continue
        doomed = path.with_name(f".{path.name}.removed")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        gone.append(path)
    return gone
