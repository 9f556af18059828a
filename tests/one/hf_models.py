"""Small random `transformers` models of every family, for tests that compare with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 67
NO_MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Contexts are short, so that 24 positions see all ranges of frequencies and more than one window.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "rope_theta": 1000.0,
}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 2.0}
LINEAR_ROPE = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_inner": 101,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 64,
    "initializer_range": 0.15,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **NO_MARKS,
}
ROTARY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    **NO_MARKS,
}
# Soft caps and scalars so small that they bite.
GEMMA: dict[str, Any] = {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 5}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
TYPES = ["sliding_attention", "full_attention"] * 2
GEMMA3 = GEMMA | {"num_hidden_layers": 4, "layer_types": TYPES}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


def make(name: str, **changes: Any) -> Any:
    """The eager causal model of `transformers` called `name`, such as Llama."""
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    base = GPT2 if name == "GPT2" else ROTARY
    return getattr(transformers, head)(config(**base | changes, attn_implementation="eager"))


def _case(name: str, *parts: dict[str, Any], **changes: Any) -> Callable[[], Any]:
    merged = {key: value for part in (*parts, changes) for key, value in part.items()}
    return lambda: make(name, **merged)


MAKERS: dict[str, Callable[[], Any]] = {
    "llama grouped queries": _case("Llama"),
    "llama one KV head, tied": _case("Llama", num_key_value_heads=1, tie_word_embeddings=True),
    "llama full heads, own head_dim": _case("Llama", num_key_value_heads=6, head_dim=12),
    "llama 3 frequencies": _case("Llama", rope_parameters=LLAMA3_ROPE),
    "llama linear frequencies": _case("Llama", rope_parameters=LINEAR_ROPE),
    "llama yarn": _case("Llama", rope_parameters=YARN_ROPE),
    "llama yarn, factor given": _case(
        "Llama", rope_parameters=YARN_ROPE | {"attention_factor": 1.3}
    ),
    "llama biases, another eps": _case(
        "Llama", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3
    ),
    "gpt2": _case("GPT2"),
    "gpt2 untied, exact gelu": _case("GPT2", tie_word_embeddings=False, activation_function="gelu"),
    "mistral": _case("Mistral", sliding_window=5),
    "mistral without window": _case("Mistral", sliding_window=None, head_dim=6),
    "qwen2": _case("Qwen2"),
    "qwen2 windows, tied": _case("Qwen2", WINDOWED, tie_word_embeddings=True),
    "qwen2 yarn": _case("Qwen2", rope_parameters=YARN_ROPE | MSCALES),
    "qwen3": _case("Qwen3", head_dim=10),
    "qwen3 biases, windows": _case("Qwen3", WINDOWED, head_dim=10, attention_bias=True),
    "gemma2": _case("Gemma2", GEMMA2),
    "gemma2 untied, no caps": _case(
        "Gemma2", GEMMA, tie_word_embeddings=False, attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": _case("Gemma3", GEMMA3, rope_parameters=GEMMA3_ROPE),
    "gemma3 capped": _case("Gemma3", GEMMA3, final_logit_softcapping=2.0),
    "olmo2": _case("Olmo2", num_key_value_heads=6),
    "olmo2 grouped queries": _case("Olmo2", attention_bias=True),
    "phi3": _case("Phi3"),
    "phi3 windows, tied": _case("Phi3", sliding_window=5, tie_word_embeddings=True),
}  # fmt: skip


def randomised(model: Any) -> Any:
    """Biases and norms too are random: zeros and ones would hide a swapped pair."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model
