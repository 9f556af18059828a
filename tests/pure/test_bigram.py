"""Owns the proof of the bigram baseline: true probabilities, an honest choice, enough speed."""

import math
import time
from collections import Counter

import numpy as np
import pytest

from rankmesh.data.bigram import CANDIDATES, Bigram, Smoothing, bigram_loss
from rankmesh.errors import DataError


def sequence(size: int, vocab_size: int, seed: int) -> np.ndarray:
    """Tokens in which the next one hangs on the last: a few followers for each, by a power law."""
    rng = np.random.default_rng(seed)
    followers = np.random.default_rng(99).integers(0, vocab_size, (vocab_size, 20))
    choice = np.minimum(rng.zipf(1.6, size) - 1, 19)
    tokens = np.empty(size, dtype=np.uint16)
    token = 0
    for i in range(size):
        tokens[i] = token
        token = followers[token, choice[i]]
    return tokens


@pytest.mark.parametrize("smoothing", CANDIDATES)
def test_probabilities_sum_to_one(smoothing: Smoothing) -> None:
    """After every token, seen in training or not."""
    vocab_size = 50
    tokens = sequence(400, 40, 0)
    model = Bigram(tokens, vocab_size)
    everything = np.arange(vocab_size)
    for first in range(vocab_size):
        found = model.probabilities(np.full(vocab_size, first), everything, smoothing)
        assert found.min() > 0
        assert found.sum() == pytest.approx(1.0, abs=1e-12)


def test_an_example_by_hand() -> None:
    """0 1 0 1 1 2: after 1 come 0, 1 and 2, once each; u(2) = 1.5 / 6.5 among the 5 targets."""
    model = Bigram(np.array([0, 1, 0, 1, 1, 2]), 3)
    first, second = np.array([1, 0, 2]), np.array([2, 2, 2])
    u2 = 1.5 / 6.5
    found = model.probabilities(first, second, Smoothing("dirichlet", 2.0))
    assert found == pytest.approx([(1 + 2 * u2) / 5, 2 * u2 / 4, u2])
    found = model.probabilities(first, second, Smoothing("discount", 0.6))
    assert found == pytest.approx([(0.4 + 0.6 * 3 * u2) / 3, 0.6 * u2 / 2, u2])
    # Of the 4 different pairs (0,1) (1,0) (1,1) (1,2), one ends in 2.
    v2 = 1.5 / 5.5
    found = model.probabilities(first, second, Smoothing("kneser-ney", 0.6))
    assert found == pytest.approx([(0.4 + 0.6 * 3 * v2) / 3, 0.6 * v2 / 2, v2])


def test_the_loss_equals_a_plain_loop() -> None:
    """Counted with dictionaries."""
    train, valid = sequence(3000, 30, 1).tolist(), sequence(500, 30, 2).tolist()
    pairs = Counter(zip(train, train[1:], strict=False))
    context, target = Counter(train[:-1]), Counter(train[1:])
    followers = Counter(a for a, _ in pairs)
    total = 0.0
    for a, b in zip(valid, valid[1:], strict=False):
        lower = (target[b] + 0.5) / (len(train) - 1 + 0.5 * 30)
        kept = max(pairs[a, b] - 0.7, 0) + 0.7 * followers[a] * lower
        total -= math.log(kept / context[a] if context[a] else lower)
    model = Bigram(np.array(train), 30)
    found = model.loss(np.array(valid), Smoothing("discount", 0.7))
    assert found == pytest.approx(total / (len(valid) - 1), rel=1e-12)


def test_the_smoothing_is_chosen_without_the_validation_tokens() -> None:
    """Other validation tokens change the loss and not the choice."""
    train = sequence(20_000, 200, 3)
    first = bigram_loss(train, sequence(2_000, 200, 4), 200)
    second = bigram_loss(train, np.zeros(2_000, dtype=np.uint16), 200)
    assert first.smoothing == second.smoothing
    assert first.loss != second.loss
    cut = round(train.size * 0.9)
    trial = Bigram(train[:cut], 200)
    losses = {smoothing: trial.loss(train[cut:], smoothing) for smoothing in CANDIDATES}
    assert losses[first.smoothing] == min(losses.values())


def test_the_baseline_is_a_strong_one() -> None:
    """It nears the entropy of a source that is a bigram model, far below its unigram loss."""
    valid = sequence(20_000, 100, 6)
    found = bigram_loss(sequence(200_000, 100, 5), valid, 100)
    ideal = Bigram(sequence(1_000_000, 100, 7), 100).loss(valid, Smoothing("discount", 0.1))
    assert ideal < found.loss < ideal + 0.02
    assert found.loss < found.unigram_loss - 1
    assert (found.train_tokens, found.valid_tokens) == (200_000, 20_000)


def test_a_million_tokens_take_a_second() -> None:
    """At a vocabulary whose full table would take half a gigabyte; the limit is ten times that."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.2, 1_000_000), 8_191).astype(np.uint16)
    start = time.process_time()
    found = bigram_loss(tokens, tokens[:200_000], 8_192)
    assert 0 < found.loss < math.log(8_192)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("train", "valid", "words"),
    [
        (np.zeros(99, int), np.zeros(9, int), "100 training and 2 validation tokens, not 99 and 9"),
        (np.zeros(999, int), np.zeros(1, int), "not 999 and 1"),
        (np.full(999, 8), np.zeros(9, int), "token ids 8 to 8 do not fit a vocabulary of 8"),
        (np.zeros(999, int), np.array([0, -1]), "token ids -1 to 0"),
    ],
)
def test_what_cannot_be_fitted(train: np.ndarray, valid: np.ndarray, words: str) -> None:
    """In one line."""
    with pytest.raises(DataError, match=words):
        bigram_loss(train, valid, 8)
