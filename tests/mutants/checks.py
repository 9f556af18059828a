"""The checks that mutants name: what runs, on how many ranks, with which arguments.

A table without torch, so that the test process need not import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SGD = {"name": "sgd", "lr": 0.05, "clip_grad": 0.0}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.5}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


@dataclass(frozen=True)
class Check:
    """`target` ("module:function") is called on every one of `ranks` processes with `args`."""

    target: str
    ranks: int = 1
    args: dict[str, Any] = field(default_factory=dict)


def _parity(family: str, tp: int, dp: int, pp: int = 1, **args: Any) -> Check:
    """A mesh against the oracle, three steps in fp64."""
    args = {"family": family, "tp": tp, "dp": dp, "pp": pp, "optimizer": SGD} | args
    return Check("tests.gloo.parity:case", tp * dp * pp, args)


def _prompt(check: Check) -> Check:
    """The same parity where every all-reduce has ended when it returns."""
    return Check("tests.mutants.mesh_facts:prompt_parity", check.ranks, check.args)


def _fact(name: str, **args: Any) -> Check:
    return Check(f"tests.mutants.facts:{name}", 1, args)


CHECKS = {
    "llama": _parity("llama", 1, 1),
    "llama adamw": _parity("llama", 1, 1, optimizer=ADAMW),
    "llama clipped": _parity("llama", 1, 1, optimizer=SGD | {"clip_grad": 0.5}),
    "llama momentum": _parity("llama", 1, 1, optimizer=SGD | {"momentum": 0.9}),
    "llama dropout": _parity("llama", 1, 1, model=DROPOUT),
    "llama empty step": _parity("llama", 1, 1, optimizer=ADAMW, mask="all"),
    "llama schedule": _parity(
        "llama", 1, 1,
        optimizer=SGD | {"schedule": "linear", "warmup_steps": 2, "decay_steps": 4},
        rates=[0.025, 0.05, 0.05],
    ),
    "llama tp2": _parity("llama", 2, 1),
    "llama tp2 terms": _parity("llama", 2, 1, train={"z_loss": 0.05, "label_smoothing": 0.1}),
    "llama tp2 dropout": _parity("llama", 2, 1, model=DROPOUT),
    "llama tp4": _parity("llama", 4, 1),
    "llama dp2": _parity("llama", 1, 2),
    "llama dp2 rows": _parity("llama", 1, 2, mask="rows"),
    "llama dp2 dropout": _parity("llama", 1, 2, model=DROPOUT),
    "llama tp2 dp2": _parity("llama", 2, 2, optimizer=ADAMW, model=DROPOUT),
    # Slices of one size: a sum over the wrong ranks then fails by its values, not by a crash.
    "llama tp2 dp2 even": _parity("llama", 2, 2, model={"vocab_size": 64, "ffn_size": 36}),
    "gpt2 adamw": _parity("gpt2", 1, 1, optimizer=ADAMW),
    "gpt2 tp2": _parity("gpt2", 2, 1),
    "gpt2 dp2": _parity("gpt2", 1, 2),
    "llama dp2 prompt": _prompt(_parity("llama", 1, 2)),
    "gpt2 dp2 prompt": _prompt(_parity("gpt2", 1, 2)),
    "overlap": Check("tests.mutants.mesh_facts:overlap"),
    "unused": Check("tests.mutants.mesh_facts:unused", 2),
    "loop": Check("tests.mutants.mesh_facts:loop", 2),
    "verdict": Check("tests.mutants.mesh_facts:verdict", 2),
    "not finite": Check("tests.mutants.mesh_facts:not_finite", 2),
    "evaluation tp2": Check("tests.mutants.mesh_facts:evaluation", 2, {"tp": 2, "dp": 1}),
    "evaluation dp2": Check("tests.mutants.mesh_facts:evaluation", 2, {"tp": 1, "dp": 2}),
    "evaluation pp2": Check("tests.mutants.mesh_facts:evaluation", 2, {"tp": 1, "dp": 1, "pp": 2}),
    "llama pp2": _parity("llama", 1, 1, 2),
    "llama pp2 zb": _parity("llama", 1, 1, 2, parallel={"schedule": "zb-h1"}),
    "gpt2 pp2": _parity("gpt2", 1, 1, 2),
    "gpt2 pp2 dp2": _parity("gpt2", 1, 2, 2),
    "gpt2 sequence": _parity(
        "gpt2", 2, 1, seq_len=12, model=DROPOUT, parallel={"sequence_parallel": True}
    ),
    "gpt2 sequence zb": _parity(
        "gpt2", 2, 1, seq_len=12, parallel={"sequence_parallel": True, "schedule": "zb-h1"}
    ),
    "llama zero dp2": _parity("llama", 1, 2, parallel={"zero": 1}),
    "llama zero2 dp2": _parity("llama", 1, 2, parallel={"zero": 2}),
    "llama zero dp4": _parity("llama", 1, 4, parallel={"zero": 1, "zero_group": 2}),
    "gpt2 zero sequence": _parity(
        "gpt2", 2, 2, seq_len=12, parallel={"zero": 1, "sequence_parallel": True}
    ),
    "llama 16 bits": _parity(
        "llama", 1, 1, rtol=0.04, atol=1e-3, train={"dtype": "bf16", "steps": 40},
        optimizer=SGD | {"lr": 1e-3},
    ),
    "overflow": Check("tests.mutants.mesh_facts:overflow", 2),
    "llama fp16": _parity(
        "llama", 1, 2, rtol=0.04, atol=1e-3, train={"dtype": "fp16"}, parallel={"zero": 1}
    ),
    "headers": Check("tests.mutants.mesh_facts:headers"),
    "qwen3 tp2": _parity("qwen3", 2, 1),
    "gemma2 tp2": _parity("gemma2", 2, 1),
    "olmo2 tp2": _parity("olmo2", 2, 1),
    "olmo2 tp4": _parity("olmo2", 4, 1),
    "formula llama": _fact("formula", family="llama"),
    "formula llama explicit": _fact("formula", family="llama", explicit=True),
    "formula llama 3": _fact("formula", family="llama", scaled=True),
    "formula gpt2": _fact("formula", family="gpt2"),
    "formula gpt2 exact gelu": _fact("formula", family="gpt2", mlp="gelu"),
    "formula mistral": _fact("formula", family="mistral"),
    "formula mistral explicit": _fact("formula", family="mistral", explicit=True),
    "formula qwen2": _fact("formula", family="qwen2"),
    "formula qwen3": _fact("formula", family="qwen3"),
    "formula gemma2": _fact("formula", family="gemma2"),
    "formula gemma3": _fact("formula", family="gemma3"),
    "formula olmo2": _fact("formula", family="olmo2"),
    "formula phi3": _fact("formula", family="phi3"),
    "dropout": _fact("dropout"),
    "attention dropout": _fact("attention_dropout"),
    "dropout sites": _fact("dropout_sites"),
    "recompute bits": Check("tests.mutants.recompute_facts:bits"),
    "recompute saved": Check("tests.mutants.recompute_facts:saved"),
    "recompute held": Check("tests.mutants.recompute_facts:held"),
    "recompute sums": Check("tests.mutants.recompute_facts:sums"),
    "recompute layers": Check("tests.mutants.recompute_facts:layers"),
    "initial": _fact("initial"),
    "batches": _fact("batches"),
    "rates": _fact("rates"),
    "schedule orders": Check("tests.mutants.schedules:orders"),
    "schedule times": Check("tests.mutants.schedules:times"),
    "schedule communication": Check("tests.mutants.schedules:communication"),
    "schedule checker": Check("tests.mutants.schedules:checker"),
    "schedule memory": Check("tests.mutants.schedules:memory"),
    "trace collective": Check("tests.mutants.trace_facts:collective"),
    "trace clocks": Check("tests.mutants.trace_facts:clocks"),
    "trace figures": Check("tests.mutants.trace_facts:figures"),
    "checkpoint resharded": Check("tests.mutants.checkpoint_facts:resharded"),
    "checkpoint damaged": Check("tests.mutants.checkpoint_facts:damaged"),
    "checkpoint interrupted": Check("tests.mutants.checkpoint_facts:interrupted"),
    "checkpoint resumed": Check("tests.mutants.checkpoint_facts:resumed"),
    "checkpoint retired": Check("tests.mutants.checkpoint_facts:retired"),
    "trace waits": Check("tests.mutants.trace_facts:waits", 2),
}  # fmt: skip
