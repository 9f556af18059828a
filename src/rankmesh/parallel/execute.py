"""The executor: runs the actions of one pipeline rank, whatever schedule they come from.

Owns what is kept between the actions of a microbatch, and when messages start. It decides nothing:
the schedule does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankmesh.nn import Layout, LossOptions, Transformer
from rankmesh.parallel.apply import Parallel
from rankmesh.parallel.hops import Arrival, Hops, Key
from rankmesh.schedule.actions import COMPUTE, Action, Kind

# Entered around every computing action.
Watch = Callable[[Action], AbstractContextManager[object]]


@dataclass(frozen=True)
class StageInput:
    """One microbatch on the device: tokens [N], labels [N] (IGNORED where no target), and its
    layout.
    """

    tokens: Tensor
    labels: Tensor
    layout: Layout


@dataclass(frozen=True)
class Live:
    """What F leaves for the backward pass: where the stage's graph begins and ends. The output
    itself is not held: the graph keeps what it needs.
    """

    entry: Tensor | None
    end: torch.autograd.graph.GradientEdge


@dataclass
class Execution:
    """One run through a rank's actions. `execute` is its door."""

    models: Mapping[int, Transformer]
    parallel: Parallel
    hops: Hops
    inputs: Sequence[StageInput]
    options: LossOptions
    total: Tensor
    backward: bool
    scale: float
    live: dict[tuple[int, int], Live] = field(default_factory=dict)
    arrivals: dict[Key, Arrival] = field(default_factory=dict)
    outgoing: dict[Key, Tensor] = field(default_factory=dict)

    def run(self, actions: Sequence[Action], watch: Watch) -> None:
        """Every action; messages that stand together start together, receives one action early."""
        rows = [len(batch.layout.stream_index) for batch in self.inputs]
        posted: set[Action] = set()
        blocks = list(_blocks(actions))
        for number, (messages, action) in enumerate(blocks):
            coming = [one for one in messages if one not in posted]
            if self.hops.early and number + 1 < len(blocks):
                early = [one for one in blocks[number + 1][0] if _receives(one)]
                posted.update(early)
                coming += early
            self.arrivals |= self.hops.commit(coming, self.outgoing, rows)
            if action is not None:
                self._await(action)
                with watch(action):
                    self._compute(action)

    def _await(self, action: Action) -> None:
        """Wait until what the action works on is here: to wait is no part of the action."""
        arrives = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        arrival = self.arrivals.get((arrives, action.stage, action.microbatch))
        if arrival is not None:
            arrival.take()

    def _compute(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.F:
            self._forward(stage, microbatch)
        elif action.kind is Kind.B:
            self._backward(stage, microbatch)
            self.parallel.buffers.end_of(stage)
        elif action.kind is Kind.I:
            with self.parallel.later.keeping((stage, microbatch)):
                self._backward(stage, microbatch)
        else:
            self.parallel.later.release((stage, microbatch))
            self.parallel.buffers.end_of(stage)

    def _forward(self, stage: int, microbatch: int) -> None:
        batch, model = self.inputs[microbatch], self.models[stage]
        entry = None
        if stage > 0:
            entry = self._take(Kind.RECV_F, stage, microbatch)
            entry.requires_grad_(self.backward)
        out, _ = model(batch.tokens if entry is None else entry, batch.layout)
        if stage == len(self.hops.ranks) - 1:
            out = model.loss(out, batch.labels, self.options)
            self.total += out.detach()
            # What arrives from behind the last stage: the gradient of the loss by itself.
            gradient = torch.full_like(out, self.scale)
            self.arrivals[Kind.RECV_B, stage, microbatch] = Arrival(gradient)
        else:
            self._hand_over(Kind.SEND_F, stage, microbatch, out.detach())
        if self.backward:
            end = torch.autograd.graph.get_gradient_edge(out)
            self.live[stage, microbatch] = Live(entry, end)

    def _backward(self, stage: int, microbatch: int) -> None:
        live = self.live.pop((stage, microbatch))
        torch.autograd.backward([live.end], [self._take(Kind.RECV_B, stage, microbatch)])
        if live.entry is not None:
            assert live.entry.grad is not None
            self._hand_over(Kind.SEND_B, stage, microbatch, live.entry.grad)

    def _take(self, kind: Kind, stage: int, microbatch: int) -> Tensor:
        return self.arrivals.pop((kind, stage, microbatch)).take()

    def _hand_over(self, kind: Kind, stage: int, microbatch: int, tensor: Tensor) -> None:
        """To the message that will carry it, or to the neighbour stage on this very rank."""
        other = stage + 1 if kind is Kind.SEND_F else stage - 1
        if self.hops.ranks[other] == self.hops.ranks[stage]:
            arrives = Kind.RECV_F if kind is Kind.SEND_F else Kind.RECV_B
            self.arrivals[arrives, other, microbatch] = Arrival(tensor)
        else:
            self.outgoing[kind, stage, microbatch] = tensor


def execute(
    actions: Sequence[Action],
    parallel: Parallel,
    hops: Hops,
    inputs: Sequence[StageInput],
    options: LossOptions,
    watch: Watch = lambda action: nullcontext(),
    *,
    scale: float = 1.0,
) -> Tensor:
    """Run one rank's actions of a schedule; returns the sum of token losses of this replica where
    this rank holds the last stage, else zero (fp64, one element).

    Main gradients of the sum, times `scale`, accumulate in the buffers, which start each bucket's
    reduction when its last gradient has come: call `buffers.begin_step(microbatches)` before and
    `buffers.finish()` after. Without any backward action nothing is kept for one. Raises ValueError
    where the schedule is made for another number of microbatches.
    """
    wanted = {action.microbatch for action in actions}
    if wanted != set(range(len(inputs))):
        raise ValueError(f"{len(inputs)} microbatches for a schedule of {len(wanted)}")
    backward = any(action.kind in (Kind.B, Kind.I) for action in actions)
    total = torch.zeros(1, dtype=torch.float64, device=parallel.buffers.mesh.device)
    models = {chunk.stage: chunk.model for chunk in parallel.chunks}
    execution = Execution(models, parallel, hops, inputs, options, total, backward, scale)
    with torch.set_grad_enabled(backward):
        execution.run(actions, watch)
    hops.finish()
    return total


def _receives(action: Action) -> bool:
    return action.kind in (Kind.RECV_F, Kind.RECV_B)


def _blocks(actions: Sequence[Action]) -> Iterator[tuple[list[Action], Action | None]]:
    """Each computing action with the messages that stand before it; at last those behind."""
    messages: list[Action] = []
    for action in actions:
        if action.kind in COMPUTE:
            yield messages, action
            messages = []
        else:
            messages.append(action)
    if messages:
        yield messages, None
