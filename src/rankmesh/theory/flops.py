"""Model FLOPs, and the share of an accelerator's peak that they make.

Owns the formulas. Model FLOPs are those of the mathematics: recomputed activations, padding and
lost tokens are not counted, and no parallel degree enters.

Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B): a token costs 6 FLOPs a matmul
parameter and 12 L Q T for attention over all T positions (Q = num_heads * head_dim). Narayanan et
al. 2021 (arXiv:2104.04473, equation 3) gives the same for GPT, times 4/3 where everything is
recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankmesh.specs.model import ModelSpec
from rankmesh.theory.params import matmul_params


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """FLOPs of one token's forward pass: products with weights, and attention's two products."""

    matmul: int
    attention: int

    @property
    def forward(self) -> int:
        return self.matmul + self.attention

    @property
    def backward(self) -> int:
        """Each product has two in backward: for its input and for its weight (or second input)."""
        return 2 * self.forward

    @property
    def total(self) -> int:
        return self.forward + self.backward


def token_flops(spec: ModelSpec, seq_len: int, *, causal: bool = True) -> TokenFlops:
    """FLOPs of one token of a sequence of `seq_len`.

    causal: count only the positions that a token attends to on average, the work that is needed:
    (T + 1) / 2 or, in a window W below T, W - W (W - 1) / 2T (rounded down). False counts all T, as
    PaLM and Megatron-LM do, for comparison with their figures. The number of KV heads enters
    through the weights alone: each query head has its own products.
    """
    query = spec.num_heads * spec.head_dim
    # Scores and their use on the values: 2 FLOPs each for every position and every query element.
    pairs = sum(_pairs(seq_len, window) if causal else seq_len**2 for window in spec.windows)
    return TokenFlops(matmul=2 * matmul_params(spec), attention=4 * query * pairs // seq_len)


def _pairs(seq_len: int, window: int) -> int:
    """(query, key) pairs of one layer's causal attention over a sequence."""
    seen = min(window or seq_len, seq_len)
    return seen * (seen + 1) // 2 + (seq_len - seen) * seen


def mfu(
    flops_per_token: int, tokens_per_s: float, num_devices: int, peak_flops: float | None
) -> float | None:
    """Model FLOP utilisation from 0 to 1: what is done a second over what all devices could do.

    peak_flops: dense FLOP/s of one device in the dtype of the matmuls; None where it is not known,
    and then there is no figure.
    """
    if peak_flops is None:
        return None
    return flops_per_token * tokens_per_s / (num_devices * peak_flops)
