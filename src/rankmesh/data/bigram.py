"""A smoothed bigram model: the loss that a language model must beat to have learnt anything.

Owns counting, smoothing and the choice between smoothings; numpy only. It must not know token
files.

Letters: c(a, b) = how often b follows a; c(a) = sum over b; V = vocabulary; N = pairs. Lower
order: u(b) = (c(b) + 1/2) / (N + V/2), from how often b occurs, or the same from the number of
different tokens that b follows (Kneser-Ney). Dirichlet: p(b|a) = (c(a, b) + s u(b)) / (c(a) + s).
Discount: p(b|a) = (max(c(a, b) - s, 0) + s t(a) u(b)) / c(a), t(a) = number of different tokens
after a; u(b) where a never occurred. All of them sum to 1 over b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rankmesh.errors import DataError

Tokens = NDArray[np.integer[Any]]

# Of the training tokens, this share at their end chooses the smoothing.
_CHOOSING_SHARE = 0.1


@dataclass(frozen=True)
class Smoothing:
    """One way to spread probability to unseen pairs; `strength` is the s of the formulas above."""

    kind: Literal["dirichlet", "discount", "kneser-ney"]
    strength: float


CANDIDATES = (
    *(Smoothing("dirichlet", strength) for strength in (1.0, 10.0, 30.0, 100.0, 300.0)),
    *(Smoothing("discount", strength) for strength in (0.5, 0.7, 0.8, 0.9)),
    *(Smoothing("kneser-ney", strength) for strength in (0.5, 0.7, 0.8, 0.9)),
)


@dataclass(frozen=True)
class BigramLoss:
    """Mean negative log-likelihood on the validation pairs, nats a token; how it came about."""

    loss: float
    smoothing: Smoothing
    unigram_loss: float
    train_tokens: int
    valid_tokens: int


class Bigram:
    """Counts of the pairs in tokens [N + 1]; memory grows with the number of different pairs."""

    def __init__(self, tokens: Tokens, vocab_size: int) -> None:
        first, second = _pairs(tokens, vocab_size)
        self.vocab_size = vocab_size
        self.num_pairs = first.size
        self._keys, self._counts = np.unique(first * vocab_size + second, return_counts=True)
        self._context = np.bincount(first, minlength=vocab_size)
        self._followers = np.bincount(self._keys // vocab_size, minlength=vocab_size)
        self._lower = {
            "occurrences": self._distribution(np.bincount(second, minlength=vocab_size)),
            "histories": self._distribution(
                np.bincount(self._keys % vocab_size, minlength=vocab_size)
            ),
        }

    def probabilities(
        self, first: Tokens, second: Tokens, smoothing: Smoothing
    ) -> NDArray[np.float64]:
        """p(second | first) for arrays [P] of ids in [0, V): [P], never 0."""
        count = self._lookup(first.astype(np.int64) * self.vocab_size + second)
        context = self._context[first].astype(np.float64)
        s = smoothing.strength
        lower = self._lower["histories" if smoothing.kind == "kneser-ney" else "occurrences"][
            second
        ]
        if smoothing.kind == "dirichlet":
            return (count + s * lower) / (context + s)
        kept = np.maximum(count - s, 0.0) + s * self._followers[first] * lower
        return np.where(context > 0, kept / np.maximum(context, 1.0), lower)

    def loss(self, tokens: Tokens, smoothing: Smoothing) -> float:
        """Mean of -log p over the pairs of tokens [P + 1], in nats."""
        first, second = _pairs(tokens, self.vocab_size)
        return float(-np.log(self.probabilities(first, second, smoothing)).mean())

    def unigram_loss(self, tokens: Tokens) -> float:
        """Mean of -log u over all tokens but the first: the targets of `loss` without context."""
        _, second = _pairs(tokens, self.vocab_size)
        return float(-np.log(self._lower["occurrences"][second]).mean())

    def _lookup(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        place = np.minimum(np.searchsorted(self._keys, keys), self._keys.size - 1)
        return np.where(self._keys[place] == keys, self._counts[place], 0).astype(np.float64)

    def _distribution(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        smoothed = counts.astype(np.float64) + 0.5
        return smoothed / float(smoothed.sum())


def bigram_loss(train: Tokens, valid: Tokens, vocab_size: int) -> BigramLoss:
    """Loss on `valid` of a bigram model of `train`, smoothed as the end of `train` prefers.

    The validation tokens take no part in that choice; the counts are then taken from all of
    `train`. About 2 s for 5 million tokens. Raises DataError for fewer than 100 training or 2
    validation tokens, or ids outside [0, V).
    """
    if train.size < 100 or valid.size < 2:
        raise DataError(
            f"a bigram model needs 100 training and 2 validation tokens, "
            f"not {train.size} and {valid.size}"
        )
    cut = round(train.size * (1 - _CHOOSING_SHARE))
    trial = Bigram(train[:cut], vocab_size)
    best = min(CANDIDATES, key=lambda smoothing: trial.loss(train[cut:], smoothing))
    model = Bigram(train, vocab_size)
    return BigramLoss(
        loss=model.loss(valid, best),
        smoothing=best,
        unigram_loss=model.unigram_loss(valid),
        train_tokens=int(train.size),
        valid_tokens=int(valid.size),
    )


def _pairs(tokens: Tokens, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids = np.asarray(tokens, dtype=np.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise DataError(f"token ids {low} to {high} do not fit a vocabulary of {vocab_size}")
    return ids[:-1], ids[1:]
