"""The collectives that one training step ought to issue, and the bytes that they send.

Owns the expectation, from shapes alone. It never sees a tensor, a group or the ledger that it is
compared with. Covers dense models over tp x pp x dp.

Letters: N tokens of a microbatch, H hidden, V vocabulary, P ranks of a group, S payload bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rankmesh.errors import PlanError
from rankmesh.schedule import Action, Kind, build_schedule, with_communication
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import param_table, stage_layers
from rankmesh.theory.backward import AGAIN, Stage, Work, backward_events
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.split import even


@dataclass(frozen=True)
class Collective:
    """One collective of one rank, or one message between two stages ("send", "receive").

    axis: name of the group; size: its ranks. payload_bytes: the full buffer S. wire_bytes: what
    one rank sends under the ring algorithm; a receiver sends nothing.
    """

    op: str
    axis: str
    size: int
    phase: str
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that one collective reduces: its elements, alignment included, its parameters'
    names, and where each of them lies in it (start, stop).
    """

    elements: int
    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()

    def owned(self, part: int, parts: int, names: Collection[str]) -> int:
        """Elements of `names` in the `part`-th of `parts` equal parts of the bucket."""
        size = self.elements // parts
        low, high = part * size, (part + 1) * size
        return sum(
            max(0, min(stop, high) - max(start, low))
            for name, (start, stop) in zip(self.names, self.spans, strict=True)
            if name in names
        )


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step's collectives depend on beside model and plan.

    tokens: N of one microbatch of one replica, padding rows included. microbatches: of one replica.
    dtype_bytes: of activations; gradients and the loss have at least 4. buckets: every trainable
    parameter is in one of them. label_smoothing: whether the loss uses it.
    """

    tokens: int
    microbatches: int
    dtype_bytes: int
    buckets: tuple[Bucket, ...]
    label_smoothing: bool = False

    @property
    def wide_bytes(self) -> int:
        """Bytes of a gradient or loss element: fp32, or fp64 for models in fp64."""
        return max(4, self.dtype_bytes)


def wire_bytes(op: str, size: int, payload_bytes: int) -> int:
    """Bytes that one of `size` ranks sends: all-reduce 2 (P-1)/P S, other collectives (P-1)/P S, a
    message S.
    """
    if op in ("send", "receive"):
        return payload_bytes if op == "send" else 0
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}[op]
    return passes * (size - 1) * payload_bytes // size


def step_collectives(
    spec: ModelSpec, plan: ParallelPlan, shape: StepShape, *, pp_rank: int = 0
) -> tuple[Collective, ...]:
    """Every collective and message of one step of a rank (the first along tp and dp), in order;
    those of one-rank groups are not issued.

    1. the count of valid targets and tokens; 2. for each action of the pipeline rank its messages
    where the schedule has them (a receive may start earlier) and the collectives of its stage over
    tp, with the gradient buckets between them, each as soon as the last of its own gradients and
    of those of the buckets before it is complete; 3. with several sets of shards the sums of owned
    parts over them, the sums of a tied table over both its stages, then those over `tp` and over
    `tp_rep`; 4. the verdict of norm, loss and stop flag; 5. with ZeRO the gathers of parameters.
    Raises PlanError where the plan has more than tp, pp and dp, or zero 3.
    """
    _check(plan)
    layers = stage_layers(spec, plan)
    schedule = build_schedule(plan.schedule, plan.pp, plan.num_chunks, shape.microbatches)
    actions = with_communication(schedule)[pp_rank]
    stages = sorted({action.stage for action in actions})
    buckets = _Buckets(spec, plan, shape, stages)
    found = [_make("all_reduce", "dp_cp", plan.dp, "count", 2 * 8)]
    for action in actions:
        number = action.stage
        stage = Stage(
            spec,
            layers[number],
            first=number == 0,
            last=number == len(layers) - 1,
            sequence=plan.sequence_parallel and plan.tp > 1,
            regather=plan.sequence_regather,
            again=tuple(plan.recomputed(number, i) for i in range(len(layers[number]))),
        )
        found += _collectives(action, stage, plan, shape, buckets)
    if plan.zero < 2:
        found += buckets.late()
    held = sum(len(layers[stage]) for stage in stages)
    found += _sums(spec, plan, shape, held, stages)
    found.append(_make("all_reduce", "world", plan.world_size, "norm", 3 * 8))
    if plan.zero:
        found += [
            _make("all_gather", "shard", plan.size("shard"), "parameters", payload)
            for payload in (bucket.elements * shape.dtype_bytes for bucket in shape.buckets)
        ]
    return tuple(one for one in found if one.size > 1)


def _collectives(
    action: Action, stage: Stage, plan: ParallelPlan, shape: StepShape, buckets: _Buckets
) -> Iterator[Collective]:
    """Those of one action."""
    stream = shape.tokens * stage.spec.hidden_size * shape.dtype_bytes
    if action.kind is Kind.F:
        yield from _forward(stage, plan, shape)
    elif action.kind in _MESSAGES:
        op, phase = _MESSAGES[action.kind]
        yield _make(op, "pp", plan.pp, phase, stream // (plan.tp if stage.sequence else 1))
    else:
        ops = {
            Work.SUM: ("reduce_scatter" if stage.sequence else "all_reduce", stream),
            Work.GATHER: ("all_gather", stream),
            Work.REGATHER: ("all_gather", stream),
            Work.SQUARES: ("all_reduce", _squares(shape)),
            Work.GATHER_AGAIN: ("all_gather", stream),
            Work.SUM_AGAIN: ("reduce_scatter" if stage.sequence else "all_reduce", stream),
            Work.SQUARES_AGAIN: ("all_reduce", _squares(shape)),
        }
        for event in backward_events(stage, action.kind):
            if event.work in ops:
                op, payload = ops[event.work]
                phase = "forward" if event.work in AGAIN else "backward"
                yield _make(op, "tp", plan.tp, phase, payload)
            else:
                yield from buckets.deposit(event.name, action.stage)
        if action.kind is not Kind.I:
            yield from buckets.end(action.stage)


_MESSAGES = {
    Kind.SEND_F: ("send", "forward"),
    Kind.RECV_F: ("receive", "forward"),
    Kind.SEND_B: ("send", "backward"),
    Kind.RECV_B: ("receive", "backward"),
}


def _sums(
    spec: ModelSpec, plan: ParallelPlan, shape: StepShape, layers: int, stages: Sequence[int]
) -> Iterator[Collective]:
    """After the buckets: gradients of which a rank has only a part."""
    if plan.zero:
        yield from _sums_of_shards(spec, plan, shape, stages)
        return
    if _tied_apart(spec, plan, stages):
        rows = even(spec.vocab_size, plan.tp)[1]
        payload = shape.wide_bytes * rows * spec.hidden_size
        yield _make("all_reduce", "embedding", 2, "gradients", payload)
    partial = shape.wide_bytes * _partial_over_tp(spec, plan, stages)
    if partial:
        yield _make("all_reduce", "tp", plan.tp, "gradients", partial)
    replicas = max(1, plan.tp // spec.num_kv_heads)
    partial = shape.wide_bytes * layers * kv_elements(spec)
    yield _make("all_reduce", "tp_rep", replicas, "gradients", partial)


def _tied_apart(spec: ModelSpec, plan: ParallelPlan, stages: Sequence[int]) -> bool:
    """Whether this rank holds one of two copies of a tied table."""
    ends = {0, plan.num_stages - 1}
    return spec.tie_embeddings and len(ends) == 2 and len(ends & set(stages)) == 1


def _sums_of_shards(
    spec: ModelSpec, plan: ParallelPlan, shape: StepShape, stages: Sequence[int]
) -> Iterator[Collective]:
    """The same of what the first owner of each bucket owns."""
    parts = plan.size("shard")
    for bucket in shape.buckets:
        payload = bucket.elements // parts * shape.wide_bytes
        yield _make("all_reduce", "shard_rep", plan.zero_copies, "gradients", payload)
    table = param_table(spec, plan)
    sums = {axis: {one.name for one in table if axis in one.grad_sum} for axis in ("tp", "tp_rep")}
    if _tied_apart(spec, plan, stages):
        sums = {"embedding": {"embed.weight"}, **sums}
    sizes = {"embedding": 2, "tp": plan.tp, "tp_rep": max(1, plan.tp // spec.num_kv_heads)}
    for axis, names in sums.items():
        owned = sum(bucket.owned(0, parts, names) for bucket in shape.buckets)
        if owned:
            payload = owned * shape.wide_bytes
            yield _make("all_reduce", axis, sizes[axis], "gradients", payload)


def _partial_over_tp(spec: ModelSpec, plan: ParallelPlan, stages: Sequence[int]) -> int:
    """Elements whose gradient each tp rank has a part of: norms over heads; under sequence
    parallelism all that works on slices of the stream (norms, row biases, learned positions).
    """
    return sum(
        one.numel
        for one in param_table(spec, plan)
        if "tp" in one.grad_sum and not set(stages).isdisjoint(one.stages)
    )


def sent_by_axis(collectives: Iterable[Collective]) -> dict[str, int]:
    """Wire bytes of one rank by axis: `comm_bytes` of metrics.jsonl."""
    total: Counter[str] = Counter()
    for one in collectives:
        total[one.axis] += one.wire_bytes
    return dict(total)


def kv_elements(spec: ModelSpec) -> int:
    """Elements of k and v of a layer on a rank where tp exceeds the KV heads: one head."""
    normed = spec.head_dim if spec.qk_norm == "all" else 0
    return 2 * spec.head_dim * (spec.hidden_size + spec.qkv_bias) + normed


def _forward(stage: Stage, plan: ParallelPlan, shape: StepShape) -> Iterator[Collective]:
    """Embedding 1, each layer 2 (attention output, MLP output), cross entropy 1; before a layer's,
    the mean squares of queries and keys where their norms are over all heads. Under sequence
    parallelism the sums are scattered, and each branch and the head gather their input.
    """
    stream = shape.tokens * stage.spec.hidden_size * shape.dtype_bytes
    gather = _make("all_gather", "tp", plan.tp, "forward", stream)
    total = "reduce_scatter" if stage.sequence else "all_reduce"
    if stage.first:
        yield _make(total, "tp", plan.tp, "forward", stream)
    for _ in stage.layers:
        for branch in ("attn", "mlp"):
            if stage.sequence:
                yield gather
            if branch == "attn" and stage.spec.qk_norm == "all":
                yield _make("all_reduce", "tp", plan.tp, "forward", _squares(shape))
            yield _make(total, "tp", plan.tp, "forward", stream)
    if stage.sequence and stage.last:
        yield gather
    if stage.last:
        # Of each token: log of the sum of exponentials, logit of the target, for smoothing the sum.
        columns = 3 if shape.label_smoothing else 2
        gathered = plan.tp * shape.tokens * columns * shape.wide_bytes
        yield _make("all_gather", "tp", plan.tp, "forward", gathered)


def _squares(shape: StepShape) -> int:
    """Bytes of two numbers a token."""
    return shape.tokens * 2 * shape.wide_bytes


class _Buckets:
    """Which buckets are complete: a parameter is after its last deposit of the step, with ZeRO 2 of
    the microbatch.

    Buckets start in their order, with ZeRO 2 in that of their stage: one that is complete early
    waits for those before it.
    """

    def __init__(
        self, spec: ModelSpec, plan: ParallelPlan, shape: StepShape, stages: Sequence[int]
    ) -> None:
        self._plan, self._shape = plan, shape
        both = spec.tie_embeddings and {0, plan.num_stages - 1} <= set(stages)
        self._uses = {
            name: 2 if both and name == "embed.weight" else 1
            for bucket in shape.buckets
            for name in bucket.names
        }
        rounds = 1 if plan.zero >= 2 else shape.microbatches
        self._left = {name: uses * rounds for name, uses in self._uses.items()}
        self._started: set[int] = set()
        # What two stages of a rank share is complete with the earlier one.
        homes = {
            one.name: min(set(one.stages) & set(stages), default=0)
            for one in param_table(spec, plan)
        }
        self._stage = [homes.get(bucket.names[0], 0) for bucket in shape.buckets]

    def deposit(self, name: str, stage: int) -> Iterator[Collective]:
        """One more gradient of `name`; the reductions that start with it."""
        if name not in self._left:
            return
        self._left[name] -= 1
        if self._left[name] != 0:
            return
        for number in self._turn(stage):
            if any(self._left[one] > 0 for one in self._shape.buckets[number].names):
                return
            yield self._start(number)

    def end(self, stage: int) -> Iterator[Collective]:
        """The weight gradients of a microbatch are made: with ZeRO 2 what is left starts."""
        if self._plan.zero < 2:
            return
        yield from self.late(stage)
        for number, home in enumerate(self._stage):
            if home == stage:
                self._started.discard(number)
                for name in self._shape.buckets[number].names:
                    self._left[name] += self._uses[name]

    def late(self, stage: int = 0) -> Iterator[Collective]:
        """The reductions of buckets that never were complete."""
        for number in list(self._turn(stage)):
            yield self._start(number)

    def _turn(self, stage: int) -> Iterator[int]:
        for number, home in enumerate(self._stage):
            if number not in self._started and (self._plan.zero < 2 or home == stage):
                yield number

    def _start(self, number: int) -> Collective:
        self._started.add(number)
        payload = self._shape.buckets[number].elements * self._shape.wide_bytes
        if self._plan.zero:
            size = self._plan.size("shard")
            return _make("reduce_scatter", "shard", size, "gradients", payload)
        return _make("all_reduce", "dp_cp", self._plan.dp, "gradients", payload)


def _make(op: str, axis: str, size: int, phase: str, payload: int) -> Collective:
    return Collective(op, axis, size, phase, payload, wire_bytes(op, size, payload))


def _check(plan: ParallelPlan) -> None:
    for axis in ("cp", "ep", "etp"):
        if plan.size(axis) > 1:
            raise PlanError(
                f"{axis} {plan.size(axis)}: expected collectives cover tp, pp and dp only"
            )
    if plan.zero > 2:
        raise PlanError(f"expected collectives cover zero 0 to 2, not {plan.zero}")
