"""Parts: the places where a parallelism may stand in for single-device code.

Owns the list of swappable operations and their plain versions. A module reaches them through
`self.parts`; `Transformer.use` hands one `Parts` value to every module. Nothing here knows what a
replacement does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from rankmesh.nn.loss import LossOptions, plain_loss
from rankmesh.nn.softmax import AttentionOptions, causal_attention

if TYPE_CHECKING:
    from rankmesh.nn.layers import Linear
    from rankmesh.nn.layout import Layout

Column = Callable[[Tensor, "tuple[Linear, ...]"], tuple[Tensor, ...]]
Row = Callable[[Tensor, "Linear"], Tensor]
Lookup = Callable[[Tensor, Tensor], Tensor]
Core = Callable[[Tensor, Tensor, Tensor, "Layout", AttentionOptions], Tensor]
HeadMeans = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]]
HeadLoss = Callable[[Tensor, Tensor, Tensor, LossOptions], Tensor]
Run = Callable[..., Any]


def plain_column(x: Tensor, linears: tuple[Linear, ...]) -> tuple[Tensor, ...]:
    """One input [N, in], several outputs [N, out_i]."""
    return tuple(F.linear(x, linear.weight, linear.bias) for linear in linears)


def plain_row(x: Tensor, linear: Linear) -> Tensor:
    """[N, in] -> [N, out]."""
    return F.linear(x, linear.weight, linear.bias)


def plain_lookup(tokens: Tensor, table: Tensor) -> Tensor:
    """Token ids [N] and table [V, H] -> [N, H]."""
    return F.embedding(tokens, table)


def plain_parameter(parameter: Tensor) -> Tensor:
    """A parameter as the graph sees it."""
    return parameter


def plain_head_means(values: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Means over the last dim of values [N, size_i], whose elements the weights [size_i] number ->
    [N, 1] each.
    """
    return tuple(value.mean(dim=-1, keepdim=True) for value in values)


def plain_head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """Sum over valid labels of the token loss; hidden [N, H], weight [V, H], labels [N]."""
    return plain_loss(F.linear(hidden, weight), labels, options)


def plain_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Whole rows of logits [N, V]."""
    return F.linear(hidden, weight)


def plain_stream(x: Tensor) -> Tensor:
    """Entry and exit of the residual stream."""
    return x


def plain_run(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; `name` says which stretch of a layer that is."""
    return function(*args)


@dataclass(frozen=True)
class Parts:
    """The swappable operations of a model; the defaults are single-device code.

    column: one input, several outputs (q, k, v; gate, up). row: the product whose output joins the
    residual. lookup: token or position table. parameter: a norm weight or bias entering the graph.
    head_means: means over elements of all heads. core: attention of q [N, heads, D], k, v [N,
    kv_heads, D]. head_loss, logits: head with and
    without the loss. enter, leave: borders of the residual stream. run: a stretch of a layer:
    "block", "attention", "mlp", "core", or a "norm" or "activation" whose result goes into a
    product and nowhere else.
    """

    column: Column = plain_column
    row: Row = plain_row
    lookup: Lookup = plain_lookup
    position_lookup: Lookup = plain_lookup
    parameter: Callable[[Tensor], Tensor] = plain_parameter
    head_means: HeadMeans = plain_head_means
    core: Core = causal_attention
    head_loss: HeadLoss = plain_head_loss
    logits: Callable[[Tensor, Tensor], Tensor] = plain_logits
    enter: Callable[[Tensor], Tensor] = plain_stream
    leave: Callable[[Tensor], Tensor] = plain_stream
    run: Run = plain_run


class Piece(nn.Module):
    """A module that reaches its swappable operations through `parts`.

    `fused` lists children whose products share one input: they may be held in one buffer and
    multiplied at once.
    """

    fused: tuple[tuple[str, ...], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def use(self, parts: Parts) -> None:
        """Hand `parts` to this module and to every one inside it."""
        for module in self.modules():
            if isinstance(module, Piece):
                module.parts = parts
