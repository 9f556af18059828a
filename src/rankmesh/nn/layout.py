"""Layout: what a forward pass must know about its tokens besides their values.

Owns positions, sample numbers and the batch shape of one microbatch as held by one rank. Module
code reads sizes from here, never from the shape of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rankmesh.nn.dropout import DropoutKey


@dataclass(frozen=True)
class Layout:
    """Tokens of one microbatch, flattened to N = batch * length in (sample, position) order.

    positions [N]: position of each token in its document (rotary phases, learned positions).
    index [N]: place of each token in its sample (dropout is keyed by it).
    dropout: key of the masks, or None where no mask is drawn (evaluation, generation).
    held: the tokens of which this rank holds the residual stream, [n, H]; all of them, or a slice
    under sequence parallelism.
    """

    batch: int
    length: int
    positions: Tensor
    index: Tensor
    dropout: DropoutKey | None = None
    held: slice = field(default_factory=lambda: slice(None))

    @property
    def stream_index(self) -> Tensor:
        """[n]: `index` of the tokens held."""
        return self.index[self.held]

    @property
    def stream_positions(self) -> Tensor:
        """[n]: `positions` of the tokens held."""
        return self.positions[self.held]

    @property
    def stream_key(self) -> DropoutKey | None:
        """The key of the masks over the residual stream; that of a slice, which may begin within a
        sample, has a row a token.
        """
        if self.dropout is None or self.held == slice(None):
            return self.dropout
        samples = self.dropout.samples.repeat_interleave(self.length)
        return replace(self.dropout, samples=samples[self.held])

    @staticmethod
    def plain(
        batch: int,
        length: int,
        *,
        device: torch.device | str = "cpu",
        dropout: DropoutKey | None = None,
        held: slice | None = None,
    ) -> Layout:
        """Whole samples of one document each: positions 0..length-1 in every sample."""
        index = torch.arange(length, device=device).repeat(batch)
        return Layout(
            batch=batch,
            length=length,
            positions=index,
            index=index,
            dropout=dropout,
            held=held or slice(None),
        )
