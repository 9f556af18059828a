"""Training from a Hugging Face folder equals a plain loop of `transformers` and torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankmesh.specs.families import FAMILIES
from rankmesh.testing.spawn import Pool
from tests import tiny
from tests.one.hf_models import MAKERS, VOCAB, randomised

STEPS, GLOBAL_BATCH, SEQ_LEN = 5, 4, 24
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0, "eps": 1e-5}
TABLES = ("embed_tokens.weight", "wte.weight", "wpe.weight")
# The first case of each family, and in it more than one KV head for tp 2 to share out.
CASES = {family: next(c for c in MAKERS if c.split()[0] == family) for family in FAMILIES}
SLOW = pytest.mark.slow
SHAPES = [pytest.param(2, 1, marks=SLOW), pytest.param(1, 2, marks=SLOW), (2, 2)]


def plain_loop(model: Any, lr: float) -> dict[str, list[float]]:
    """Mean over valid labels of the whole batch, AdamW that decays matrices, torch's clipping."""
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith(TABLES)]
    kept = [p for n, p in model.named_parameters() if p.dim() == 1 or n.endswith(TABLES)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-5)
    batches = tiny.batches(steps=STEPS, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, vocab=VOCAB)
    seen: dict[str, list[float]] = {"losses": [], "norms": []}
    for batch in batches:
        optimizer.zero_grad()
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        seen["losses"].append(loss.item())
        seen["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return seen


@pytest.fixture(scope="module")
def expected(tmp_path_factory: Any) -> Any:
    """Folder and figures of each family, made once."""
    made: dict[str, tuple[Path, dict[str, list[float]]]] = {}

    def of(family: str) -> tuple[Path, dict[str, list[float]]]:
        if family not in made:
            torch.manual_seed(7)
            model = randomised(MAKERS[CASES[family]]())
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            still = plain_loop(copy.deepcopy(model), lr=0.0)
            made[family] = folder, plain_loop(model, lr=0.01)
            moved = abs(still["losses"][-1] - made[family][1]["losses"][-1])
            assert moved > 100 * 1e-4, "the updates must exceed the tolerance"
        return made[family]

    return of


@pytest.mark.parametrize(("tp", "dp"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_five_steps_equal_transformers(
    pool: Pool, expected: Any, family: str, tp: int, dp: int
) -> None:
    """Losses to 1e-4 and gradient norms to 1e-3 of the plain loop, in fp32."""
    folder, figures = expected(family)
    results = pool.run(
        "tests.gloo.hf_jobs:train", tp * dp, folder=str(folder), tp=tp, dp=dp, steps=STEPS,
        global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, optimizer=ADAMW, timeout=90,
    )  # fmt: skip
    for result in results:
        assert result["losses"] == pytest.approx(figures["losses"], rel=1e-4)
        assert result["norms"] == pytest.approx(figures["norms"], rel=1e-3)
