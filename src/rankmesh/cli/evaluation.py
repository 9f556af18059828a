"""The loss of whole token files on any mesh.

Owns which tokens of a file are predicted from which, and what is made of the sum. The model, the
mesh and the sampling of full samples are elsewhere.

A file of n tokens has n - 1 targets. Full samples are those of training, in file order; the targets
that training leaves out at the end make one shorter sample more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rankmesh.data.indexed import TokenFile
from rankmesh.data.loader import PADDING_SAMPLE, Microbatch, eval_loader
from rankmesh.data.samples import Samples, check_vocab
from rankmesh.errors import DataError
from rankmesh.nn import IGNORED
from rankmesh.train.evaluate import loss_of
from rankmesh.train.run import Run


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """One token file, opened and checked. full: its samples of seq_len; None where it is shorter.

    tail: the tokens of the last, shorter sample, None where the others leave nothing. limit: how
    many full samples to take.
    """

    data: str
    file: TokenFile
    seq_len: int
    full: Samples | None
    tail: Tensor | None
    limit: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a model makes of a set. loss: nats a target, the mean over `targets` targets.

    bytes_per_token: of the text that the set was made from, None where its file does not say.
    """

    data: str
    loss: float
    targets: int
    bytes_per_token: float | None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond floating point."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs for a byte of text: comparable across tokenizers."""
        if self.bytes_per_token is None:
            return None
        return self.loss / math.log(2) / self.bytes_per_token


def open_set(prefix: str, seq_len: int, vocab_size: int, limit: int | None) -> TokenSet:
    """Opens a token file for a model of that vocabulary; `limit` full samples, None for all of it.

    Raises DataError.
    """
    file = TokenFile(Path(prefix))
    check_vocab([file], vocab_size)
    if file.num_tokens < 2:
        raise DataError(f"{prefix}.bin: {file.num_tokens} tokens; a prediction needs 2")
    full = Samples([file], seq_len, vocab_size) if file.num_tokens > seq_len else None
    count = len(full) if full is not None else 0
    tail = None
    # A limit takes from the start, so that only the whole set has an end.
    if limit is None and file.num_tokens - count * seq_len > 1:
        tail = torch.from_numpy(file.tokens(count * seq_len, file.num_tokens).astype("int64"))
        _check_tail(prefix, tail, vocab_size)
    if limit is not None and full is None:
        raise DataError(
            f"{prefix}.bin: {file.num_tokens:,} tokens have no sample of --seq-len {seq_len}; "
            "leave --samples out, or choose a shorter one"
        )
    taken = count if limit is None else min(limit, count)
    return TokenSet(data=prefix, file=file, seq_len=seq_len, full=full, tail=tail, limit=taken)


def _check_tail(prefix: str, tail: Tensor, vocab_size: int) -> None:
    low, high = int(tail.min()), int(tail.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{prefix}.bin: token id {low if low < 0 else high} near the end, the model's "
            f"vocabulary has {vocab_size}"
        )


def evaluate_set(run: Run, part: TokenSet) -> Score:
    """The mean cross entropy over a set's targets, equal on all ranks; no mask is drawn.

    Collectives: those of the forward passes, and one all-reduce over the world of 2 fp64 values.
    """
    loss, targets = loss_of(run, _steps(run, part))
    meta = part.file.meta
    known = meta is not None and meta.text_bytes > 0
    return Score(
        data=part.data,
        loss=loss / targets,
        targets=targets,
        bytes_per_token=meta.text_bytes / part.file.num_tokens if meta and known else None,
    )


def _steps(run: Run, part: TokenSet) -> Iterator[Sequence[Microbatch]]:
    """This replica's share; every replica has the same number of microbatches."""
    replica = run.mesh.coordinate.dp
    if part.full is not None:
        loader = eval_loader(part.full, run.batch, replica, part.limit)
        for step in range(loader.num_steps):
            yield loader.step(step)
    if part.tail is not None:
        tail = part.tail if replica == 0 else part.tail[:0]
        yield [_tail_batch(tail, part, run.batch.microbatch)]


def _tail_batch(tail: Tensor, part: TokenSet, rows: int) -> Microbatch:
    """The last, shorter sample in the first row, padding after and below it."""
    tokens = torch.zeros((rows, part.seq_len), dtype=torch.int64)
    labels = torch.full((rows, part.seq_len), IGNORED)
    samples = torch.full((rows,), PADDING_SAMPLE)
    targets = max(0, len(tail) - 1)
    tokens[0, :targets], labels[0, :targets] = tail[:-1], tail[1:]
    if targets:
        samples[0] = part.limit
    return Microbatch(tokens, labels, samples)
