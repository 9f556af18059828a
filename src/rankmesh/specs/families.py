"""Families as data: what each one fixes, what it leaves open, and the defaults of the rest.

Owns what "llama" and "gpt2" mean. It knows no sizes of any one model (presets.py) and builds no
spec (model.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    allowed: spec field -> the values that the family permits (fields absent here are free).
    defaults: spec field -> the value when the user gives none. ffn_multiple: the feed-forward size
    defaults to `ffn_ratio` * hidden_size, rounded up to this multiple.
    """

    name: str
    allowed: Mapping[str, tuple[object, ...]]
    defaults: Mapping[str, object]
    ffn_ratio: float
    ffn_multiple: int

    def default_ffn_size(self, hidden_size: int) -> int:
        """The feed-forward width of a model that names none."""
        size = int(self.ffn_ratio * hidden_size)
        return -(-size // self.ffn_multiple) * self.ffn_multiple


LLAMA = Family(
    name="llama",
    allowed={"norm": ("rmsnorm",), "mlp": ("swiglu",), "positions": ("rotary",)},
    defaults={
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "mlp": "swiglu",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "positions": "rotary",
        "tie_embeddings": False,
        "scale_residual_init": False,
    },
    # A gated MLP has three matrices: 8/3 keeps the size of two matrices at ratio 4.
    ffn_ratio=8 / 3,
    ffn_multiple=256,
)

GPT2 = Family(
    name="gpt2",
    allowed={"norm": ("layernorm",), "mlp": ("gelu_tanh", "gelu"), "positions": ("learned",)},
    defaults={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "mlp": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "positions": "learned",
        "tie_embeddings": True,
        "scale_residual_init": True,
    },
    ffn_ratio=4,
    ffn_multiple=1,
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in (LLAMA, GPT2)}
