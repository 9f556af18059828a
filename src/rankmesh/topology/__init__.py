"""The control plane as integers: plans, ranks, groups, hosts, splits and parameter placements.

Everything here is a pure function of frozen values; nothing imports torch.
"""

from rankmesh.topology.batch import BatchPlan
from rankmesh.topology.fit import check_model, kv_replicas
from rankmesh.topology.groups import (
    GROUP_NAMES,
    axis_groups,
    creation_order,
    group_of,
    group_rows,
    groups,
    needed_groups,
)
from rankmesh.topology.hosts import (
    Mending,
    block_hosts,
    crossing_groups,
    cyclic_hosts,
    mending_axes,
    mending_order,
)
from rankmesh.topology.params import (
    Init,
    ParamSpec,
    ParamTable,
    Placement,
    Replicate,
    Shard,
    Slices,
)
from rankmesh.topology.plan import DENSE_AXES, EXPERT_AXES, ParallelPlan
from rankmesh.topology.ranks import Coordinate, coordinate, coordinates, expert_rank_of, rank_of
from rankmesh.topology.release import check_release
from rankmesh.topology.split import even, given_layers, layers_of_stages

__all__ = [
    "DENSE_AXES",
    "EXPERT_AXES",
    "GROUP_NAMES",
    "BatchPlan",
    "Coordinate",
    "Init",
    "Mending",
    "ParallelPlan",
    "ParamSpec",
    "ParamTable",
    "Placement",
    "Replicate",
    "Shard",
    "Slices",
    "axis_groups",
    "block_hosts",
    "check_model",
    "check_release",
    "coordinate",
    "coordinates",
    "creation_order",
    "crossing_groups",
    "cyclic_hosts",
    "even",
    "expert_rank_of",
    "group_of",
    "group_rows",
    "groups",
    "kv_replicas",
    "given_layers",
    "layers_of_stages",
    "mending_axes",
    "mending_order",
    "needed_groups",
    "rank_of",
]
