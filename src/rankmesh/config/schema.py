"""The sections and keys of a config, each key with its default, its doc string and its rule.

Owns what can be configured and the checks between keys. It knows no file, no torch, and not what
the values are used for: the classes that use them are built in `train`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from rankmesh.config.fields import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    OneOf,
    Section,
    option,
    refuse,
)
from rankmesh.config.model import ModelConfig
from rankmesh.topology.plan import DENSE_AXES, SCHEDULES
from rankmesh.topology.recompute import CORE, MODES, NAMES

FORMAT_VERSION = 1

Entries = tuple[str | tuple[str, float], ...]

SPLITS = ("train", "valid", "test")

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """[parallel]: how the model and the batch are split over the ranks."""

    NAME: ClassVar[str] = "parallel"

    tp: int = option(1, "tensor parallel size", COUNT)
    cp: int = option(1, "context parallel size", COUNT)
    ep: int = option(1, "expert parallel size", COUNT)
    etp: int = option(1, "tensor parallel size of experts", COUNT)
    pp: int = option(1, "pipeline parallel size", COUNT)
    dp: int | None = option(None, "data parallel size; default: world size / (tp * cp * pp)", COUNT)
    num_chunks: int = option(1, "pipeline stages held by each rank", COUNT)
    schedule: str = option("1f1b", "pipeline schedule", OneOf(tuple(SCHEDULES)))
    schedule_costs: tuple[float, float, float, float] = option(
        (1.0, 1.0, 1.0, 0.0),
        "durations of F, I, W and a message, in any unit, where schedule_memory is set",
        NOT_NEGATIVE,
    )
    schedule_memory: float | None = option(
        None,
        "activations of one chunk that a rank may hold; zero-bubble schedules are arranged for it",
        POSITIVE,
    )
    schedule_file: str | None = option(
        None, "a schedule of your own; its stages stand where `schedule` places them"
    )
    layout: tuple[int, ...] | None = option(
        None, "layers of each pipeline stage, in order; default: balanced", NOT_NEGATIVE
    )
    sequence_parallel: bool = option(False, "split activations along the sequence inside tp groups")
    sequence_regather: bool = option(
        True, "keep only slices of the inputs of products, and gather them again in backward"
    )
    zero: int = option(
        0, "what is sharded over dp: 1 optimizer, 2 gradients, 3 weights", OneOf((0, 1, 2, 3))
    )
    zero_group: int | None = option(
        None, "ranks that share one set of shards; default: all dp * cp", COUNT
    )
    recompute: str = option(
        "none", "activations that are computed anew in backward; full = whole layers", OneOf(MODES)
    )
    recompute_modules: tuple[str, ...] = option(
        CORE, "what selective computes anew; core is attention between its products", OneOf(NAMES)
    )
    recompute_layers: int | tuple[int, ...] | None = option(
        None,
        "in the first so many layers of each chunk, or one number for each; default: all",
        NOT_NEGATIVE,
    )
    order: tuple[str, ...] = option(
        DENSE_AXES,
        "axes in the order in which ranks are laid out, fastest first",
        OneOf(DENSE_AXES),
    )
    bucket_mb: float = option(64.0, "gradients that are reduced together, in MiB", POSITIVE)

    def check(self) -> None:
        if sorted(self.order) != sorted(DENSE_AXES):
            raise refuse("parallel.order", self.order, f"{', '.join(DENSE_AXES)}, once each")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """[data]: token files, and how they become samples."""

    NAME: ClassVar[str] = "data"

    train: Entries = option(
        (),
        "prefixes of token files, read as one; or [prefix, weight] pairs, mixed by weight",
    )
    valid: Entries = option((), "the same for evaluation while training")
    test: Entries = option((), "the same for evaluation after training")
    split: str | tuple[float, ...] | None = option(
        None,
        "ratios of documents, such as 969,30,1, that cut data.train into train, valid and test",
    )
    seq_len: int = option(
        512, "tokens of a sample, without the one that only serves as last label", COUNT
    )
    tokenizer: str | None = option(
        None,
        '"bytes" or the path of a tokenizer.json; default: the one that prepared the token files',
    )
    any_tokenizer: bool = option(
        False, "whether token files, tokenizer and first weights may be of different tokenizers"
    )
    seed: int = option(0, "of the order of samples", NOT_NEGATIVE)

    def check(self) -> None:
        """Raises Refusal for weights or ratios that mean nothing, and for a split beside sets."""
        for name in SPLITS:
            _check_entries(f"{self.NAME}.{name}", getattr(self, name))
        if self.split is not None:
            split_ratios(self.split)
            if self.valid or self.test:
                raise refuse("data.split", self.split, "neither data.valid nor data.test beside it")


def _check_entries(key: str, entries: Entries) -> None:
    if any(weight <= 0 for weight in entry_weights(entries) or ()):
        raise refuse(key, entries, "weights above 0")


def prefixes(entries: Entries) -> tuple[str, ...]:
    """The prefixes of a key such as data.train, without their weights."""
    return tuple(entry if isinstance(entry, str) else entry[0] for entry in entries)


def entry_weights(entries: Entries) -> tuple[float, ...] | None:
    """The weights of a key such as data.train, 1 for a prefix alone; None where none is given."""
    if all(isinstance(entry, str) for entry in entries):
        return None
    return tuple(1.0 if isinstance(entry, str) else entry[1] for entry in entries)


def split_ratios(split: str | tuple[float, ...]) -> tuple[float, float, float]:
    """data.split as the ratios of train, valid and test, 0 where it has fewer. Raises Refusal."""
    expected = "one to three numbers of at least 0, the first above 0, such as 969,30,1"
    try:
        given = [float(part) for part in split.split(",")] if isinstance(split, str) else split
    except ValueError:
        raise refuse("data.split", split, expected) from None
    train, valid, test = (*given, 0.0, 0.0, 0.0)[:3]
    if len(given) > 3 or not all(0 <= ratio < math.inf for ratio in given) or not train:
        raise refuse("data.split", split, expected)
    return train, valid, test


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """[optimizer]: the update rule and its learning rate."""

    NAME: ClassVar[str] = "optimizer"

    name: str = option("adamw", "update rule", OneOf(("adamw", "sgd")))
    lr: float = option(3e-4, "highest learning rate", POSITIVE)
    min_lr: float = option(0.0, "learning rate that the schedule falls to", NOT_NEGATIVE)
    schedule: str = option(
        "cosine",
        "shape of the learning rate over the steps",
        OneOf(("cosine", "linear", "constant", "wsd", "inverse_sqrt")),
    )
    warmup_steps: int = option(0, "step i of these has lr * i / warmup_steps", NOT_NEGATIVE)
    decay_steps: int | None = option(
        None, "last step of the schedule; min_lr after it; default: train.steps", COUNT
    )
    wsd_decay_steps: int | None = option(
        None, "final steps of wsd in which lr falls; default: a tenth of decay_steps", NOT_NEGATIVE
    )
    betas: tuple[float, float] = option(
        (0.9, 0.95), "AdamW's averaging of gradient and square", FRACTION
    )
    eps: float = option(1e-8, "AdamW's addend to the root of the square", POSITIVE)
    weight_decay: float = option(
        0.1,
        "of matrices: AdamW shrinks them by lr * this a step, SGD adds it to the gradient",
        NOT_NEGATIVE,
    )
    momentum: float = option(0.0, "of SGD", FRACTION)
    clip_grad: float = option(1.0, "largest gradient norm; 0 = no clipping", NOT_NEGATIVE)
    decay_norms: bool = option(False, "weight decay on norm weights too")
    decay_biases: bool = option(False, "weight decay on biases too")
    decay_embeddings: bool = option(False, "weight decay on embeddings too")

    def check(self) -> None:
        if self.min_lr > self.lr:
            raise refuse(
                "optimizer.min_lr", self.min_lr, f"at most optimizer.lr, which is {self.lr}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """[train]: the run itself."""

    NAME: ClassVar[str] = "train"

    steps: int = option(1000, "optimizer updates", NOT_NEGATIVE)
    global_batch_size: int = option(32, "samples of one step, over all ranks", COUNT)
    microbatch_size: int = option(4, "samples that a replica computes at once", COUNT)
    dtype: str = option(
        "fp32",
        "of weights and activations; updates and sums of gradients are in fp32 or wider",
        OneOf(("fp32", "fp64", "bf16", "fp16")),
    )
    loss_scale: float = option(65536.0, "first loss scale of fp16", POSITIVE)
    loss_scale_window: int = option(
        1000, "steps without overflow after which the loss scale of fp16 is doubled", COUNT
    )
    seed: int = option(0, "of initial weights and dropout", NOT_NEGATIVE)
    check_replicas_every: int = option(
        0, "steps between comparisons of what replicas hold, bit for bit; 0 = never", NOT_NEGATIVE
    )
    eval_every: int = option(
        0, "steps between evaluations; 0 = after the last step only", NOT_NEGATIVE
    )
    eval_steps: int = option(
        20, "global batches of one evaluation, fewer where the set is smaller", COUNT
    )
    z_loss: float = option(
        0.0, "weight of the square of the log of the softmax denominator", NOT_NEGATIVE
    )
    label_smoothing: float = option(
        0.0, "share of the target that is spread over the vocabulary", FRACTION
    )
    device: str = option("auto", "auto = cuda where there is one", OneOf(("auto", "cpu", "cuda")))
    resume: str = option(
        "no",
        "auto = go on from the newest checkpoint in log.run_dir, if any; else a checkpoint's path",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """[checkpoint]: saved states of the run."""

    NAME: ClassVar[str] = "checkpoint"

    every: int = option(0, "steps between saves; 0 = after the last step only", NOT_NEGATIVE)
    keep: int = option(0, "newest checkpoints that are kept; 0 = all", NOT_NEGATIVE)
    keep_every: int = option(
        0, "those of steps that this divides are kept for good; 0 = none", NOT_NEGATIVE
    )

    def check(self) -> None:
        if self.keep_every and self.every and self.keep_every % self.every:
            raise refuse(
                f"{self.NAME}.keep_every",
                self.keep_every,
                f"a multiple of checkpoint.every, which is {self.every}",
            )


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """[log]: where a run writes and what it prints."""

    NAME: ClassVar[str] = "log"

    run_dir: str = option("runs/run", "folder of this run; a folder holds one run")
    every: int = option(1, "steps between printed lines; metrics.jsonl has every step", COUNT)
    trackers: tuple[str, ...] = option(
        (), "where the figures of each step go too; each is an extra to install", OneOf(TRACKERS)
    )
    trace: bool = option(False, "write what each rank does when, for `rankmesh trace`")
    trace_steps: tuple[int, int] | None = option(
        None, "first and last step that is traced; default: the first 20 of each start", COUNT
    )
    timeout_s: float = option(
        600.0, "seconds until a collective that does not end is an error", POSITIVE
    )
    debug: bool = option(
        False, "check every message between pipeline stages, not only those of the first step"
    )
    console: str = option(
        "auto", "auto = lines and a bar on a terminal, else lines", OneOf(("auto", "bar", "lines"))
    )

    def check(self) -> None:
        if self.trace_steps is not None and self.trace_steps[0] > self.trace_steps[1]:
            raise refuse("log.trace_steps", self.trace_steps, "the first step before the last")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a user can set for one run. Raises ConfigError where sections disagree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        optimizer, end = self.optimizer, self.decay_steps
        what = "optimizer.decay_steps" if optimizer.decay_steps is not None else "train.steps"
        if optimizer.warmup_steps > end:
            raise refuse(
                "optimizer.warmup_steps",
                optimizer.warmup_steps,
                f"at most {what}, which is {end}",
            )
        room = end - optimizer.warmup_steps
        if optimizer.schedule == "wsd" and (optimizer.wsd_decay_steps or 0) > room:
            raise refuse(
                "optimizer.wsd_decay_steps",
                optimizer.wsd_decay_steps,
                f"at most {room}: {what} is {end}, optimizer.warmup_steps {optimizer.warmup_steps}",
            )

    @property
    def decay_steps(self) -> int:
        """Last step of the learning-rate schedule."""
        given = self.optimizer.decay_steps
        return self.train.steps if given is None else given
