"""From which checkpoint a run goes on, whether it may, and what has changed since.

Owns `train.resume` and the comparison of configs. It reads manifests and no tensor; putting state
back is state.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmesh.checkpoint.manifest import Phases, Training, compare, model_shapes, state_name
from rankmesh.checkpoint.shelf import complete, find_checkpoint, shelf
from rankmesh.checkpoint.weights import Weights
from rankmesh.config.schema import RunConfig
from rankmesh.data.samples import Samples
from rankmesh.errors import CheckpointError, ConfigError
from rankmesh.specs.model import ModelSpec
from rankmesh.topology.params import ParamTable
from rankmesh.train.state import plain_config, state_kinds, state_shapes

NO, AUTO = "no", "auto"

# Of a model's fields these change no tensor's meaning, or are stretched on purpose.
_FREE_FIELDS = {
    "dropout", "attention_dropout", "init_std", "scale_residual_init", "max_seq_len", "rope_theta",
    "rope_local_theta", "rope_scaling",
}  # fmt: skip
# Keys that say nothing of what is computed.
_SILENT = ("log.", "checkpoint.", "train.resume", "format_version")
# The model is compared as what it is, not as what the config says of it.
_ELSEWHERE = ("model.",)
# Of [data] these do not touch the order of training samples.
_NO_ORDER = {"valid", "test", "tokenizer", "any_tokenizer"}
_SCHEDULE = {"lr", "min_lr", "schedule", "warmup_steps", "decay_steps", "wsd_decay_steps"}


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from. phases: weights of the data sets by sample number. notes: a line
    for each thing that is not as it was.
    """

    weights: Weights
    training: Training
    phases: Phases
    notes: tuple[str, ...]

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self.weights.step

    @property
    def samples(self) -> int:
        """Samples consumed until then."""
        return self.training.samples


def find_resume(config: RunConfig) -> Weights | None:
    """The checkpoint that `train.resume` means; None for a fresh start.

    Raises CheckpointError, in one line, where it cannot be read, holds weights alone, or is not the
    newest of this very run.
    """
    asked, own = config.train.resume, shelf(Path(config.log.run_dir))
    if asked == NO:
        return None
    found = complete(own)
    if asked == AUTO and not found:
        return None
    folder = found[-1] if asked == AUTO else find_checkpoint(Path(asked))
    with older_named(folder):
        weights = Weights(folder)
    if weights.manifest.training is None:
        raise CheckpointError(
            f"train.resume: {weights.folder} holds weights alone; model.init_from starts a new run "
            "from them"
        )
    if found and _same(weights.folder.parent, own) and not _same(weights.folder, found[-1]):
        raise CheckpointError(
            f"train.resume: {weights.folder} is older than {found[-1].name} of the same run, which "
            "is never rewritten; choose another log.run_dir to branch off there"
        )
    return weights


@contextlib.contextmanager
def older_named(folder: Path) -> Iterator[None]:
    """While the checkpoint `folder` is read: a CheckpointError also says how to take an older one.

    None is taken unasked: steps would be lost without a word, and a damaged disk go unnoticed.
    """
    try:
        yield
    except CheckpointError as error:
        beside = complete(folder.parent)
        older = beside[: beside.index(folder)] if folder in beside else []
        if not older:
            raise
        raise CheckpointError(
            f"{error}; {older[-1].name} beside it is complete: to go on from there, move "
            f"{folder.name} to another place"
        ) from error


def may_reuse(config: RunConfig) -> bool:
    """Whether the run folder may be one that has been used: by this run, which goes on."""
    asked, own = config.train.resume, shelf(Path(config.log.run_dir))
    if asked in (NO, AUTO):
        return asked == AUTO
    return _same(find_checkpoint(Path(asked)).parent, own)


def check_resume(
    weights: Weights, config: RunConfig, spec: ModelSpec, table: ParamTable, train: Samples
) -> Resume:
    """Compare a checkpoint with the run that is to go on from it, on the samples `train`.

    Raises CheckpointError listing every tensor that is missing, has no place or has another shape;
    CheckpointError or ConfigError for another model, another optimizer, fewer steps than are done,
    or the same data sets in another order.
    """
    training = weights.manifest.training
    assert training is not None
    where = f"train.resume: {weights.folder}"
    notes = [*_check_tensors(where, weights, training, config, table)]
    notes += _check_model(where, weights.spec, spec)
    if config.train.steps < weights.step:
        raise ConfigError(
            f"train.steps = {config.train.steps}: expected at least {weights.step}, the steps that "
            f"{weights.folder} has done"
        )
    notes += _check_config(training.config, config, weights.step)
    phases, about_data = _check_data(where, training, config, train)
    return Resume(weights, training, phases, (*notes, *about_data))


