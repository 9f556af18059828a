"""Single-device model code: plain modules that run on a laptop and know no process group.

Shape letters: N tokens of this rank in (sample, position) order, B samples, T tokens a sample, H
hidden, D head dim, V vocabulary.
"""

from rankmesh.nn.attention import Attention
from rankmesh.nn.dropout import DropoutKey, dropout, keep_mask
from rankmesh.nn.layers import Embedding, LayerNorm, Linear, RMSNorm
from rankmesh.nn.layout import Layout
from rankmesh.nn.loss import IGNORED, LossOptions
from rankmesh.nn.mlp import MLP
from rankmesh.nn.parts import Parts, Piece
from rankmesh.nn.rotary import Rotary, RotaryScaling, rotate
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
    "LayerNorm",
    "Layout",
    "Linear",
    "LossOptions",
    "Parts",
    "Piece",
    "RMSNorm",
    "Rotary",
    "RotaryScaling",
    "Transformer",
    "causal_attention",
    "dropout",
    "keep_mask",
    "rotate",
]
