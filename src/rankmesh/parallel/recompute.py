"""Recomputation: stretches of a layer whose activations are dropped and made again in backward.

Owns what stands for a dropped tensor and how it comes back. Which stretches those are it is told;
it knows no layer, no schedule and no formula. Nothing random is kept: dropout masks are derived, so
that a second pass makes the same bits.

torch.utils.checkpoint does the same for whole stretches, by the same means, and imports torch's
compiler with its first use, which takes seconds in every process. It can neither drop a stretch's
result nor stop before a product whose output nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rankmesh import nn
from rankmesh.nn.parts import Column, Row

# Their results go into a product and nowhere else: what is dropped is the result.
_RESULTS = ("norm", "activation")


def recompute(block: nn.Block, names: frozenset[str]) -> None:
    """Compute the stretches `names` of a layer anew in backward; its parts are in place already.

    The second forward pass of a stretch issues its collectives again, except those of a last row
    product, whose output no gradient needs.
    """
    parts = block.parts
    again = _Again(names, parts.column, parts.row)
    block.use(replace(parts, run=again.run, column=again.column, row=again.row))


class _Enough(Exception):
    """All that a stretch had saved is here again."""


class _Inputs(torch.autograd.Function):
    """Keeps tensors the way autograd does: whoever counts or guards what is saved sees them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("nothing depends on this output")


@dataclass(frozen=True)
class _Result:
    """A tensor that a cheap function makes from tensors which are kept anyway."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]

    def make(self) -> Tensor:
        with torch.no_grad():
            return self.function(*self.args)


class _Kept:
    """Stands for an input that `_Inputs` keeps."""


class _Stretch:
    """One run of a stretch: its inputs, and what it saved, which is made again when first asked
    for. Each saved tensor is handed out once and let go.
    """

    def __init__(self, again: _Again, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._again = again
        self._function = function
        self._args = [again.result_of(arg) for arg in args]
        kept = [arg.detach() for arg in self._args if isinstance(arg, Tensor)]
        self._args = [_Kept() if isinstance(arg, Tensor) else arg for arg in self._args]
        self._needs = [isinstance(arg, Tensor) and arg.requires_grad for arg in args]
        anchor = torch.empty(0, requires_grad=True)
        self._inputs = _Inputs.apply(anchor, *_compact(kept)).grad_fn
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._made: list[Tensor | None] | None = None

    def run(self, args: tuple[Any, ...]) -> Any:
        """The first forward pass."""
        with saved_tensors_hooks(self._drop, self._take):
            return self._function(*args)

    def _drop(self, tensor: Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def _take(self, number: int) -> Tensor:
        if self._made is None:
            self._make()
        assert self._made is not None
        tensor, self._made[number] = self._made[number], None
        if tensor is None:
            raise RuntimeError("a recomputed tensor is used twice")
        return tensor

    def _make(self) -> None:
        """The second forward pass, up to the last tensor that the first one saved."""
        self._made = []
        kept = iter(self._inputs.saved_tensors)
        args = []
        for arg, needs in zip(self._args, self._needs, strict=True):
            if isinstance(arg, _Kept):
                arg = next(kept).detach()
            elif isinstance(arg, _Result):
                arg = arg.make()
            args.append(arg.requires_grad_() if needs else arg)
        self._again.making = self
        try:
            with torch.enable_grad(), saved_tensors_hooks(self.keep, _never):
                self._function(*args)
        except _Enough:
            pass
        finally:
            self._again.making = None
        if self.missing:
            raise RuntimeError(f"recomputed {len(self._made)} tensors of {len(self._saved)}")

    @property
    def missing(self) -> int:
        """Tensors that the second pass has still to make."""
        return len(self._saved) - len(self._made or ())

    def keep(self, tensor: Tensor) -> int:
        """Take the next tensor of the second pass. Raises _Enough with the last one."""
        assert self._made is not None
        number = len(self._made)
        if self._saved[number] != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                f"recomputed {tuple(tensor.shape)} {tensor.dtype} where the first pass saved "
                f"{tuple(self._saved[number][0])} {self._saved[number][1]}"
            )
        self._made.append(tensor.detach())
        if not self.missing:
            raise _Enough
        return number


def _never(number: int) -> Tensor:
    raise RuntimeError("the second pass has no backward of its own")


def _compact(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, copied where the memory behind them holds more than they do."""
    behind = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    if sum(behind.values()) <= sum(t.numel() * t.element_size() for t in tensors):
        return tensors
    return [
        t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t
        for t in tensors
    ]


class _Again:
    """The `run`, `column` and `row` parts of one layer. making: the stretch in its second pass."""

    def __init__(self, names: frozenset[str], column: Column, row: Row) -> None:
        self._names = names
        self._column = column
        self._row = row
        self._last: tuple[Tensor, _Result] | None = None
        self.making: _Stretch | None = None

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`; its activations, or its result, are dropped if that was asked for."""
        if name not in self._names or self.making is not None or not torch.is_grad_enabled():
            return function(*args)
        if name not in _RESULTS:
            stretch = _Stretch(self, function, args)
            self._last = None
            return stretch.run(args)
        out = function(*args)
        if any(out is arg for arg in args):
            # An absent norm: there is nothing to drop.
            return out
        plain = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
        self._last = (out, _Result(function, plain))
        return out

    def result_of(self, arg: Any) -> Any:
        """How `arg` is made, if it is the result that is to be dropped; else `arg` itself."""
        return self._last[1] if self._last is not None and self._last[0] is arg else arg

    def column(self, x: Tensor, linears: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        """The column part, which keeps of a dropped input how it is made."""
        outputs: tuple[Tensor, ...] = self._keeping(x, partial(self._column, x, linears))
        return outputs

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """The row part, likewise. A product saves its input and nothing else: where that is all
        that is missing, neither the product nor its sum is needed.
        """
        if self.making is not None and self.making.missing == 1:
            self.making.keep(x)
        y: Tensor = self._keeping(x, partial(self._row, x, linear))
        return y

    def _keeping(self, x: Tensor, product: Callable[[], Any]) -> Any:
        last, self._last = self._last, None
        if last is None or last[0] is not x:
            return product()
        result, place = last[1], x.data_ptr()

        def pack(tensor: Tensor) -> Tensor | _Result:
            return result if tensor.data_ptr() == place and tensor.shape == x_shape else tensor

        x_shape = x.shape
        with saved_tensors_hooks(pack, _unpack):
            return product()


def _unpack(kept: Tensor | _Result) -> Tensor:
    return kept.make() if isinstance(kept, _Result) else kept
