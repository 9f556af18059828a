"""Parameter counts in closed form.

Owns the formulas. It looks at no parameter table: that the two agree is a test.

Letters: V vocabulary, P positions, H hidden, F feed-forward, L layers, Q = num_heads * head_dim,
K = num_kv_heads * head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankmesh.specs.model import GATED, ModelSpec


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Parameters of a whole model by kind, each logical element once.

    embedding: token and position tables. attention, mlp: matrices and biases of all layers, and the
    norms of queries and keys. norms: weights and biases of all others. head: the output matrix, 0
    where it is the embedding.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def count_params(spec: ModelSpec) -> ParamCount:
    """VH (+ PH) + L (attention + mlp + 2 or 4 norms) + norm (+ VH), with the biases and norms of
    queries and keys that the spec has.
    """
    hidden, layers = spec.hidden_size, spec.num_layers
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norm = hidden * (2 if spec.norm == "layernorm" else 1)
    # A gated MLP has two matrices into the inner width instead of one.
    inward = 2 if spec.mlp in GATED else 1
    attention = hidden * (query + 2 * kv) + query * hidden
    attention += spec.qkv_bias * (query + 2 * kv) + spec.out_bias * hidden
    attention += {"none": 0, "head": 2 * spec.head_dim, "all": query + kv}[spec.qk_norm]
    mlp = (inward + 1) * hidden * spec.ffn_size
    mlp += spec.mlp_bias * (inward * spec.ffn_size + hidden)
    positions = spec.max_seq_len if spec.positions == "learned" else 0
    return ParamCount(
        embedding=(spec.vocab_size + positions) * hidden,
        attention=layers * attention,
        mlp=layers * mlp,
        norms=((4 if spec.norm_place == "around" else 2) * layers + 1) * norm,
        head=0 if spec.tie_embeddings else spec.vocab_size * hidden,
    )


def matmul_params(spec: ModelSpec) -> int:
    """Matrix elements that each token is multiplied with: no tables, norms or biases; the head,
    also if tied.
    """
    hidden = spec.hidden_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = 3 if spec.mlp in GATED else 2
    layer = 2 * hidden * (query + kv) + matrices * hidden * spec.ffn_size
    return spec.num_layers * layer + spec.vocab_size * hidden
