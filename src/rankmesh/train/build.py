"""From a config to what a run is made of, before any process group: model, plan, data, weights.

Owns every check that needs no peer, so that wrong input is refused before anything starts. It opens
files and reads no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rankmesh.checkpoint.manifest import Phases
from rankmesh.checkpoint.source import WeightSource, check_same_model, open_weights
from rankmesh.config.resolve import check_fits, model_spec, parallel_plan
from rankmesh.config.schema import SPLITS, RunConfig, entry_weights, prefixes, split_ratios
from rankmesh.data.agree import check_same_tokenizer, named, of_files
from rankmesh.data.indexed import TokenFile
from rankmesh.data.samples import Samples, TokenSource, check_vocab
from rankmesh.data.split import split_documents
from rankmesh.errors import ConfigError
from rankmesh.parallel.apply import Source
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import param_table
from rankmesh.topology.batch import BatchPlan
from rankmesh.topology.fit import check_tokens
from rankmesh.topology.params import ParamSpec, Slices
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.release import check_release
from rankmesh.train.resume import Resume, check_resume, find_resume
from rankmesh.train.run import fresh_values
from rankmesh.train.schedules import training_schedule


@dataclass(frozen=True)
class Job:
    """A checked config. `weights` is None for a model that starts from derived values; `resume` is
    None for a run that starts at step 1.
    """

    config: RunConfig
    spec: ModelSpec
    plan: ParallelPlan
    train: Samples
    valid: Samples | None
    test: Samples | None
    weights: WeightSource | None
    resume: Resume | None = None

    @property
    def source(self) -> Source:
        """Where parameters get their first values."""
        weights = self.weights
        if weights is None:
            return fresh_values(self.config.train.seed)

        def loaded(spec: ParamSpec, slices: Slices) -> Tensor:
            return weights.slice(spec.name, slices)

        return loaded

    @property
    def phases(self) -> Phases:
        """Weights of the training sets, each with the sample number from which they hold; () where
        the sets are read as one.
        """
        if self.resume is not None:
            return self.resume.phases
        return () if self.train.weights is None else ((0, self.train.weights),)

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer to save beside the weights: the config's, or the one that made the token
        files.
        """
        if self.config.data.tokenizer is not None:
            return self.config.data.tokenizer
        meta = self.train.files[0].meta
        return meta.tokenizer if meta is not None else None


def prepare_job(config: RunConfig, world_size: int) -> Job:
    """Check `config` for a world of `world_size` ranks. Raises UserError, in one line, where it
    cannot run.
    """
    resumed = find_resume(config)
    weights: WeightSource | None = resumed
    if resumed is None and config.model.init_from is not None:
        weights = open_weights(Path(config.model.init_from))
    named = config.model.init_from is not None
    spec = model_spec(config.model, weights.spec if weights is not None and named else None)
    if weights is not None and resumed is None:
        check_same_model(weights, spec)
    check_fits(config, spec)
    plan = parallel_plan(config.parallel, world_size)
    check_release(plan)
    batch = BatchPlan(config.train.global_batch_size, plan.dp, config.train.microbatch_size)
    training_schedule(config.parallel, plan, batch.num_microbatches)
    check_tokens(plan, batch.microbatch, config.data.seq_len)
    table = param_table(spec, plan)
    train = _samples(config, "train", spec)
    if train is None:
        raise ConfigError(
            "data.train is empty: name the prefix of a token file (see `rankmesh prepare --help`)"
        )
    valid, test = (_samples(config, split, spec) for split in ("valid", "test"))
    _check_tokenizers(config, weights, [train, valid, test])
    resume = None
    if resumed is not None:
        resume = check_resume(resumed, config, spec, table, train)
    return Job(
        config=config,
        spec=spec,
        plan=plan,
        train=train,
        valid=valid,
        test=test,
        weights=weights,
        resume=resume,
    )


def _check_tokenizers(
    config: RunConfig, weights: WeightSource | None, sets: Sequence[Samples | None]
) -> None:
    """Refuse ids that mean one thing in one place and another elsewhere, as far as it is known."""
    found = named("data.tokenizer", config.data.tokenizer)
    if config.data.any_tokenizer:
        return
    if weights is not None:
        found += named(str(weights.folder), weights.tokenizer)
    for samples in sets:
        found += of_files(samples.files) if samples is not None else []
    check_same_tokenizer(found, "if that is meant, set data.any_tokenizer=true")


def _samples(config: RunConfig, split: str, spec: ModelSpec) -> Samples | None:
    data = config.data
    entries = data.train if data.split is not None else getattr(data, split)
    opened = [TokenFile(Path(prefix)) for prefix in prefixes(entries)]
    files: list[TokenSource] = [*opened]
    if data.split is not None:
        ratios = split_ratios(data.split)
        part = SPLITS.index(split)
        # A part of ratio 0 is a set that was not asked for.
        files = [split_documents(file, ratios)[part] for file in opened if ratios[part]]
    if not files:
        return None
    check_vocab(files, spec.vocab_size)
    return Samples(files, data.seq_len, spec.vocab_size, entry_weights(entries))