def _check_tensors(
    where: str, weights: Weights, then: Training, config: RunConfig, table: ParamTable
) -> Iterator[str]:
    """All tensors of model and optimizer, in one comparison; yields what starts anew or is left."""
    if then.optimizer != config.optimizer.name:
        raise CheckpointError(
            f"{where} was trained with {then.optimizer}, optimizer.name is "
            f"{config.optimizer.name}; model.init_from takes the weights alone"
        )
    trained = {spec.name: spec.shape for spec in table if spec.trainable}
    both = {name: shape for name, shape in trained.items() if name not in then.frozen}
    thawed = [name for name in trained if name in then.frozen]
    kinds = state_kinds(config.optimizer)
    # State of what was trained and is no longer.
    known = set(model_shapes(weights.spec)) - set(then.frozen)
    left = [spec.name for spec in table if not spec.trainable and spec.name in known]
    unused = {state_name(name, kind) for name in left for kind in kinds}
    held = {
        name: entry.shape for name, entry in weights.manifest.tensors.items() if name not in unused
    }
    needed = {spec.name: spec.shape for spec in table} | state_shapes(config.optimizer, both)
    compare(where, held, needed)
    if thawed and kinds:
        yield f"trained from now on, with fresh optimizer state: {', '.join(thawed)}"
    if left and kinds:
        yield f"no longer trained, optimizer state left behind: {', '.join(left)}"


def _check_model(where: str, then: ModelSpec, now: ModelSpec) -> Iterator[str]:
    """Fields of equal shapes that mean another model are refused; yields the free ones that
    changed."""
    before, after = then.to_dict(), now.to_dict()
    changed = [name for name in after if before[name] != after[name]]
    for name in changed:
        text = f"model.{name}: {before[name]} -> {after[name]}"
        if name not in _FREE_FIELDS:
            raise CheckpointError(f"{where} holds another model ({text})")
        yield text


def _check_config(then: Mapping[str, Any], config: RunConfig, step: int) -> Iterator[str]:
    """Yields a line for each key that differs, and what that means for the learning rate."""
    before, after = dict(_flat(then)), dict(_flat(plain_config(config)))
    changed = [
        key
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not key.startswith((*_SILENT, *_ELSEWHERE))
    ]
    for key in changed:
        yield f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
    moved = {key for key in changed if key.removeprefix("optimizer.") in _SCHEDULE}
    if moved or ("train.steps" in changed and config.optimizer.decay_steps is None):
        yield f"the learning rate follows this config's schedule from step {step + 1} on"


def _check_data(
    where: str, then: Training, config: RunConfig, train: Samples
) -> tuple[Phases, list[str]]:
    """The weights of the data sets by sample number, and lines about another order of samples.

    The same sets in other weights go on, each at its own next sample; in another order they would
    repeat some and skip others, and are refused.
    """
    before, after = then.config["data"], plain_config(config)["data"]
    fresh: Phases = () if train.weights is None else ((0, train.weights),)
    one, two = _sets(before), _sets(after)
    alike = bool(then.phases) == bool(fresh)
    if sorted(one) == sorted(two) and not (one == two and alike):
        raise CheckpointError(
            f"{where}: data.train names the same sets in another way, in which some samples would "
            "repeat and others be skipped; only weights may change"
        )
    others = {key for key in {**before, **after} if before.get(key) != after.get(key)}
    # Sets that only lie elsewhere now have their sizes, and with them their order.
    if then.sizes != train.sizes or not alike or others - {"train", *_NO_ORDER}:
        told = f"sets of {_sizes(then.sizes)} samples, now {_sizes(train.sizes)}"
        return fresh, [
            f"the order of samples is another one from here on ({told}): some may repeat"
        ]
    if not fresh or then.phases[-1][1] == train.weights:
        return then.phases, []
    earlier = tuple(phase for phase in then.phases if phase[0] < then.samples)
    note = f"weights of data.train change at sample {then.samples}; each set goes on at its next"
    return (*earlier, (then.samples, fresh[0][1])), [note]


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "(not given)"


def _sets(data: Mapping[str, Any]) -> list[str]:
    """The prefixes in data.train, without weights."""
    return [entry if isinstance(entry, str) else entry[0] for entry in data["train"]]


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
