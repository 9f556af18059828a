"""Text from a model, one token at a time, in one process.

Owns loading a whole model from weights and the choice of the next token. It knows no tokenizer and
no mesh. Every step runs the whole context again: nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankmesh import nn
from rankmesh.checkpoint.source import WeightSource
from rankmesh.errors import ConfigError
from rankmesh.models.build import build


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    temperature: divides the logits; 0 takes the largest. top_k: only the k likeliest tokens, 0 for
    all. top_p: only the likeliest tokens that together hold this probability, 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; allowed: a number of at least 0")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; allowed: a whole number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; allowed: a number above 0 and at most 1")


def load_model(
    source: WeightSource, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> nn.Transformer:
    """The whole model of `source` on one device, in `dtype`."""
    model = build(source.spec, device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = tuple(slice(0, size) for size in parameter.shape)
            parameter.copy_(source.slice(name, whole))
    return model


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [V] of the next token from its logits [V]; tokens filtered out have none.

    Temperature acts first, then top_k, then top_p; the likeliest token always stays, and of equal
    ones the lower id comes first.
    """
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(torch.float64)
    scaled = logits.to(torch.float64) / sampling.temperature
    ranked, order = torch.sort(scaled, descending=True, stable=True)
    shares = ranked.softmax(0)
    if sampling.top_k:
        shares[sampling.top_k :] = 0
    shares /= shares.sum()
    if sampling.top_p < 1:
        before = shares.cumsum(0) - shares
        shares[before >= sampling.top_p] = 0
    return torch.zeros_like(shares).scatter(0, order, shares / shares.sum())


def generate(
    model: nn.Transformer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context: int,
    sampling: Sampling,
    seed: int = 0,
    vocab_size: int | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yields up to `max_new_tokens` token ids that follow `prompt`; ends at `stop_id`, not yielded.

    The model sees at most the last `context` tokens. Ids from `vocab_size` on (rows that the
    tokenizer does not use) are never drawn. Equal seeds draw equal tokens from equal logits, on any
    device. Raises ConfigError for an empty prompt or one with ids that the model lacks.
    """
    rows = model.head_weight.shape[0]
    if not prompt:
        raise ConfigError("the prompt has no tokens; at least one is needed")
    if not all(0 <= token < rows for token in prompt):
        raise ConfigError(f"the prompt has token {max(prompt)}; the model knows 0 to {rows - 1}")
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        window = torch.tensor(tokens[-context:], device=device)
        layout = nn.Layout.plain(1, len(window), device=device)
        with torch.no_grad():
            hidden, _ = model(window, layout)
            logits = model.logits(hidden[-1:])[0, :vocab_size].cpu()
        token = int(torch.multinomial(probabilities(logits, sampling), 1, generator=generator))
        if token == stop_id:
            return
        tokens.append(token)
        yield token
