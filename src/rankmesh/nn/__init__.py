"""Single-device model code: plain modules that run on a laptop and know no process group.

Shape letters: N tokens of this rank in (sample, position) order, B samples, T tokens a sample, H
hidden, D head dim, V vocabulary.
"""

from rankmesh.nn.attention import Attention
from rankmesh.nn.dropout import DropoutKey, dropout, keep_mask
from rankmesh.nn.layers import Embedding, LayerNorm, Linear, RMSNorm, RMSNorm1p
from rankmesh.nn.layout import Layout
from rankmesh.nn.loss import IGNORED, LossOptions
from rankmesh.nn.mlp import MLP
from rankmesh.nn.parts import Parts, Piece
from rankmesh.nn.qk_norm import HeadNorms, ProjectionNorms
from rankmesh.nn.rotary import Rotary, frequencies, llama3_scaled, rotate, yarn_scaled
from rankmesh.nn.softcap import soft_cap
from rankmesh.nn.softmax import AttentionOptions, causal_attention
from rankmesh.nn.transformer import Block, Transformer

__all__ = [
    "IGNORED",
    "MLP",
    "Attention",
    "AttentionOptions",
    "Block",
    "DropoutKey",
    "Embedding",
    "HeadNorms",
    "LayerNorm",
    "Layout",
    "Linear",
    "LossOptions",
    "Parts",
    "Piece",
    "ProjectionNorms",
    "RMSNorm",
    "RMSNorm1p",
    "Rotary",
    "Transformer",
    "causal_attention",
    "dropout",
    "frequencies",
    "keep_mask",
    "llama3_scaled",
    "rotate",
    "soft_cap",
    "yarn_scaled",
]
