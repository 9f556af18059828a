"""ModelSpec: the shape of a model as one frozen value, checked when it is made.

Owns the fields and every check between them. It knows no torch, no placement and no preset.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from rankmesh.errors import ConfigError
from rankmesh.specs.families import FAMILIES, Family

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "family": tuple(FAMILIES),
    "norm": ("rmsnorm", "layernorm"),
    "mlp": ("swiglu", "gelu_tanh", "gelu"),
    "positions": ("rotary", "learned"),
}
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
_SWITCHES = ("qkv_bias", "out_bias", "mlp_bias", "tie_embeddings", "scale_residual_init")
_REQUIRED = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies: low ones are divided by `factor`, high ones kept.

    Between them lies a ramp.

    original_max_seq_len: the context in tokens that the model was first trained with.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_number(f"rope_scaling.{name}", getattr(self, name), low=0.0, open_low=True)
        if not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"model.rope_scaling: low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        _check_size("rope_scaling.original_max_seq_len", self.original_max_seq_len)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer; equal by value, free of torch.

    Sizes are unpadded. `ffn_size` is the width inside the MLP, `max_seq_len` the longest sequence
    in tokens (with learned positions also the number of position embeddings). `dropout` acts on the
    embedding and on both residual branches, `attention_dropout` on attention weights. `init_std` is
    the standard deviation of matrices; `scale_residual_init` divides it by sqrt(2 * num_layers) for
    attn.o and mlp.down. Raises ConfigError, in one line, when fields do not fit each other.
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
    norm: Literal["rmsnorm", "layernorm"]
    norm_eps: float
    mlp: Literal["swiglu", "gelu_tanh", "gelu"]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    positions: Literal["rotary", "learned"]
    tie_embeddings: bool
    scale_residual_init: bool
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}"
                )
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"model.{name} is {getattr(self, name)!r}; allowed: true, false")
        for name in ("dropout", "attention_dropout"):
            _check_number(name, getattr(self, name), low=0.0, high=1.0)
        for name in ("norm_eps", "rope_theta"):
            _check_number(name, getattr(self, name), low=0.0, open_low=True)
        _check_number("init_std", self.init_std, low=0.0)
        self._check_family(FAMILIES[self.family])
        self._check_heads()

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
        if self.positions == "rotary" and self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim {self.head_dim} is odd; rotary positions need an even one"
            )
        if self.rope_scaling is not None and self.positions != "rotary":
            raise ConfigError(f"model.rope_scaling needs rotary positions, not {self.positions}")

    @property
    def query_groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON values; `make_spec(**spec.to_dict())` equals the spec."""
        return asdict(self)


SPEC_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(ModelSpec))


def make_spec(**given: Any) -> ModelSpec:
    """A spec from the fields that a user gives; the family fills in the rest.

    Needed: family, num_layers, hidden_size, num_heads, vocab_size, max_seq_len. num_kv_heads
    defaults to num_heads, head_dim to hidden_size / num_heads, ffn_size to the family's ratio.
    `rope_scaling` may be a mapping of its fields. A value of None stands for "not given". Raises
    ConfigError in one line.
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
        _check_size(name, known[name])
    family = FAMILIES[known["family"]]
    filled = {**family.defaults, **known}
    filled.setdefault("num_kv_heads", filled["num_heads"])
    filled.setdefault("ffn_size", family.default_ffn_size(filled["hidden_size"]))
    if "head_dim" not in filled:
        filled["head_dim"] = _default_head_dim(filled["hidden_size"], filled["num_heads"])
    scaling = filled.get("rope_scaling")
    if isinstance(scaling, Mapping):
        filled["rope_scaling"] = _make_scaling(scaling)
    elif scaling is not None and not isinstance(scaling, RopeScaling):
        raise ConfigError(f"model.rope_scaling is {scaling!r}; allowed: a table of its fields")
    return ModelSpec(**filled)


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known name, else the whole list."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


def _default_head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ConfigError(
            f"model.num_heads {num_heads} does not divide hidden_size {hidden_size}; "
            "change one of them or give model.head_dim"
        )
    return hidden_size // num_heads


def _make_scaling(given: Mapping[str, Any]) -> RopeScaling:
    names = tuple(field.name for field in fields(RopeScaling))
    for name in given:
        if name not in names:
            raise ConfigError(f"model.rope_scaling.{name} is not a field{nearest(name, names)}")
    for name in names:
        if name not in given:
            raise ConfigError(f"model.rope_scaling.{name} is missing")
    return RopeScaling(**given)


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model.{name} is {value!r}; allowed: a whole number of at least 1")


def _check_number(
    name: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Refuse what is not a finite number in [low, high), or in (low, high) when `open_low`."""
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (low < value if open_low else low <= value)
        and value < high
    )
    if not fits:
        above = f"above {low:g}" if open_low else f"of at least {low:g}"
        below = "" if high == math.inf else f" and below {high:g}"
        raise ConfigError(f"model.{name} is {value!r}; allowed: a number {above}{below}")
