"""From sections to the values that they stand for: a ModelSpec and a ParallelPlan.

Owns that step and the checks that need both sides. It knows no file, no torch and no process.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from rankmesh.config.fields import refuse
from rankmesh.config.model import ModelConfig
from rankmesh.config.schema import ParallelConfig, RunConfig
from rankmesh.errors import ConfigError
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.presets import names, preset
from rankmesh.topology.plan import ParallelPlan

_NOT_SPEC = ("preset", "init_from")
_NOT_PLAN = ("schedule_costs", "schedule_memory", "schedule_file", "bucket_mb")


def model_spec(config: ModelConfig, base: ModelSpec | None = None) -> ModelSpec:
    """The model that [model] describes: `base` or the preset, changed by the fields that are given.

    `base` is the spec of the folder that `model.init_from` names; reading that folder is the
    caller's part. Without a preset and a base the fields stand alone and the family fills in the
    rest. Raises ConfigError.
    """
    given: dict[str, Any] = {
        entry.name: getattr(config, entry.name)
        for entry in fields(config)
        if entry.name not in _NOT_SPEC
    }
    if config.rope_scaling is not None:
        scaling = asdict(config.rope_scaling)
        given["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    if base is not None:
        changed = {name: value for name, value in given.items() if value is not None}
        return make_spec(**{**base.to_dict(), **changed})
    if config.init_from is not None:
        raise ValueError("model.init_from is set: read the folder's spec and hand it in as `base`")
    if config.preset is not None:
        return preset(config.preset, **given)
    if config.family is None:
        raise ConfigError(
            "model: nothing says which model to train; set model.preset (one of "
            f"{', '.join(names())}), model.init_from, or model.family and its sizes"
        )
    return make_spec(**given)


def parallel_plan(config: ParallelConfig, world_size: int) -> ParallelPlan:
    """The plan of [parallel] for `world_size` ranks; dp follows from it where not given. Raises
    PlanError.
    """
    given = {
        entry.name: getattr(config, entry.name)
        for entry in fields(config)
        if entry.name not in _NOT_PLAN
    }
    return ParallelPlan.for_world(world_size, **given)


def world_size_of(config: ParallelConfig) -> int:
    """Ranks that [parallel] asks for, with dp 1 where it is not given."""
    return config.tp * config.cp * config.pp * (config.dp or 1)


def check_fits(config: RunConfig, spec: ModelSpec) -> None:
    """Refuse samples longer than the model can take. Raises ConfigError."""
    if config.data.seq_len > spec.max_seq_len:
        raise refuse(
            "data.seq_len",
            config.data.seq_len,
            f"at most model.max_seq_len, which is {spec.max_seq_len}",
        )
