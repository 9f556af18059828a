"""Config: typed sections, read from TOML and overrides, and written back. It must not know
torch.
"""

from rankmesh.config.dump import dump
from rankmesh.config.explain import KeyInfo, explain, keys
from rankmesh.config.load import load_config
from rankmesh.config.model import ModelConfig
from rankmesh.config.resolve import check_fits, model_spec, parallel_plan, world_size_of
from rankmesh.config.schema import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    prefixes,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "KeyInfo",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "check_fits",
    "dump",
    "explain",
    "keys",
    "load_config",
    "model_spec",
    "parallel_plan",
    "prefixes",
    "world_size_of",
]
