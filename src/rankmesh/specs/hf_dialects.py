"""How each architecture of Hugging Face writes its config.json, as data.

Owns keys, what an absent key means there, and what we cannot express. The translation is hf.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One architecture.

    keys: our field -> its key. absent: key -> what a config without it means. fixed: key -> the
    values that we can express; an absent key means the first. activation: the key that names it,
    and its values -> our `mlp`. biases: key -> our switches that it sets at once. dropouts: keys
    that must agree, our `dropout`. windows: no layer has one, all have, a switch and layer types
    say which, or layer types alone. rope_kinds: scalings that it knows,
    none where positions are not rotary. local_rope: local layers
    have a theta of their own. whole_heads: it refuses a hidden size that heads do not divide.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    absent: Mapping[str, object]
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    activation: tuple[str, Mapping[str, str]]
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ()
    windows: Literal["none", "all", "switch", "types"] = "none"
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    local_rope: bool = False
    whole_heads: bool = False


_SILU = ("hidden_act", {"silu": "swiglu"})
_ALL_ATTENTION = {"attention_bias": ("qkv_bias", "out_bias")}
_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
}
_GEMMA_KEYS: Mapping[str, str] = {
    **_KEYS,
    "query_scalar": "query_pre_attn_scalar",
    "logit_softcap": "final_logit_softcapping",
}
# What LlamaConfig means where a key is absent; the others differ in a few.
_ABSENT: Mapping[str, object] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
_GEMMA_ABSENT: Mapping[str, object] = {
    **_ABSENT,
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN_ABSENT: Mapping[str, object] = {
    **_ABSENT,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_TANH_GELU = ("hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh"})

DIALECTS: Mapping[str, Dialect] = {
    "llama": Dialect(
        model_type="llama",
        architecture="LlamaForCausalLM",
        keys=_KEYS,
        absent=_ABSENT,
        activation=_SILU,
        biases={**_ALL_ATTENTION, "mlp_bias": ("mlp_bias",)},
        whole_heads=True,
    ),
    "gpt2": Dialect(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        keys={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_heads": "n_head",
            "ffn_size": "n_inner",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "tie_embeddings": "tie_word_embeddings",
            "attention_dropout": "attn_pdrop",
            "init_std": "initializer_range",
        },
        absent={
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "vocab_size": 50257,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "initializer_range": 0.02,
        },
        fixed={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        activation=(
            "activation_function",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        dropouts=("resid_pdrop", "embd_pdrop"),
        rope_kinds=(),
    ),
    "mistral": Dialect(
        model_type="mistral",
        architecture="MistralForCausalLM",
        keys=_KEYS,
        absent={
            **_ABSENT,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        activation=_SILU,
        windows="all",
    ),
    "qwen2": Dialect(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        keys=_KEYS,
        absent=_QWEN_ABSENT,
        activation=_SILU,
        windows="switch",
    ),
    "qwen3": Dialect(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        keys=_KEYS,
        absent={**_QWEN_ABSENT, "head_dim": 128},
        activation=_SILU,
        biases=_ALL_ATTENTION,
        windows="switch",
    ),
    "gemma2": Dialect(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        keys={**_GEMMA_KEYS, "attention_softcap": "attn_logit_softcapping"},
        absent={
            **_GEMMA_ABSENT,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "sliding_window_pattern": 2,
        },
        fixed={"use_bidirectional_attention": (None, False)},
        activation=_TANH_GELU,
        biases=_ALL_ATTENTION,
        windows="types",
        whole_heads=True,
    ),
    "gemma3": Dialect(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        keys=_GEMMA_KEYS,
        absent={
            **_GEMMA_ABSENT,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
        # The key exists; its attention never looks at it.
        fixed={"use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,)},
        activation=_TANH_GELU,
        biases=_ALL_ATTENTION,
        windows="types",
        local_rope=True,
        whole_heads=True,
    ),
    "olmo2": Dialect(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        keys=_KEYS,
        absent={**_ABSENT, "vocab_size": 50304, "rms_norm_eps": 1e-5},
        activation=_SILU,
        biases=_ALL_ATTENTION,
    ),
    "phi3": Dialect(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        keys=_KEYS,
        absent={
            **_ABSENT,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        activation=_SILU,
        dropouts=("resid_pdrop", "embd_pdrop"),
        windows="all",
        # It takes "yarn" for LongRoPE, which we do not have.
        rope_kinds=("default",),
    ),
}
