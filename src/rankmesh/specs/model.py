"""ModelSpec: the shape of a model as one frozen value, checked when it is made.

Owns the fields and every check between them. It knows no torch, no placement and no preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from rankmesh.errors import ConfigError
from rankmesh.specs.checks import check_number, check_size, nearest
from rankmesh.specs.families import FAMILIES, Family
from rankmesh.specs.rope import RopeScaling, make_scaling

_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
    "max_seq_len",
)
_SWITCHES = (
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "tie_embeddings",
    "scale_embedding",
    "scale_residual_init",
)
GATED = ("swiglu", "geglu_tanh")  # kinds of MLP with a gate beside `up`
_REQUIRED = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer; equal by value, free of torch.

    Sizes are unpadded. `ffn_size` is the width inside the MLP, `max_seq_len` the longest sequence
    in tokens (with learned positions also the number of position embeddings).

    norm_place: where a layer's norms stand, before its attention and its MLP, after each, or
    around. "rmsnorm_1p" stores weights less one. qk_norm: RMS norms of queries and keys, over each
    "head" with one weight for all heads, or over "all" heads at once.

    window: positions that a token of a local layer attends to, its own included; 0 = all before
    it. window_pattern: L (local) and G (global), repeated over the layers. rope_local_theta: theta
    of local layers, which are then not scaled; 0 = they are like global ones. Scores are divided
    by the root of query_scalar; 0 stands for head_dim. A soft cap c turns x into c tanh(x / c);
    0 = none. scale_embedding: times the root of hidden_size.

    `dropout` acts on the embedding and on both residual branches, `attention_dropout` on attention
    weights. `init_std` is the standard deviation of matrices; `scale_residual_init` divides it by
    sqrt(2 * num_layers) for attn.o and mlp.down. Raises ConfigError, in one line, when fields do
    not fit each other.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_seq_len: int
    norm: Literal["rmsnorm", "rmsnorm_1p", "layernorm"]
    norm_eps: float
    norm_place: Literal["before", "after", "around"] = "before"
    qk_norm: Literal["none", "head", "all"] = "none"
    mlp: Literal["swiglu", "geglu_tanh", "gelu_tanh", "gelu"]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    positions: Literal["rotary", "learned"]
    window: int = 0
    window_pattern: str = "L"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float = 0.0
    query_scalar: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    tie_embeddings: bool
    scale_embedding: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    scale_residual_init: bool

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}"
                )
        for name in _SIZES:
            check_size(name, getattr(self, name))
        check_size("window", self.window, least=0)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"model.{name} is {getattr(self, name)!r}; allowed: true, false")
        for name in ("dropout", "attention_dropout"):
            check_number(name, getattr(self, name), low=0.0, high=1.0)
        for name in ("norm_eps", "rope_theta"):
            check_number(name, getattr(self, name), low=0.0, open_low=True)
        for name in (
            "init_std", "rope_local_theta", "query_scalar", "attention_softcap", "logit_softcap"
        ):  # fmt: skip
            check_number(name, getattr(self, name), low=0.0)
        self._check_family(FAMILIES[self.family])
        self._check_heads()
        self._check_positions()

    def _check_family(self, family: Family) -> None:
        for name, allowed in family.allowed.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)!r}; family {family.name} allows: "
                    f"{', '.join(map(str, allowed))}"
                )

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ConfigError(
                f"model.num_kv_heads {self.num_kv_heads} does not divide num_heads "
                f"{self.num_heads}; allowed: {', '.join(map(str, divisors))}"
            )
        if self.qk_norm == "all" and self.norm != "rmsnorm":
            raise ConfigError(f"model.qk_norm all needs norm rmsnorm, not {self.norm}")

    def _check_positions(self) -> None:
        rotary = self.positions == "rotary"
        if rotary and self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim {self.head_dim} is odd; rotary positions need an even one"
            )
        for name in ("rope_scaling", "rope_local_theta"):
            if getattr(self, name) and not rotary:
                raise ConfigError(f"model.{name} needs rotary positions, not {self.positions}")
        pattern: object = self.window_pattern
        if not isinstance(pattern, str) or not pattern or set(pattern) - {"L", "G"}:
            raise ConfigError(
                f"model.window_pattern is {pattern!r}; allowed: letters L (local) and G (global)"
            )

    @property
    def query_groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0 where it is global."""
        pattern = self.window_pattern
        return tuple(
            self.window if pattern[layer % len(pattern)] == "L" else 0
            for layer in range(self.num_layers)
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON values; `make_spec(**spec.to_dict())` equals the spec."""
        return asdict(self)


SPEC_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(ModelSpec))

CHOICES: Mapping[str, tuple[str, ...]] = {"family": tuple(FAMILIES)} | {
    name: get_args(get_type_hints(ModelSpec)[name])
    for name in ("norm", "norm_place", "qk_norm", "mlp", "positions")
}


def make_spec(**given: Any) -> ModelSpec:
    """A spec from the fields that a user gives; the family fills in the rest.

    Needed: family, num_layers, hidden_size, num_heads, vocab_size, max_seq_len. num_kv_heads
    defaults to num_heads, head_dim to hidden_size / num_heads, ffn_size to the family's ratio.
    `rope_scaling` may be a mapping of its fields. window_pattern is cut to its shortest form. A
    value of None stands for "not given". Raises ConfigError in one line.
    """
    known = {name: value for name, value in given.items() if value is not None}
    for name in known:
        if name not in SPEC_FIELDS:
            raise ConfigError(f"model.{name} is not a field{nearest(name, SPEC_FIELDS)}")
    if known.get("family") not in tuple(FAMILIES):
        raise ConfigError(
            f"model.family is {known.get('family')!r}; allowed: {', '.join(FAMILIES)}"
        )
    for name in _REQUIRED:
        if name not in known:
            raise ConfigError(f"model.{name} is missing; a model without a preset needs it")
        check_size(name, known[name])
    family = FAMILIES[known["family"]]
    filled = {**family.defaults, **known}
    filled.setdefault("num_kv_heads", filled["num_heads"])
    filled.setdefault("ffn_size", family.default_ffn_size(filled["hidden_size"]))
    if "head_dim" not in filled:
        filled["head_dim"] = _default_head_dim(filled["hidden_size"], filled["num_heads"])
    scaling = filled.get("rope_scaling")
    if isinstance(scaling, Mapping):
        filled["rope_scaling"] = make_scaling(scaling)
    elif scaling is not None and not isinstance(scaling, RopeScaling):
        raise ConfigError(f"model.rope_scaling is {scaling!r}; allowed: a table of its fields")
    pattern = filled.get("window_pattern")
    if isinstance(pattern, str) and pattern:
        filled["window_pattern"] = shortest_pattern(pattern, filled["num_layers"])
    return ModelSpec(**filled)


def shortest_pattern(pattern: str, num_layers: int) -> str:
    """The shortest pattern that gives the same letters to `num_layers` layers."""
    # What repeats over two rounds of the pattern repeats for ever.
    seen = (pattern * 2)[:num_layers]
    lengths = range(1, min(len(pattern), num_layers) + 1)
    return next(seen[:n] for n in lengths if (seen[:n] * len(seen))[: len(seen)] == seen)


def _default_head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ConfigError(
            f"model.num_heads {num_heads} does not divide hidden_size {hidden_size}; "
            "change one of them or give model.head_dim"
        )
    return hidden_size // num_heads
