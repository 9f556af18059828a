"""Families as data: what each one fixes, what it leaves open, and the defaults of the rest.

Owns what "llama" or "gemma3" means. It knows no sizes of any one model (presets.py), builds no spec
(model.py) and speaks no Hugging Face (hf_dialects.py).
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


GPT2 = Family(
    name="gpt2",
    allowed={
        "norm": ("layernorm",),
        "norm_place": ("before",),
        "mlp": ("gelu_tanh", "gelu"),
        "positions": ("learned",),
    },
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

_LLAMA: Mapping[str, object] = {
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "norm_place": "before",
    "mlp": "swiglu",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "positions": "rotary",
    "tie_embeddings": False,
    "scale_residual_init": False,
}
# What makes the two Gemmas: norms around each branch with weights stored less one, a gated tanh
# GELU, a scaled embedding that is the head too, and windows in most layers.
_GEMMA: Mapping[str, object] = {
    "norm": "rmsnorm_1p",
    "norm_eps": 1e-6,
    "norm_place": "around",
    "mlp": "geglu_tanh",
    "tie_embeddings": True,
    "scale_embedding": True,
}


def _gated(name: str, *changes: Mapping[str, object]) -> Family:
    """A family that is llama with `changes`; its shape of block is fixed, the rest are defaults."""
    defaults = dict(_LLAMA)
    for change in changes:
        defaults |= change
    fixed = ("norm", "norm_place", "mlp", "positions")
    return Family(
        name=name,
        allowed={field: (defaults[field],) for field in fixed},
        defaults=defaults,
        # A gated MLP has three matrices: 8/3 keeps the size of two matrices at ratio 4.
        ffn_ratio=8 / 3,
        ffn_multiple=256,
    )


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _gated("llama"),
        GPT2,
        _gated("mistral"),
        _gated("qwen2", {"norm_eps": 1e-6, "qkv_bias": True}),
        _gated("qwen3", {"norm_eps": 1e-6, "qk_norm": "head"}),
        _gated(
            "gemma2",
            _GEMMA,
            {
                "window": 4096,
                "window_pattern": "LG",
                "attention_softcap": 50.0,
                "logit_softcap": 30.0,
            },
        ),
        _gated(
            "gemma3",
            _GEMMA,
            {
                "qk_norm": "head",
                "window": 1024,
                "window_pattern": "LLLLLG",
                "rope_theta": 1e6,
                "rope_local_theta": 1e4,
            },
        ),
        _gated(
            "olmo2",
            {"norm_eps": 1e-6, "norm_place": "after", "qk_norm": "all", "rope_theta": 5e5},
        ),
        _gated("phi3"),
    )
}
