"""Hugging Face's words for our models: config.json in and out, and tensor names as data.

Owns the translation, and refuses by name what one side cannot express. It reads no file and knows
no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rankmesh.errors import CheckpointError
from rankmesh.specs.model import ModelSpec, RopeScaling, make_spec
from rankmesh.specs.placement import parts

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
_BASE_PREFIX = {"llama": "model.", "gpt2": "transformer."}
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# Buffers that older files carry; each is recomputed, none is a weight.
_BUFFER_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class HFTensor:
    """One Hugging Face tensor and what it is made of.

    The logical tensors `parts` stacked along dim 0, then transposed when `transpose` is set, give
    the tensor `name` of `shape`. Llama's are one part each; GPT-2's c_attn is q, k, v, and its
    matrices are [in, out].
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    transpose: bool


@dataclass(frozen=True)
class HFSource:
    """Where a logical tensor lies: rows from `offset` of tensor `name`, once that is transposed if
    need be."""

    name: str
    offset: int
    transpose: bool


@dataclass(frozen=True)
class _Rule:
    """Module `hf` holds the modules `ours`; `{}` stands for the layer number."""

    hf: str
    ours: tuple[str, ...]
    transpose: bool = False


_RULES: Mapping[str, tuple[_Rule, ...]] = {
    "llama": (
        _Rule("model.embed_tokens", ("embed",)),
        _Rule("model.layers.{}.input_layernorm", ("layers.{}.attn_norm",)),
        _Rule("model.layers.{}.self_attn.q_proj", ("layers.{}.attn.q",)),
        _Rule("model.layers.{}.self_attn.k_proj", ("layers.{}.attn.k",)),
        _Rule("model.layers.{}.self_attn.v_proj", ("layers.{}.attn.v",)),
        _Rule("model.layers.{}.self_attn.o_proj", ("layers.{}.attn.o",)),
        _Rule("model.layers.{}.post_attention_layernorm", ("layers.{}.mlp_norm",)),
        _Rule("model.layers.{}.mlp.gate_proj", ("layers.{}.mlp.gate",)),
        _Rule("model.layers.{}.mlp.up_proj", ("layers.{}.mlp.up",)),
        _Rule("model.layers.{}.mlp.down_proj", ("layers.{}.mlp.down",)),
        _Rule("model.norm", ("norm",)),
        _Rule("lm_head", ("head",)),
    ),
    "gpt2": (
        _Rule("transformer.wte", ("embed",)),
        _Rule("transformer.wpe", ("positions",)),
        _Rule("transformer.h.{}.ln_1", ("layers.{}.attn_norm",)),
        _Rule(
            "transformer.h.{}.attn.c_attn",
            ("layers.{}.attn.q", "layers.{}.attn.k", "layers.{}.attn.v"),
            transpose=True,
        ),
        _Rule("transformer.h.{}.attn.c_proj", ("layers.{}.attn.o",), transpose=True),
        _Rule("transformer.h.{}.ln_2", ("layers.{}.mlp_norm",)),
        _Rule("transformer.h.{}.mlp.c_fc", ("layers.{}.mlp.up",), transpose=True),
        _Rule("transformer.h.{}.mlp.c_proj", ("layers.{}.mlp.down",), transpose=True),
        _Rule("transformer.ln_f", ("norm",)),
        _Rule("lm_head", ("head",)),
    ),
}


def hf_tensors(spec: ModelSpec) -> tuple[HFTensor, ...]:
    """Every tensor of the Hugging Face form of `spec`; a tied head is not among them."""
    shapes = {part.name: part.shape for part in parts(spec)}
    found = []
    for rule, layer in _expanded(spec):
        for kind in ("weight", "bias"):
            names = tuple(f"{module.format(layer)}.{kind}" for module in rule.ours)
            if names[0] in shapes:
                rows = sum(shapes[name][0] for name in names)
                shape = (rows, *shapes[names[0]][1:])
                transpose = rule.transpose and len(shape) == 2
                found.append(
                    HFTensor(
                        name=f"{rule.hf.format(layer)}.{kind}",
                        shape=shape[::-1] if transpose else shape,
                        parts=names,
                        transpose=transpose,
                    )
                )
    return tuple(found)


def hf_sources(spec: ModelSpec) -> dict[str, HFSource]:
    """Logical name -> where it lies in the Hugging Face form of `spec`."""
    shapes = {part.name: part.shape for part in parts(spec)}
    sources = {}
    for tensor in hf_tensors(spec):
        offset = 0
        for name in tensor.parts:
            sources[name] = HFSource(tensor.name, offset, tensor.transpose)
            offset += shapes[name][0]
    return sources


