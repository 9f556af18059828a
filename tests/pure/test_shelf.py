"""Which checkpoints of a run are complete, which may go, what is left of dead runs. No torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.checkpoint.manifest import MANIFEST
from rankmesh.checkpoint.shelf import (
    complete,
    find_checkpoint,
    retire,
    shelf,
    step_folder,
    sweep,
    unfinished,
)
from rankmesh.errors import CheckpointError


def make(run_dir: Path, *steps: int) -> Path:
    """Folders that pass for complete checkpoints; returns the folder that they lie in."""
    for step in steps:
        step_folder(run_dir, step).mkdir(parents=True)
        (step_folder(run_dir, step) / MANIFEST).touch()
        (step_folder(run_dir, step) / "data").touch()
    return shelf(run_dir)


def steps_of(paths: list[Path]) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in paths]


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    """Numbers are compared, not names: after 99,999,999 steps a name has a digit more."""
    folder = make(tmp_path, 20, 100, 3, 123456789)
    assert steps_of(complete(folder)) == [3, 20, 100, 123456789]
    assert find_checkpoint(tmp_path) == step_folder(tmp_path, 123456789)
    assert find_checkpoint(step_folder(tmp_path, 3)) == step_folder(tmp_path, 3)
    (step_folder(tmp_path, 123456789) / MANIFEST).unlink()
    assert find_checkpoint(tmp_path) == step_folder(tmp_path, 100)


def test_where_there_is_none(tmp_path: Path) -> None:
    assert complete(tmp_path / "nowhere") == unfinished(tmp_path / "nowhere") == []
    assert sweep(tmp_path / "nowhere") == []
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"neither a checkpoint \(manifest.json\) nor a run"):
        find_checkpoint(tmp_path)
    shelf(tmp_path).mkdir()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)


def test_a_removal_that_was_cut_off_leaves_nothing_that_passes_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report K01, for removals: what is half gone is named and swept at the next start."""
    folder = make(tmp_path, 1, 2)

    def die(path: Path, ignore_errors: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", die)
        retire(folder, keep=1, keep_every=0)
    assert steps_of(complete(folder)) == [2]
    (line,) = sweep(folder)
    assert ".step-00000001.removed: no complete checkpoint, skipped and removed" in line
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


@given(
    steps=st.sets(st.integers(1, 40), min_size=1, max_size=12),
    keep=st.integers(0, 5),
    keep_every=st.integers(0, 6),
)
def test_retention(
    steps: set[int], keep: int, keep_every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The newest always stays; then the rule, read off its words."""
    run_dir = tmp_path_factory.mktemp("run")
    folder = make(run_dir, *steps)
    gone = steps_of(retire(folder, keep=keep, keep_every=keep_every))
    left = steps_of(complete(folder))
    assert sorted([*gone, *left]) == sorted(steps) and unfinished(folder) == []
    assert left[-1] == max(steps)
    newest = sorted(steps)[-keep:] if keep else sorted(steps)
    assert left == [s for s in sorted(steps) if s in newest or (keep_every and s % keep_every == 0)]
