"""What happens in the backward pass of one stage, in order.

Owns the order of sums and gradients, from a spec alone. Which of it communicates, and how much, it
does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from rankmesh.schedule import Kind
from rankmesh.specs.model import ModelSpec


@dataclass(frozen=True)
class Stage:
    """The layers of a pipeline stage; whether it has the embedding, and the head. sequence: whether
    the stream is held in slices; regather: whether inputs are kept as slices too. again: for each
    layer the stretches that are computed anew, as `ParallelPlan.recomputed` names them.
    """

    spec: ModelSpec
    layers: range
    first: bool
    last: bool
    sequence: bool = False
    regather: bool = True
    again: tuple[frozenset[str], ...] = ()


class Work(Enum):
    """SUM: of an input gradient over tp. SQUARES: of the gradient of mean squares over tp.
    GATHER: of an output gradient that is a slice. REGATHER: of an input that was kept as a slice;
    PRODUCT: a weight gradient: a split backward does both in W. DEPOSIT: any other gradient.
    GATHER_AGAIN, SUM_AGAIN, SQUARES_AGAIN: those of the forward pass, in a layer that is computed
    anew.
    """

    SUM = "sum"
    GATHER = "gather"
    REGATHER = "regather"
    SQUARES = "squares"
    PRODUCT = "product"
    DEPOSIT = "deposit"
    GATHER_AGAIN = "gather again"
    SUM_AGAIN = "sum again"
    SQUARES_AGAIN = "squares again"


# Of the forward pass, in a layer that is computed anew.
AGAIN = (Work.GATHER_AGAIN, Work.SUM_AGAIN, Work.SQUARES_AGAIN)


@dataclass(frozen=True)
class Event:
    """One of them; `name` is the parameter whose gradient it is."""

    work: Work
    name: str = ""


def backward_events(stage: Stage, kind: Kind) -> Iterator[Event]:
    """Those of B, I or W. Names that a spec does not have do no harm."""
    late, absent = (Work.PRODUCT, Work.REGATHER), set[Work]()
    if not stage.sequence:
        absent |= {Work.GATHER, Work.GATHER_AGAIN}
    if not (stage.sequence and stage.regather):
        absent.add(Work.REGATHER)
    for event in _full(stage):
        if event.work not in absent and kind in (Kind.B, Kind.W if event.work in late else Kind.I):
            yield event


def _full(stage: Stage) -> Iterator[Event]:
    """A column product (head, gate up, q k v) starts its sum before its weight gradient; a row
    product (down, o) has none; a norm follows the column product that it feeds, and one after the
    branch precedes it. The table is last, also where it is the head as well.
    """
    spec = stage.spec
    if stage.last:
        yield Event(Work.SUM)
        yield Event(Work.REGATHER)
        yield Event(Work.PRODUCT, "embed.weight" if spec.tie_embeddings else "head.weight")
        yield from _norm("norm")
    for position, layer in reversed(list(enumerate(stage.layers))):
        name = f"layers.{layer}"
        again = stage.again[position] if stage.again else frozenset()
        if "block" in again:
            yield from _block_again(spec)
        yield from _norm(f"{name}.mlp_post_norm")
        if "mlp" in again:
            yield Event(Work.GATHER_AGAIN)
        yield Event(Work.GATHER)
        yield from _product(f"{name}.mlp", "down")
        yield Event(Work.SUM)
        yield Event(Work.REGATHER)
        yield from _product(f"{name}.mlp", "gate", "up")
        yield from _norm(f"{name}.mlp_norm")
        yield from _norm(f"{name}.attn_post_norm")
        if "attention" in again:
            yield from _attention_again(spec)
        yield Event(Work.GATHER)
        yield from _product(f"{name}.attn", "o")
        yield Event(Work.DEPOSIT, f"{name}.attn.qk_norm.k.weight")
        yield Event(Work.DEPOSIT, f"{name}.attn.qk_norm.q.weight")
        if spec.qk_norm == "all":
            yield Event(Work.SQUARES)
        yield Event(Work.SUM)
        yield Event(Work.REGATHER)
        yield from _product(f"{name}.attn", "q", "k", "v")
        yield from _norm(f"{name}.attn_norm")
    if stage.first:
        yield Event(Work.DEPOSIT, "positions.weight")
        yield Event(Work.GATHER)
        yield Event(Work.DEPOSIT, "embed.weight")


def _block_again(spec: ModelSpec) -> Iterator[Event]:
    """The second forward pass of a layer, at the start of its backward. It ends with the last
    tensor that is needed: the input of `down`, or its output where a norm follows.
    """
    yield from _attention_again(spec)
    yield Event(Work.SUM_AGAIN)
    yield Event(Work.GATHER_AGAIN)
    if spec.norm_place != "before":
        yield Event(Work.SUM_AGAIN)


def _attention_again(spec: ModelSpec) -> Iterator[Event]:
    """That of attention alone ends with the input of `o`; an MLP's has no sum either."""
    yield Event(Work.GATHER_AGAIN)
    if spec.qk_norm == "all":
        yield Event(Work.SQUARES_AGAIN)


def _product(name: str, *outputs: str) -> Iterator[Event]:
    """Weights first, then biases."""
    yield from (Event(Work.PRODUCT, f"{name}.{output}.weight") for output in outputs)
    yield from (Event(Work.DEPOSIT, f"{name}.{output}.bias") for output in outputs)


def _norm(name: str) -> Iterator[Event]:
    yield Event(Work.DEPOSIT, f"{name}.bias")
    yield Event(Work.DEPOSIT, f"{name}.weight")