def bare_name(spec: ModelSpec, name: str) -> str:
    """`name` as written by files that hold the base model alone, without its prefix."""
    return name.removeprefix(_BASE_PREFIX[spec.family])


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """True for tensors of a Hugging Face file that carry no weight of their own."""
    return name.endswith(_BUFFER_SUFFIXES) or (spec.tie_embeddings and name == "lm_head.weight")


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that a config.json stands for; absent keys have Hugging Face's own defaults.

    Raises CheckpointError naming the first option that a ModelSpec cannot express, ConfigError
    where the sizes do not fit each other.
    """
    family = config.get("model_type")
    if family not in tuple(_ARCHITECTURES):
        _refuse("model_type", family, _ARCHITECTURES)
    architectures = config.get("architectures") or [_ARCHITECTURES[family]]
    if _ARCHITECTURES[family] not in architectures:
        _refuse("architectures", architectures, [_ARCHITECTURES[family]])
    for key in ("quantization_config", "auto_map"):
        if config.get(key) is not None:
            raise CheckpointError(
                f"config.json: {key} is set; only plain {family} weights can be read"
            )
    return _llama_in(config) if family == "llama" else _gpt2_in(config)


def spec_to_hf(spec: ModelSpec) -> dict[str, Any]:
    """config.json of `spec`, in the form that transformers 4.43 and later read.

    Dropout has no place in a Llama config and is left out there: it does not change what the
    weights mean. Raises CheckpointError naming the first option that the architecture cannot
    express.
    """
    return _llama_out(spec) if spec.family == "llama" else _gpt2_out(spec)


def _expanded(spec: ModelSpec) -> Iterator[tuple[_Rule, int]]:
    """Rules in file order, a layer's rules together."""
    rules = _RULES[spec.family]
    layered = [rule for rule in rules if "{}" in rule.hf]
    yield from ((rule, 0) for rule in rules[: rules.index(layered[0])])
    yield from ((rule, layer) for layer in range(spec.num_layers) for rule in layered)
    yield from ((rule, 0) for rule in rules[rules.index(layered[-1]) + 1 :])


def _llama_in(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", config["hidden_act"], ["silu"])
    max_seq_len = config.get("max_position_embeddings", 2048)
    theta, scaling = _rope_in(config, max_seq_len)
    attention_bias = config.get("attention_bias", False)
    return make_spec(
        family="llama",
        num_layers=config.get("num_hidden_layers", 32),
        hidden_size=config.get("hidden_size", 4096),
        num_heads=config.get("num_attention_heads", 32),
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        ffn_size=config.get("intermediate_size", 11008),
        vocab_size=config.get("vocab_size", 32000),
        max_seq_len=max_seq_len,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", False),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=config.get("tie_word_embeddings", False),
        attention_dropout=config.get("attention_dropout", 0.0),
        init_std=config.get("initializer_range", 0.02),
    )


def _rope_in(config: Mapping[str, Any], max_seq_len: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        _refuse("rope_type", kind, ["default", "llama3"])
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        _refuse("partial_rotary_factor", partial, [1.0])
    if kind == "default":
        return theta, None
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if key not in rope:
            raise CheckpointError(f"config.json: rope_type llama3 needs {key}, which is missing")
    return theta, RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_seq_len=rope.get("original_max_position_embeddings", max_seq_len),
    )


def _gpt2_in(config: Mapping[str, Any]) -> ModelSpec:
    activation = config.get("activation_function", "gelu_new")
    if activation not in tuple(_ACTIVATIONS):
        _refuse("activation_function", activation, _ACTIVATIONS)
    fixed = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for key, value in fixed.items():
        if config.get(key, value) != value:
            _refuse(key, config[key], [value])
    dropout = config.get("resid_pdrop", 0.1)
    if config.get("embd_pdrop", 0.1) != dropout:
        _refuse("embd_pdrop", config.get("embd_pdrop", 0.1), [f"{dropout}, as resid_pdrop"])
    return make_spec(
        family="gpt2",
        num_layers=config.get("n_layer", 12),
        hidden_size=config.get("n_embd", 768),
        num_heads=config.get("n_head", 12),
        ffn_size=config.get("n_inner"),
        vocab_size=config.get("vocab_size", 50257),
        max_seq_len=config.get("n_positions", 1024),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        mlp=_ACTIVATIONS[activation],
        tie_embeddings=config.get("tie_word_embeddings", True),
        dropout=dropout,
        attention_dropout=config.get("attn_pdrop", 0.1),
        init_std=config.get("initializer_range", 0.02),
    )


def _llama_out(spec: ModelSpec) -> dict[str, Any]:
    if spec.qkv_bias != spec.out_bias:
        _cannot(
            spec, "out_bias", spec.out_bias, f"it shares one switch with qkv_bias {spec.qkv_bias}"
        )
    if spec.hidden_size % spec.num_heads:
        _cannot(spec, "num_heads", spec.num_heads, f"it must divide hidden_size {spec.hidden_size}")
    scaling = spec.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_dropout": spec.attention_dropout,
        "initializer_range": spec.init_std,
    }


def _gpt2_out(spec: ModelSpec) -> dict[str, Any]:
    for field in ("qkv_bias", "out_bias", "mlp_bias"):
        if not getattr(spec, field):
            _cannot(spec, field, False, "every linear layer has a bias there")
    if spec.num_kv_heads != spec.num_heads:
        _cannot(
            spec, "num_kv_heads", spec.num_kv_heads, f"it must equal num_heads {spec.num_heads}"
        )
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        _cannot(
            spec,
            "head_dim",
            spec.head_dim,
            f"num_heads * head_dim must be hidden_size {spec.hidden_size}",
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": spec.num_layers,
        "n_embd": spec.hidden_size,
        "n_head": spec.num_heads,
        "n_inner": spec.ffn_size,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_seq_len,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": {"gelu_tanh": "gelu_new", "gelu": "gelu"}[spec.mlp],
        "tie_word_embeddings": spec.tie_embeddings,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": spec.attention_dropout,
        "initializer_range": spec.init_std,
    }


def _refuse(key: str, value: object, allowed: Iterable[object]) -> NoReturn:
    raise CheckpointError(
        f"config.json: {key} is {value!r}; can be read: {', '.join(map(str, allowed))}"
    )


def _cannot(spec: ModelSpec, field: str, value: object, why: str) -> NoReturn:
    raise CheckpointError(
        f"model.{field} {value!r} cannot be written as {_ARCHITECTURES[spec.family]}: {why}"
    )
