"""ParallelPlan: the integers that say how a world of ranks is cut, checked when they are written.

Owns every rule that needs only the plan's own numbers, and the refusals that name each number and
the nearest plans that tile. It knows no rank, model, host or torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rankmesh.errors import PlanError
from rankmesh.topology.recompute import CORE, check_recompute, stretches
from rankmesh.topology.recompute import MODES as RECOMPUTE

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
CP_KINDS = ("ring", "all-gather", "ulysses")
# Schedule -> the num_chunks it runs; None for any.
SCHEDULES: Mapping[str, int | None] = {
    "1f1b": 1,
    "gpipe": 1,
    "interleaved": None,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "dualpipe-v": 2,
}
_COUNTS = ("tp", "cp", "ep", "etp", "pp", "dp", "num_chunks", "cp_ulysses")
# Group names whose size is a product of axes, beside the axes themselves.
_PRODUCTS = {
    "dp_cp": ("dp", "cp"),
    "tp_pp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "stage": ("tp", "cp", "dp"),
    "world": DENSE_AXES,
}


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a world is cut. Frozen, equal by value; an impossible plan cannot be made (PlanError).

    tp, cp, dp, pp: sizes of the dense axes, world_size = tp * cp * dp * pp. etp, ep: sizes of the
    expert view, which re-reads the ranks of a pipeline stage as etp * ep * edp = tp * cp * dp.
    etp is 1 unless asked for, whatever tp and ep are: the weights of one expert are small, and a
    cut through them costs two collectives a layer. Experts are then split by ep alone.

    num_chunks: virtual stages a rank. layout: layers of each of the pp * num_chunks stages, in
    order; None for a split balanced by cost. zero: 0..3, what is sharded (nothing, optimizer state,
    gradients, parameters). zero_group: ranks that share one set of shards, a divisor of dp * cp;
    None for all of them. cp_kind: how attention crosses cp. cp_ulysses: neighbouring cp ranks that
    exchange heads, the rest being the ring; with cp_kind "ulysses" it is all of cp. order: the
    dense axes, fastest-varying first.

    recompute: what is computed anew in backward: "none", "full" (whole layers) or "selective",
    which are the recompute_modules. recompute_layers: in how many layers of
    each chunk, from its first on; one number for all chunks or one for each; None for all layers.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    dp: int = 1
    num_chunks: int = 1
    schedule: str = "1f1b"
    layout: tuple[int, ...] | None = None
    zero: int = 0
    zero_group: int | None = None
    cp_kind: str = "ring"
    cp_ulysses: int = 1
    sequence_parallel: bool = False
    sequence_regather: bool = True
    recompute: str = "none"
    recompute_layers: tuple[int, ...] | None = None
    recompute_modules: tuple[str, ...] = CORE
    order: tuple[str, ...] = DENSE_AXES

    def __post_init__(self) -> None:
        _check_values(self)
        object.__setattr__(self, "order", _checked_order(self.order))
        _check_schedule(self)
        object.__setattr__(self, "layout", _checked_layout(self))
        _check_context(self)
        _check_expert(self)
        _check_zero_group(self)
        _check_recompute(self)

    @classmethod
    def for_world(cls, world_size: int, **fields: Any) -> ParallelPlan:
        """The plan of `world_size` ranks; dp follows from the other axes unless it is given.

        Raises PlanError, naming the nearest plans, where the axes do not tile the world.
        """
        if type(world_size) is not int or world_size < 1:
            raise PlanError(f"world_size {world_size!r}: a whole number of at least 1 is needed")
        given = {key: value for key, value in fields.items() if key != "dp" or value is not None}
        # Bad values are refused as such, before any division by them.
        alone = cls(**{**given, "ep": 1, "etp": 1, "zero_group": None, "dp": given.get("dp", 1)})
        product = alone.world_size
        if world_size % product or ("dp" in given and world_size != product):
            raise PlanError(_does_not_tile(world_size, given, product))
        return cls(**{"dp": world_size // product, **given})

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Copies of one expert's weights in a stage."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline, virtual ones counted."""
        return self.pp * self.num_chunks

    @property
    def last_stage_pp(self) -> int:
        """The pp rank that holds the last stage: in a V it is the one that holds the first."""
        return 0 if self.schedule in ("zb-v", "dualpipe-v") else self.pp - 1

    @property
    def zero_copies(self) -> int:
        """Full sets of ZeRO shards that a stage holds, each spread over one zero_group."""
        return 1 if self.zero_group is None else self.dp * self.cp // self.zero_group

    def size(self, name: str) -> int:
        """Ranks in one group of an axis (tp cp dp pp etp ep edp) or of another fixed-size group."""
        if name in _PRODUCTS:
            return math.prod(self.size(axis) for axis in _PRODUCTS[name])
        if name in DENSE_AXES or name in EXPERT_AXES:
            return int(getattr(self, name))
        ulysses = self.cp if self.cp_kind == "ulysses" else self.cp_ulysses
        derived = {
            "cp_ulysses": ulysses,
            "cp_ring": self.cp // ulysses,
            "shard": self.dp * self.cp // self.zero_copies,
            "shard_rep": self.zero_copies,
            "expert_shard": self.edp // self.zero_copies,
            "expert_shard_rep": self.zero_copies,
        }
        if name not in derived:
            known = ", ".join((*DENSE_AXES, *EXPERT_AXES[:3], *_PRODUCTS, *derived))
            raise PlanError(f"unknown axis {name!r}; allowed: {known}")
        return derived[name]

    def recomputed(self, stage: int, position: int) -> frozenset[str]:
        """The stretches of a stage's layer, its `position`-th, that are computed anew in backward:
        none, {"block"}, or names of modules.
        """
        limits = self.recompute_layers
        if limits is not None and position >= limits[min(stage // self.pp, len(limits) - 1)]:
            return frozenset()
        return stretches(self.recompute, self.recompute_modules)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON; `ParallelPlan(**plan.to_dict())` equals the plan."""
        values = asdict(self)
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}

    def __str__(self) -> str:
        """The axes that are split, e.g. "tp 2 dp 4"; "one rank" where none is."""
        axes = [f"{axis} {self.size(axis)}" for axis in DENSE_AXES if self.size(axis) > 1]
        expert = [f"{axis} {self.size(axis)}" for axis in ("etp", "ep") if self.size(axis) > 1]
        return " ".join(axes + expert) or "one rank"


def _check_values(plan: ParallelPlan) -> None:
    """Types and ranges of single fields: integers are integers, and words are known ones."""
    counts = {name: getattr(plan, name) for name in _COUNTS}
    if plan.zero_group is not None:
        counts["zero_group"] = plan.zero_group
    for name, value in counts.items():
        # bool is an int to Python; a plan with tp true is a slip.
        if type(value) is not int or value < 1:
            raise PlanError(f"{name} {value!r}: a whole number of at least 1 is needed")
    if type(plan.zero) is not int or plan.zero not in range(4):
        raise PlanError(f"zero {plan.zero!r}: allowed are 0, 1, 2, 3")
    for name in ("sequence_parallel", "sequence_regather"):
        if type(getattr(plan, name)) is not bool:
            raise PlanError(f"{name} {getattr(plan, name)!r}: allowed are true, false")
    _check_word("schedule", plan.schedule, SCHEDULES)
    _check_word("cp_kind", plan.cp_kind, CP_KINDS)
    _check_word("recompute", plan.recompute, RECOMPUTE)


def _check_word(name: str, value: object, allowed: Iterable[str]) -> None:
    words = tuple(allowed)
    if value not in words:
        raise PlanError(f"{name} {value!r}: allowed are {', '.join(words)}")


def _checked_order(order: object) -> tuple[str, ...]:
    names = tuple(order) if isinstance(order, list | tuple) else (order,)
    if len(names) != len(DENSE_AXES) or set(names) != set(DENSE_AXES):
        raise PlanError(
            f"order {', '.join(map(str, names))}: the axes {', '.join(DENSE_AXES)} are needed, "
            "each once, fastest-varying first (experts are folded over them and have no place of "
            "their own)"
        )
    return names


def _check_schedule(plan: ParallelPlan) -> None:
    chunks = SCHEDULES[plan.schedule]
    if chunks is not None and plan.num_chunks != chunks:
        raise PlanError(
            f"schedule {plan.schedule} runs {chunks} chunk(s) a rank, not num_chunks "
            f"{plan.num_chunks}; nearest: num_chunks {chunks}, or schedule interleaved, "
            "which takes any number"
        )


def _checked_layout(plan: ParallelPlan) -> tuple[int, ...] | None:
    """One number of layers a stage; only where the embedding or the head is may it be 0."""
    if plan.layout is None:
        return None
    counts = tuple(plan.layout)
    if len(counts) != plan.num_stages:
        raise PlanError(
            f"layout {list(counts)} has {len(counts)} stages; needed are pp {plan.pp} * "
            f"num_chunks {plan.num_chunks} = {plan.num_stages}"
        )
    for stage, count in enumerate(counts):
        least = 0 if stage in (0, plan.num_stages - 1) else 1
        if type(count) is not int or count < least:
            raise PlanError(
                f"layout {list(counts)}: stage {stage} has {count!r} layers; allowed: a whole "
                f"number of at least {least}"
            )
    return counts


def _check_context(plan: ParallelPlan) -> None:
    if plan.cp % plan.cp_ulysses:
        near = " or ".join(map(str, near_divisors(plan.cp, plan.cp_ulysses)))
        raise PlanError(
            f"cp_ulysses {plan.cp_ulysses} does not divide cp {plan.cp}; nearest: cp_ulysses {near}"
        )
    allowed = {"ring": plan.cp_ulysses, "all-gather": 1, "ulysses": plan.cp}[plan.cp_kind]
    if plan.cp_ulysses not in (1, allowed):
        raise PlanError(
            f"cp_ulysses {plan.cp_ulysses} with cp {plan.cp} does not go with cp_kind "
            f"{plan.cp_kind}; the two-level form is cp_kind ring with cp_ulysses {plan.cp_ulysses}"
        )


def _check_expert(plan: ParallelPlan) -> None:
    stage = plan.tp * plan.cp * plan.dp
    if stage % (plan.etp * plan.ep) == 0:
        return
    near = []
    if stage % plan.etp == 0:
        near += [f"ep {ep}" for ep in near_divisors(stage // plan.etp, plan.ep)]
    if stage % plan.ep == 0:
        near += [f"etp {etp}" for etp in near_divisors(stage // plan.ep, plan.etp)]
    # The smallest step of dp that makes the experts fit.
    step = plan.etp * plan.ep // math.gcd(plan.etp * plan.ep, plan.tp * plan.cp)
    near += [f"dp {dp}" for dp in (plan.dp // step * step, -(-plan.dp // step) * step) if dp]
    raise PlanError(
        f"etp {plan.etp} * ep {plan.ep} = {plan.etp * plan.ep} does not divide the stage's "
        f"tp {plan.tp} * cp {plan.cp} * dp {plan.dp} = {stage} ranks; nearest: {' or '.join(near)}"
    )


def _check_recompute(plan: ParallelPlan) -> None:
    for name in ("recompute_layers", "recompute_modules"):
        value = getattr(plan, name)
        if isinstance(value, int | str):
            value = (value,)
        object.__setattr__(plan, name, None if value is None else tuple(value))
    check_recompute(plan.recompute, plan.recompute_layers, plan.recompute_modules, plan.num_chunks)


def _check_zero_group(plan: ParallelPlan) -> None:
    if plan.zero_group is None:
        return
    holders = plan.dp * plan.cp
    if holders % plan.zero_group:
        near = " or ".join(map(str, near_divisors(holders, plan.zero_group)))
        raise PlanError(
            f"zero_group {plan.zero_group} does not divide dp {plan.dp} * cp {plan.cp} = "
            f"{holders}; nearest: zero_group {near}"
        )
    # Dense and expert state are copied equally often, so that a set of shards stays in one part
    # of the machine for both.
    if plan.edp % plan.zero_copies:
        fitting = [z for z in _divisors(holders) if plan.edp % (holders // z) == 0]
        near = " or ".join(map(str, _around(fitting, plan.zero_group)))
        raise PlanError(
            f"zero_group {plan.zero_group} makes dp {plan.dp} * cp {plan.cp} / {plan.zero_group} = "
            f"{plan.zero_copies} copies of the state, which do not divide edp {plan.edp}; "
            f"nearest: zero_group {near}"
        )


def _divisors(total: int) -> list[int]:
    """Divisors of `total`, ascending."""
    low = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return low + [total // d for d in reversed(low) if d * d != total]


def _around(values: Iterable[int], wanted: int) -> tuple[int, ...]:
    """The largest of `values` below `wanted` and the smallest above."""
    pool = tuple(values)
    below, above = [v for v in pool if v < wanted], [v for v in pool if v > wanted]
    return (*below[-1:], *above[:1])


def near_divisors(total: int, wanted: int) -> tuple[int, ...]:
    """The divisors of `total` next to `wanted`, below and above: what a refusal proposes."""
    return _around(_divisors(total), wanted)


def _does_not_tile(world_size: int, fields: Mapping[str, Any], product: int) -> str:
    """The refusal of a world that the given axes do not tile, with the nearest plans that do."""
    named = [axis for axis in DENSE_AXES if axis in fields and (axis == "dp" or fields[axis] > 1)]
    factors = " * ".join(f"{axis} {fields.get(axis, 1)}" for axis in named)
    verb = "is not" if "dp" in fields else "does not divide"
    near = [
        f"{plan} ({plan.world_size} ranks)" if plan.world_size > 1 else str(plan)
        for plan in _near_plans(world_size, fields)
    ]
    tail = f"; nearest plans: {', '.join(near)}" if near else ""
    total = f"{factors} = {product}" if len(named) > 1 else factors
    return f"{world_size} ranks do not tile: {total} {verb} {world_size}{tail}"


def _near_plans(world_size: int, fields: Mapping[str, Any]) -> list[ParallelPlan]:
    """Two plans of the same world with other axes, then the same axes in the nearest worlds."""
    rest = {key: value for key, value in fields.items() if key != "dp"}
    same = list(itertools.islice(_same_world(world_size, rest), 2))
    product = math.prod(rest.get(axis, 1) for axis in DENSE_AXES if axis != "dp")
    below = world_size // product
    if world_size % product == 0:  # only a dp that was given is wrong, and `same` corrects it
        return same
    worlds = (product * dp for dp in (below, below + 1) if dp)
    return same + [plan for world in worlds if (plan := _legal(world, rest))]


def _same_world(world_size: int, rest: Mapping[str, Any]) -> Iterator[ParallelPlan]:
    """Legal plans of `world_size` ranks, those nearest to the wanted axes first."""
    axes = [axis for axis in DENSE_AXES if axis != "dp" and rest.get(axis, 1) > 1]
    candidates = _factors(world_size, len(axes))

    def distance(sizes: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        # In octaves: from 4 to 3 is nearer than from 2 to 1.
        octaves = (
            abs(math.log2(size / rest[axis])) for axis, size in zip(axes, sizes, strict=True)
        )
        return round(sum(octaves), 6), tuple(-size for size in sizes)

    for sizes in sorted(candidates, key=distance):
        plan = _legal(world_size, {**rest, **dict(zip(axes, sizes, strict=True))})
        if plan is not None:
            yield plan


def _factors(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every tuple of `count` numbers whose product divides `total`."""
    if count == 0:
        yield ()
        return
    for first in _divisors(total):
        yield from ((first, *others) for others in _factors(total // first, count - 1))


def _legal(world_size: int, rest: Mapping[str, Any]) -> ParallelPlan | None:
    """The plan of a world that the axes tile, or None where another rule refuses it."""
    bare = ParallelPlan(**{axis: rest.get(axis, 1) for axis in ("tp", "cp", "pp")})
    sized = replace(bare, dp=world_size // bare.world_size)
    try:
        return replace(sized, **rest)
    except PlanError:
        return None
