"""Bytes of activations that a layer keeps for backward, term by term.

Owns the formulas, from spec and plan alone. They say what this package's layers save on the CPU:
each product, norm and kernel its inputs, each tensor once. Korthikanti et al. 2022
(arXiv:2205.05198), whose equations are `published`, count the same tensors and leave out
statistics; dropout masks, which they store, are derived here.

Letters: N tokens of a microbatch, B samples, T positions, H hidden, F feed-forward, h heads, Q and
K elements of a token's queries and of its keys; b bytes of an activation, w of fp32 or wider.
h, Q, K and F are those of one tp rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankmesh.errors import PlanError
from rankmesh.specs.model import GATED, ModelSpec
from rankmesh.specs.placement import param_table
from rankmesh.topology.plan import ParallelPlan

Terms = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ActivationShape:
    """What activations depend on beside model and plan: a microbatch, bytes of an element, whether
    dropout acts, and under sequence parallelism whether only slices of products' inputs are kept.
    """

    batch: int
    length: int
    dtype_bytes: int
    dropout: bool = True
    slices: bool = True

    @property
    def tokens(self) -> int:
        """N."""
        return self.batch * self.length

    @property
    def wide_bytes(self) -> int:
        """w."""
        return max(4, self.dtype_bytes)


@dataclass(frozen=True)
class _Sizes:
    """Those of one rank."""

    spec: ModelSpec
    shape: ActivationShape
    window: int
    heads: int
    query: int
    kv: int
    ffn: int
    stream: int  # tokens of the residual stream
    inputs: int  # tokens of the inputs of column products

    @property
    def explicit(self) -> bool:
        """Whether the scores are made as [h, T, T]: there is dropout on them, or a cap."""
        dropped = self.spec.attention_dropout > 0 and self.shape.dropout
        return dropped or self.spec.attention_softcap > 0

    @property
    def windowed(self) -> bool:
        """Whether the fused path cuts the queries into blocks."""
        return not self.explicit and 0 < self.window < self.shape.length

    @property
    def block(self) -> int:
        """Queries of a block."""
        return min(max(-(-self.window // 4), 64), self.shape.length)

    @property
    def blocks(self) -> int:
        """Blocks of a sample."""
        return -(-self.shape.length // self.block)


def layer_bytes(spec: ModelSpec, plan: ParallelPlan, shape: ActivationShape, layer: int = 0) -> int:
    """Bytes that one layer keeps for one microbatch on the first rank along tp, with what
    `plan.recompute` drops left out: the sum of `layer_terms`.
    """
    return sum(layer_terms(spec, plan, shape, layer).values())


def layer_terms(
    spec: ModelSpec, plan: ParallelPlan, shape: ActivationShape, layer: int = 0
) -> Terms:
    """Bytes of each tensor that the layer keeps, as if it were one that is recomputed; the first
    rank along tp has the largest share. Raises PlanError where cp splits the tokens.
    """
    if plan.cp > 1:
        raise PlanError(f"cp {plan.cp}: activation bytes cover tp and pp only")
    names = plan.recomputed(0, 0)
    sizes = _sizes(spec, plan, shape, layer)
    stream = sizes.stream * spec.hidden_size * shape.dtype_bytes
    if "block" in names:
        return {"layer input": stream}
    terms: Terms = {}
    for branch in ("attention", "mlp"):
        terms |= {f"{branch}: {what}": size for what, size in _branch(branch, sizes, names).items()}
    return terms


def deferred_bytes(
    spec: ModelSpec, plan: ParallelPlan, shape: ActivationShape, layer: int = 0
) -> int:
    """Bytes of a layer that a split backward keeps from I to W for one microbatch: each product's
    input and output gradient, whether the layer is recomputed or not.
    """
    sizes = _sizes(spec, plan, shape, layer)
    inward = 2 if spec.mlp in GATED else 1
    split = 2 * sizes.query + 2 * sizes.kv + (inward + 1) * sizes.ffn
    elements = shape.tokens * (split + 2 * spec.hidden_size) + 2 * sizes.inputs * spec.hidden_size
    return elements * shape.dtype_bytes


def _sizes(spec: ModelSpec, plan: ParallelPlan, shape: ActivationShape, layer: int) -> _Sizes:
    table = param_table(spec, plan)
    first = dict.fromkeys(("tp", "cp", "dp", "pp"), 0)

    def rows(name: str) -> int:
        return table[f"layers.0.{name}.weight"].local_shape(first)[0]

    query = rows("attn.q")
    stream = shape.tokens // (plan.tp if plan.sequence_parallel else 1)
    return _Sizes(
        spec=spec,
        shape=shape,
        window=spec.windows[layer],
        heads=query // spec.head_dim,
        query=query,
        kv=rows("attn.k"),
        ffn=rows("mlp.up"),
        stream=stream,
        inputs=stream if shape.slices else shape.tokens,
    )


def _branch(branch: str, sizes: _Sizes, names: frozenset[str]) -> Terms:
    """Norm before, products and what is between them, norm after."""
    spec, b = sizes.spec, sizes.shape.dtype_bytes
    before, after = spec.norm_place != "after", spec.norm_place != "before"
    terms = _norm(sizes, "norm") if before else {}
    if not (before and "norm" in names):
        terms["input of the products"] = sizes.inputs * spec.hidden_size * b
    if branch not in names:
        terms |= _mlp(sizes, names) if branch == "mlp" else _attention(sizes, names)
    return terms | (_norm(sizes, "norm after") if after else {})


def _norm(sizes: _Sizes, name: str) -> Terms:
    """Its input as it came, and the statistics of each row."""
    spec, b, w = sizes.spec, sizes.shape.dtype_bytes, sizes.shape.wide_bytes
    terms = {f"input of the {name}": sizes.stream * spec.hidden_size * b}
    if spec.norm == "layernorm":
        terms[f"mean and deviation of the {name}"] = 2 * sizes.stream * b
    else:
        terms[f"scale of the {name}"] = sizes.stream * w
    if spec.norm == "rmsnorm_1p":
        terms[f"weight + 1 of the {name}"] = spec.hidden_size * w
    return terms


def _mlp(sizes: _Sizes, names: frozenset[str]) -> Terms:
    inner = sizes.shape.tokens * sizes.ffn * sizes.shape.dtype_bytes
    terms = {"gate and up" if sizes.spec.mlp in GATED else "up": inner}
    if sizes.spec.mlp in GATED:
        terms["gate and up"] *= 2
    if "activation" not in names:
        terms["input of down"] = inner
    return terms


def _attention(sizes: _Sizes, names: frozenset[str]) -> Terms:
    tokens, b = sizes.shape.tokens, sizes.shape.dtype_bytes
    terms = _qk_norm(sizes) | {"q, k and v": tokens * (sizes.query + 2 * sizes.kv) * b}
    terms["input of o"] = tokens * sizes.query * b
    if sizes.windowed and sizes.shape.batch == 1:
        # A view of the kernel's output, which ends with a whole block.
        terms["input of o"] = sizes.blocks * sizes.block * sizes.query * b
    if "core" in names:
        return terms
    if sizes.explicit:
        return terms | _explicit(sizes)
    if sizes.windowed:
        return terms | _windowed(sizes)
    terms["output of the kernel"] = tokens * sizes.query * b
    terms["log of the sums"] = tokens * sizes.heads * sizes.shape.wide_bytes
    return terms


def _explicit(sizes: _Sizes) -> Terms:
    """Keys and values stand once for each query head."""
    shape, spec = sizes.shape, sizes.spec
    scores = shape.batch * sizes.heads * shape.length**2
    terms = {
        "q, k and v": 3 * shape.tokens * sizes.query * shape.dtype_bytes,
        "softmax": scores * shape.dtype_bytes,
    }
    if spec.attention_softcap:
        terms["tanh of the scores"] = scores * shape.wide_bytes
    if spec.attention_dropout and shape.dropout:
        terms["softmax after dropout"] = scores * shape.dtype_bytes
    return terms


def _windowed(sizes: _Sizes) -> Terms:
    """Blocks of queries, each with the keys and values that it can see, and a mask."""
    shape, b, block = sizes.shape, sizes.shape.dtype_bytes, sizes.block
    back, rows = sizes.window - 1, shape.batch * sizes.blocks
    # Overlapping stretches of one sample are views, those of several are copied; so is what goes
    # into o, but for one sample whose last block was filled up.
    seen = rows * (back + block) if shape.batch > 1 else back + sizes.blocks * block
    copied = shape.batch > 1 or shape.length % block == 0
    return {
        "q, k and v": (rows * block + 2 * seen) * sizes.query * b,
        "output of the kernel": rows * block * sizes.query * b * copied,
        "log of the sums": rows * block * sizes.heads * shape.wide_bytes,
        "mask": rows * block * (back + block) * b,
    }


def _qk_norm(sizes: _Sizes) -> Terms:
    """Over each head: input and a scale a head. Over all heads: inputs (the columns' whole output,
    or copies in w), their scale, the normed in w.
    """
    shape, spec = sizes.shape, sizes.spec
    tokens, b, w = shape.tokens, shape.dtype_bytes, shape.wide_bytes
    both = sizes.query + sizes.kv
    if spec.qk_norm == "head":
        terms = {
            "inputs of the q and k norms": tokens * both * b,
            "scales of the q and k norms": tokens * (both // spec.head_dim) * w,
        }
        if spec.norm == "rmsnorm_1p":
            terms["weights + 1 of the q and k norms"] = 2 * spec.head_dim * w
        return terms
    if spec.qk_norm == "all":
        return {
            "inputs of the q and k norms": tokens * (both + (sizes.kv if b == w else 0)) * w,
            "scales of the q and k norms": 2 * tokens * w,
            "normed q and k": tokens * both * w,
        }
    return {}


def published(
    *, s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False,
    recompute: str = "none", masks: bool = True,
) -> float:  # fmt: skip
    """Bytes a layer of the paper's GPT in 16 bits, its equations 1 to 6: s sequence, b microbatch,
    h hidden, a heads, t tensor parallel size. masks False leaves out those of dropout, a byte an
    element: 34 sbh + 5 a s^2 b becomes 32 sbh + 4 a s^2 b.
    """
    stream, scores = s * b * h, a * s * s * b
    if recompute == "full":
        return 2 * stream / (t if sequence_parallel else 1)
    # 4 norms' inputs, 4 products' inputs, 2 masks; 8 of attention (q k v, input of o), 16 of the
    # MLP (both ends of GELU).
    whole, split = 8 + 2 * masks, 24
    core = 0 if recompute == "selective" else (4 + masks) * scores / t
    return stream * (whole / (t if sequence_parallel else 1) + split / t) + core
