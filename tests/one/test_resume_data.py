"""Which samples a resumed run is fed: across epochs, with other batches, sets and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankmesh.checkpoint.manifest import read_manifest
from rankmesh.checkpoint.shelf import step_folder
from rankmesh.data.loader import Loader, Microbatch
from rankmesh.data.order import SampleOrder
from rankmesh.errors import CheckpointError
from tests import runs


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def fed(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    """Let `taken` have the index of every sample that training reads, in order."""
    plain = Loader.at

    def at(self: Loader, consumed: int) -> list[Microbatch]:
        batches = plain(self, consumed)
        numbers = [int(k) for batch in batches for k in batch.samples if k >= 0]
        taken.extend(self.order.index(number) for number in numbers)
        return batches

    monkeypatch.setattr(Loader, "at", at)


def test_the_order_of_samples_across_epochs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report K07: 2.5 epochs straight; then stops at 0.4, 1.0, 1.3 and 2.0 epochs."""
    changes = ["train.global_batch_size=4", "data.valid=[]", "optimizer.schedule=constant"]
    straight: list[int] = []
    broken: list[int] = []
    with monkeypatch.context() as patch:
        fed(patch, straight)
        runs.go(config, "straight", 25, changes)
    with monkeypatch.context() as patch:
        fed(patch, broken)
        for steps in (4, 10, 13, 20, 25):
            runs.go(config, "broken", steps, changes)
    assert broken == straight and len(straight) == 100
    assert sorted(straight[:40]) == sorted(straight[40:80]) == list(range(40))
    assert straight[:40] != straight[40:80]


def test_another_batch_size_goes_on_where_samples_ended(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample is skipped and none repeats; the change is told."""
    straight: list[int] = []
    broken: list[int] = []
    with monkeypatch.context() as patch:
        fed(patch, straight)
        runs.go(config, "straight", 6, ["data.valid=[]"])
    with monkeypatch.context() as patch:
        fed(patch, broken)
        runs.go(config, "broken", 2, ["data.valid=[]"])
        folder = runs.go(config, "broken", 8, ["data.valid=[]", "train.global_batch_size=4"])
    assert broken == straight
    assert "train.global_batch_size: 6 -> 4" in runs.said(folder)


def test_other_data_is_told(config: Path) -> None:
    """A set prepared anew or another one: the order changes. A set moved elsewhere keeps its order.

    The same sets in another order would repeat samples behind the user's back: refused.
    """
    other = runs.token_file(config.parent / "other", 30 * runs.SEQ_LEN + 1, seed=7)
    own = config.parent / "train"
    runs.go(config, "run", 2, [f'data.train=["{own}", "{other}"]', "data.valid=[]"])
    with pytest.raises(CheckpointError, match="data.train names the same sets in another way"):
        runs.go(config, "run", 3, [f'data.train=["{other}", "{own}"]', "data.valid=[]"])
    folder = runs.go(config, "run", 3, ["data.valid=[]"])
    assert (
        "order of samples is another one from here on (sets of 40, 30 samples, now 40"
        in runs.said(folder)
    )
    moved = runs.token_file(config.parent / "moved", 40 * runs.SEQ_LEN + 1, seed=1)
    folder = runs.go(config, "moved", 2, ["data.valid=[]"])
    runs.go(config, "moved", 3, [f'data.train=["{moved}"]', "data.valid=[]"])
    assert "data.train: " in runs.said(folder) and "order of samples" not in runs.said(folder)
    runs.go(config, "moved", 4, [f'data.train=["{moved}"]', "data.valid=[]", "data.seed=1"])
    assert "order of samples is another one" in runs.said(folder)


def test_other_weights_go_on_in_each_set(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report X05: 1:1, then 2:1, then stopped once more: each set continues at its own next
    unread sample, and the resumes see what an unbroken order with both phases would.
    """
    other = runs.token_file(config.parent / "other", 30 * runs.SEQ_LEN + 1, seed=7)
    own = config.parent / "train"
    taken: list[int] = []
    with monkeypatch.context() as patch:
        fed(patch, taken)
        for steps, weight in ((3, 1), (5, 2), (7, 2)):
            sets = f'data.train=[["{own}", {weight}], ["{other}", 1]]'
            folder = runs.go(config, "run", steps, [sets, "data.valid=[]"])
    assert len(taken) == 42 and len(set(taken)) == 42
    first = [sum(index < 40 for index in taken[low:high]) for low, high in ((0, 18), (18, 42))]
    assert first == [9, 16]
    orders = [SampleOrder(0, size, source) for source, size in enumerate((40, 30))]
    assert [k for k in taken if k < 40] == [orders[0].index(k) for k in range(25)]
    assert [k - 40 for k in taken if k >= 40] == [orders[1].index(k) for k in range(17)]
    assert "weights of data.train change at sample 18" in runs.said(folder)
    training = read_manifest(step_folder(folder, 7)).training
    assert training is not None and training.phases == ((0, (1.0, 1.0)), (18, (2.0, 1.0)))
