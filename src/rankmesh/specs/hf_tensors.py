"""Hugging Face's names of tensors, as data: which logical tensors each one holds, and how.

Owns the name maps and the files' layouts (fused, transposed). It reads no file and knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rankmesh.errors import CheckpointError
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.placement import parts

TIED_HEAD = "lm_head.weight"

# Buffers that older files carry; each is recomputed, none is a weight.
_BUFFER_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class HFTensor:
    """One Hugging Face tensor and what it is made of.

    The logical tensors `parts` stacked along dim 0, then transposed when `transpose` is set, give
    the tensor `name` of `shape`. Most have one part; GPT-2's c_attn and Phi-3's qkv_proj are q, k,
    v, and GPT-2's matrices are [in, out].
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
    """Module `hf` holds the modules `ours`; both stand inside a layer where `layer` is set."""

    hf: str
    ours: tuple[str, ...]
    transpose: bool = False
    layer: bool = True


def _outer(hf: str, ours: str) -> _Rule:
    return _Rule(hf, (ours,), layer=False)


_EMBED = _outer("model.embed_tokens", "embed")
_END = (_outer("model.norm", "norm"), _outer("lm_head", "head"))
_QKV = tuple(_Rule(f"self_attn.{one}_proj", (f"attn.{one}",)) for one in "qkv")
_QK_NORM = tuple(_Rule(f"self_attn.{one}_norm", (f"attn.qk_norm.{one}",)) for one in "qk")
_OUT = _Rule("self_attn.o_proj", ("attn.o",))
_MLP = tuple(_Rule(f"mlp.{one}_proj", (f"mlp.{one}",)) for one in ("gate", "up", "down"))
_PRE = _Rule("input_layernorm", ("attn_norm",))

_LLAMA = (
    _EMBED, _PRE, *_QKV, *_QK_NORM, _OUT,
    _Rule("post_attention_layernorm", ("mlp_norm",)),
    *_MLP, *_END,
)  # fmt: skip
_GEMMA = (
    _EMBED, _PRE, *_QKV, *_QK_NORM, _OUT,
    _Rule("post_attention_layernorm", ("attn_post_norm",)),
    _Rule("pre_feedforward_layernorm", ("mlp_norm",)),
    *_MLP,
    _Rule("post_feedforward_layernorm", ("mlp_post_norm",)),
    *_END,
)  # fmt: skip
_PHI3 = (
    _EMBED, _PRE,
    _Rule("self_attn.qkv_proj", ("attn.q", "attn.k", "attn.v")),
    _OUT,
    _Rule("post_attention_layernorm", ("mlp_norm",)),
    _Rule("mlp.gate_up_proj", ("mlp.gate", "mlp.up")),
    _Rule("mlp.down_proj", ("mlp.down",)),
    *_END,
)  # fmt: skip
_GPT2 = (
    _outer("transformer.wte", "embed"),
    _outer("transformer.wpe", "positions"),
    _Rule("ln_1", ("attn_norm",)),
    _Rule("attn.c_attn", ("attn.q", "attn.k", "attn.v"), transpose=True),
    _Rule("attn.c_proj", ("attn.o",), transpose=True),
    _Rule("ln_2", ("mlp_norm",)),
    _Rule("mlp.c_fc", ("mlp.up",), transpose=True),
    _Rule("mlp.c_proj", ("mlp.down",), transpose=True),
    _outer("transformer.ln_f", "norm"),
    _outer("lm_head", "head"),
)


# A rule whose modules a spec lacks is passed over, so one list serves families with and without
# q/k norms, biases or a norm before the branch (OLMo 2 has only those after it).
_RULES: Mapping[str, tuple[_Rule, ...]] = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": _GEMMA,
    "phi3": _PHI3,
}


def hf_tensors(spec: ModelSpec) -> tuple[HFTensor, ...]:
    """Every tensor of the Hugging Face form of `spec`; a tied head is not among them.

    Raises CheckpointError for a tensor of the model that the form has no place for.
    """
    shapes = {part.name: part.shape for part in parts(spec)}
    found = []
    for rule, prefix, hf_prefix in _expanded(spec):
        for kind in ("weight", "bias"):
            names = tuple(f"{prefix}{module}.{kind}" for module in rule.ours)
            if names[0] in shapes:
                rows = sum(shapes[name][0] for name in names)
                shape = (rows, *shapes[names[0]][1:])
                transpose = rule.transpose and len(shape) == 2
                found.append(
                    HFTensor(
                        name=f"{hf_prefix}{rule.hf}.{kind}",
                        shape=shape[::-1] if transpose else shape,
                        parts=names,
                        transpose=transpose,
                    )
                )
    homeless = set(shapes).difference(*(tensor.parts for tensor in found))
    if homeless:
        raise CheckpointError(f"tensor {min(homeless)} has no place in a {spec.family} folder")
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
    return name.removeprefix("transformer." if spec.family == "gpt2" else "model.")


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """True for tensors of a Hugging Face file that carry no weight of their own."""
    return name.endswith(_BUFFER_SUFFIXES) or (spec.tie_embeddings and name == TIED_HEAD)


def _expanded(spec: ModelSpec) -> Iterator[tuple[_Rule, str, str]]:
    """(rule, our prefix, their prefix) in file order, a layer's rules together."""
    rules = _RULES[spec.family]
    layered = [rule for rule in rules if rule.layer]
    theirs = "transformer.h" if spec.family == "gpt2" else "model.layers"
    yield from ((rule, "", "") for rule in rules[: rules.index(layered[0])])
    for layer in range(spec.num_layers):
        yield from ((rule, f"layers.{layer}.", f"{theirs}.{layer}.") for rule in layered)
    yield from ((rule, "", "") for rule in rules[rules.index(layered[-1]) + 1 :])
