"""Stopping and going on, on one rank: what comes back, what may have changed, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rankmesh.checkpoint.manifest import read_manifest, state_name
from rankmesh.checkpoint.shelf import complete, shelf, step_folder
from rankmesh.errors import CheckpointError, ConfigError, UserError
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import metrics_path, read_launches, read_status
from rankmesh.optim.schedule import LrSchedule
from rankmesh.train import build
from rankmesh.train import run as run_module
from rankmesh.train.state import restore_optimizer
from tests import runs
from tests.checkpoints import edit

# A schedule whose end does not move with `train.steps`; dropout, clipping and decay all act.
SCHEDULE = ["optimizer.schedule=cosine", "optimizer.decay_steps=20", "optimizer.warmup_steps=3"]
EVERYTHING = [*SCHEDULE, "model.dropout=0.1", "optimizer.clip_grad=0.5", "data.valid=[]"]
AUTO = "train.resume=auto"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_stopped_run_ends_as_an_unbroken_one(config: Path, optimizer: str) -> None:
    """Field reports K03 and L02: 20 steps straight against stops at 7 and 13.

    Losses, norms and rates of every step, then weights, moments and step counts, bit for bit.
    """
    changes = [*EVERYTHING, f"optimizer.name={optimizer}", "optimizer.momentum=0.9"]
    straight = runs.go(config, "straight", 20, changes)
    for steps in (7, 13, 20):
        broken = runs.go(config, "broken", steps, changes)
    for name in ("loss", "grad_norm", "lr"):
        assert runs.figures(broken, name) == runs.figures(straight, name)
    one, other = (runs.contents(step_folder(folder, 20)) for folder in (straight, broken))
    assert one == other
    kinds = {"adamw": ("m", "v", "step"), "sgd": ("u",)}[optimizer]
    assert all(state_name("layers.1.mlp.up.weight", kind) in one for kind in kinds)


def test_plain_numbers_come_back(config: Path) -> None:
    """Field report K04: step and consumed samples, and the config that they were made with."""
    folder = runs.go(config, "run", 3)
    manifest = read_manifest(step_folder(folder, 3))
    assert manifest.training is not None
    assert (manifest.step, manifest.training.samples, manifest.training.sizes) == (3, 18, (40,))
    assert manifest.training.config["train"]["global_batch_size"] == 6
    job = build.prepare_job(runs.load_config(config, [f"log.run_dir={folder}", AUTO]), 1)
    assert job.resume is not None and (job.resume.step, job.resume.samples) == (3, 18)


@pytest.mark.parametrize(
    ("layers", "words", "others"),
    [(1, "no place in the model", "layers.1."), (3, "are missing", "layers.2.")],
)
def test_another_depth_is_refused(config: Path, layers: int, words: str, others: str) -> None:
    """Field report K04: every tensor of weights and optimizer that does not fit is listed."""
    folder = runs.go(config, "run", 2)
    with pytest.raises(CheckpointError) as caught:
        runs.go(config, "run", 4, [f"model.num_layers={layers}"])
    names = [f"{others}{part}" for part in ("attn.q.weight", "attn_norm.weight", "mlp.down.weight")]
    text = str(caught.value)
    assert f"36 tensors {'have ' if 'place' in words else ''}{words}" in text
    assert all(name in text for name in names)
    assert all(state_name(name, kind) in text for name in names for kind in ("m", "v", "step"))
    assert str(step_folder(folder, 2)) in text and "\n" not in text


def test_other_shapes_and_other_models_are_refused(config: Path) -> None:
    """Shapes are listed; where they agree, the numbers that cut them into heads must too."""
    runs.go(config, "run", 2)
    with pytest.raises(CheckpointError, match=r"another shape: .*mlp.gate.weight \(shape \(37, 24"):
        runs.go(config, "run", 4, ["model.ffn_size=38"])
    with pytest.raises(CheckpointError, match=r"another model \(model.num_heads: 4 -> 2\)"):
        runs.go(
            config, "run", 4, ["model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=12"]
        )
    runs.go(config, "run", 3, ["model.dropout=0.1"])
    assert "model.dropout: 0.0 -> 0.1" in runs.said(config.parent / "run")


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tensors"].pop(name)


def copy_as(name: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tensors"].update({new: content["tensors"][name]})


def test_optimizer_state_must_be_whole(config: Path) -> None:
    """Field report K03: a moment that is not there, or one that nobody asks for, is an error."""
    folder = step_folder(runs.go(config, "run", 2), 2)
    moment = state_name("norm.weight", "m")
    whole = (folder / "manifest.json").read_text()
    edit(folder, drop(moment))
    with pytest.raises(CheckpointError, match=f"1 tensor is missing: {moment}"):
        runs.go(config, "run", 4)
    (folder / "manifest.json").write_text(whole)
    edit(folder, copy_as(moment, state_name("norm.weight", "w")))
    with pytest.raises(CheckpointError, match=r"no place in the model: optimizer/norm\.weight\.w"):
        runs.go(config, "run", 4)
    (folder / "manifest.json").write_text(whole)
    with pytest.raises(CheckpointError, match="trained with adamw, optimizer.name is sgd"):
        runs.go(config, "run", 4, ["optimizer.name=sgd"])


def freeze(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Parameters under `prefix` are not trained."""
    plain = run_module.param_table

    def table(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        specs = (
            replace(spec, trainable=not (prefix and spec.name.startswith(prefix))) for spec in made
        )
        return replace(made, specs=tuple(specs))

    for module in (build, run_module):
        monkeypatch.setattr(module, "param_table", table)


def test_frozen_parameters(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report K06: half the layers frozen, 3 steps and 3 more: as 6. Then they are thawed.

    What was frozen has no state and starts from zero; the others keep theirs.
    """
    changes = ["optimizer.decay_steps=6", "data.valid=[]"]
    with monkeypatch.context() as patch:
        freeze(patch, "layers.0.")
        straight = runs.go(config, "straight", 6, changes)
        for steps in (3, 6):
            broken = runs.go(config, "broken", steps, changes)
    one, other = (runs.contents(step_folder(folder, 6)) for folder in (straight, broken))
    assert one == other
    assert not any(name.startswith("optimizer/layers.0.") for name in one)
    training = read_manifest(step_folder(broken, 6)).training
    assert training is not None and len(training.frozen) == 9
    run, job = runs.single_run(config, [*changes, "train.steps=8", f"log.run_dir={broken}", AUTO])
    assert job.resume is not None and "fresh optimizer state: layers.0." in job.resume.notes[0]
    restore_optimizer(run, job.resume.weights)
    state = run.optimizer.state()
    assert not any(bool(state[f"layers.0.mlp.up.weight.{kind}"].any()) for kind in ("m", "step"))
    assert state["layers.1.mlp.up.weight.step"] == 6
    saved = job.resume.weights.slice(state_name("norm.weight", "m"), (slice(0, 24),))
    assert torch.equal(state["norm.weight.m"], saved) and bool(saved.any())
    thawed = runs.go(config, "broken", 8, changes)
    with monkeypatch.context() as patch:
        freeze(patch, "layers.1.")
        runs.go(config, "broken", 9, changes)
    assert "optimizer state left behind: layers.1." in runs.said(thawed)


def test_the_schedule_is_this_config_s(config: Path) -> None:
    """Field report L01: constant 6e-4, then cosine from 6e-4 to 6e-5, said in a line.

    Resumed unchanged, the old formula goes on, and nothing is said of it.
    """
    old = ["optimizer.lr=6e-4", "optimizer.schedule=constant", "data.valid=[]"]
    new = ["optimizer.lr=6e-4", "optimizer.min_lr=6e-5", "data.valid=[]"]
    new += ["optimizer.schedule=cosine", "optimizer.decay_steps=12"]
    folder = runs.go(config, "changed", 5, [*old, "optimizer.decay_steps=10"])
    runs.go(config, "changed", 12, new)
    formula = LrSchedule(kind="cosine", lr=6e-4, min_lr=6e-5, decay_steps=12)
    rates = runs.figures(folder, "lr")
    assert [rates[step] for step in range(1, 6)] == [6e-4] * 5
    assert [rates[step] for step in range(6, 13)] == [formula.at(step) for step in range(6, 13)]
    text = runs.said(folder)
    assert "WARNING resume: optimizer.schedule: constant -> cosine" in text
    assert "the learning rate follows this config's schedule from step 6 on" in text
    same = runs.go(config, "same", 5, [*old, "optimizer.decay_steps=10"])
    runs.go(config, "same", 8, [*old, "optimizer.decay_steps=10"])
    assert set(runs.figures(same, "lr").values()) == {6e-4}
    assert "this config's schedule" not in runs.said(same)


def test_weights_alone_start_a_new_run(config: Path) -> None:
    """Field report L02: from `model.init_from` the rate begins at step 1, and moments at zero."""
    folder = runs.go(config, "run", 5, SCHEDULE)
    changes = [f"model.init_from={step_folder(folder, 5)}", "model.family=none", *SCHEDULE]
    new = runs.go(config, "new", 3, changes, resume="no")
    rates = runs.figures(folder, "lr")
    assert runs.figures(new, "lr") == {step: rates[step] for step in (1, 2, 3)}
    training = read_manifest(step_folder(new, 3)).training
    assert training is not None and training.samples == 18


def test_a_resume_adds_an_attempt(config: Path) -> None:
    """Nothing that is there is written again: config, launches, metrics, checkpoints."""
    folder = runs.go(config, "run", 2, ["checkpoint.every=1"])
    kept = [folder / "config.toml", *step_folder(folder, 1).iterdir()]
    kept += [*step_folder(folder, 2).iterdir()]
    before = {path: path.read_bytes() for path in kept}
    metrics, first = metrics_path(folder).read_bytes(), read_launches(folder)
    runs.go(config, "run", 4, ["checkpoint.every=1"])
    runs.go(config, "run", 4, ["checkpoint.every=1"])
    assert {path: path.read_bytes() for path in kept} == before
    assert metrics_path(folder).read_bytes().startswith(metrics)
    launches = read_launches(folder)
    assert launches[:1] == first
    assert [launch["attempt"] for launch in launches] == [1, 2, 3]
    assert [launch["first_step"] for launch in launches] == [1, 3, 5]
    assert [launch["config"] for launch in launches] == ["config.toml", *["config-2.toml"] * 2]
    assert launches[0]["resumed_from"] is None
    assert launches[1]["resumed_from"] == str(step_folder(folder, 2))
    steps = [
        (record["step"], record.get("attempt", 1)) for record in read_metrics(metrics_path(folder))
    ]
    assert steps == [(1, 1), (2, 1), (3, 2), (4, 2)]
    status = read_status(folder)
    assert (status["state"], status["step"], status["total_steps"]) == ("done", 4, 4)


def test_a_finished_run_has_nothing_left_to_do(config: Path) -> None:
    """Started again, as a scheduler may do, it ends well and writes no checkpoint."""
    folder = runs.go(config, "run", 2)
    before = {path: path.stat().st_mtime_ns for path in shelf(folder).rglob("*")}
    result = runs.train_alone(config, [f"log.run_dir={folder}", "train.steps=2", AUTO])
    assert result.losses == () and result.valid_loss is not None
    assert result.checkpoint == step_folder(folder, 2)
    assert {path: path.stat().st_mtime_ns for path in shelf(folder).rglob("*")} == before
    with pytest.raises(ConfigError, match="train.steps = 1: expected at least 2, the steps that"):
        runs.go(config, "run", 1)


def test_auto_without_a_checkpoint_starts_afresh(config: Path) -> None:
    """In a new folder, and in that of a run that died before its first save."""
    folder = runs.go(config, "run", 2)
    for path in complete(shelf(folder)):
        path.rename(path.with_name(f".{path.name}.partial"))
    runs.go(config, "run", 3)
    assert [record["step"] for record in read_metrics(metrics_path(folder))] == [1, 2, 1, 2, 3]
    assert runs.figures(folder, "loss").keys() == {1, 2, 3}
    assert read_launches(folder)[1]["first_step"] == 1
    with pytest.raises(UserError, match="holds a run that is done; train.resume=auto goes on"):
        runs.go(config, "run", 5, resume="no")


def test_a_path_branches_off(config: Path) -> None:
    """Another run's checkpoint starts this one's; within one run only the newest can go on."""
    folder = runs.go(config, "run", 4, ["checkpoint.every=2", *SCHEDULE])
    older, newest = step_folder(folder, 2), step_folder(folder, 4)
    branch = runs.go(config, "branch", 4, SCHEDULE, resume=str(older))
    assert [record["step"] for record in read_metrics(metrics_path(branch))] == [3, 4]
    assert runs.contents(step_folder(branch, 4)) == runs.contents(newest)
    with pytest.raises(CheckpointError, match=r"older than step-00000004 of the same run"):
        runs.go(config, "run", 6, SCHEDULE, resume=str(older))
    runs.go(config, "run", 5, SCHEDULE, resume=str(newest))
    runs.go(config, "run", 6, SCHEDULE, resume=str(folder))
    with pytest.raises(UserError, match="holds a run that is done"):
        runs.go(config, "branch", 8, SCHEDULE, resume=str(folder))
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        runs.go(config, "x", 8, SCHEDULE, resume=str(folder / "nowhere"))


def test_weights_alone_cannot_be_resumed(config: Path) -> None:
    folder = step_folder(runs.go(config, "run", 2), 2)
    edit(folder, lambda content: content.update(training=None))
    with pytest.raises(CheckpointError, match=r"holds weights alone; model.init_from starts a new"):
        runs.go(config, "run", 3)


def test_retention_in_a_run(config: Path) -> None:
    """The newest two, and every fourth for good; what was removed is said."""
    changes = ["checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=4"]
    folder = runs.go(config, "run", 11, changes)
    names = [f"step-{step:08d}" for step in (4, 8, 10, 11)]
    assert sorted(path.name for path in shelf(folder).iterdir()) == names
    assert "removed step-00000009" in runs.said(folder)
    with pytest.raises(ConfigError, match=r"keep_every = 3: expected a multiple of checkpoint.eve"):
        runs.load_config(config, ["checkpoint.every=2", "checkpoint.keep_every=3"])


def test_what_dead_runs_left_is_named_and_removed(config: Path) -> None:
    """Only what has a temporary name is removed."""
    folder = runs.go(config, "run", 2)
    cut, doomed = (shelf(folder) / f".step-0000000{n}" for n in (3, 1))
    (cut.with_name(f"{cut.name}.partial")).mkdir()
    (doomed.with_name(f"{doomed.name}.removed")).mkdir()
    (shelf(folder) / "notes").mkdir()
    runs.go(config, "run", 3)
    text = runs.said(folder)
    for name in (".step-00000003.partial", ".step-00000001.removed"):
        assert f"{name}: no complete checkpoint, skipped and removed" in text
    left = {path.name for path in shelf(folder).iterdir()}
    assert left == {"step-00000002", "step-00000003", "notes"}


def test_a_folder_in_the_way_of_a_save_is_set_aside(config: Path) -> None:
    """A checkpoint that lost its manifest costs neither the steps since the one before nor its own
    files."""
    folder = runs.go(config, "run", 4, ["checkpoint.every=2"])
    (step_folder(folder, 4) / "manifest.json").unlink()
    (shelf(folder) / "step-00000004.incomplete").mkdir()
    runs.go(config, "run", 4)
    assert "set aside as step-00000004.incomplete-2" in runs.said(folder)
    assert [path.name for path in complete(shelf(folder))] == ["step-00000002", "step-00000004"]
    assert (shelf(folder) / "step-00000004.incomplete-2" / "data-00000.safetensors").is_file()


@pytest.mark.parametrize("damage", ["manifest", "data"])
def test_a_damaged_checkpoint_names_the_one_before(config: Path, damage: str) -> None:
    """Refused in one line, with what to do; done so, the run goes on from the older one."""
    folder = runs.go(config, "run", 4, ["checkpoint.every=2"])
    newest = step_folder(folder, 4)
    if damage == "manifest":
        (newest / "manifest.json").write_text("{")
    else:
        data = newest / "data-00000.safetensors"
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        runs.go(config, "run", 6)
    text = str(caught.value)
    assert "step-00000002 beside it is complete: to go on from there, move step-00000004" in text
    newest.rename(config.parent / "damaged")
    runs.go(config, "run", 6)
    assert "resumes after step 2" in runs.said(folder)


def test_the_manifest_is_json_that_others_can_read(config: Path) -> None:
    """Names of logical tensors, and no trace of a mesh in them."""
    content = json.loads((step_folder(runs.go(config, "run", 1), 1) / "manifest.json").read_text())
    assert (content["format"], content["format_version"]) == ("rankmesh checkpoint", 1)
    names = [name for name in content["tensors"] if "layers.0.attn.q" in name]
    assert names == [
        "layers.0.attn.q.weight",
        *(state_name("layers.0.attn.q.weight", kind) for kind in ("m", "step", "v")),
    ]
    assert content["training"]["config"]["optimizer"]["name"] == "adamw"
