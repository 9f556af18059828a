"""The body of `rankmesh demo`: data, a run on a mesh, a comparison with a bigram model, a few lines
of text, a few steps over a pipeline.

Owns the order of the demo. Everything it does is a command or a function that a user has too.
"""

from __future__ import annotations

import argparse
import time
from importlib import resources
from pathlib import Path

from rankmesh.checkpoint.source import open_weights
from rankmesh.cli.trace_run import bubble_line
from rankmesh.config.load import load_config
from rankmesh.config.resolve import world_size_of
from rankmesh.config.schema import RunConfig
from rankmesh.data.bigram import bigram_loss
from rankmesh.data.corpus import DemoData, make_demo_data
from rankmesh.data.indexed import TokenFile
from rankmesh.data.tokenizer import load_tokenizer
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import log_folder, metrics_path, note_failure
from rankmesh.train.generate import Sampling, generate, load_model
from rankmesh.train.launch import launch

_PROMPTS = ("def ", "class ", "import os\n\n")
_GOAL = 0.9
_PIPELINE = (
    "parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "train.microbatch_size=2",
    "train.steps=20", "train.eval_every=20", "optimizer.schedule=constant", "optimizer.lr=2e-4",
    "optimizer.warmup_steps=0", "log.every=5", "log.trace=true",
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the training, or 1 where the model does not beat the bigram model by
    10%.
    """
    started = time.perf_counter()
    print(f"1. data: a tokenizer and token files from the standard library, in {args.dir / 'data'}")
    data = make_demo_data(args.dir / "data")
    path, overrides = _write_config(args, data)
    config = load_config(path, overrides)
    print(f"2. training: {path}")
    code = launch(
        ["train", str(path), *overrides],
        world_size_of(config.parallel),
        log_folder(_run_dir(config)),
        on_failure=lambda text: note_failure(_run_dir(config), text),
    )
    if code:
        return code
    fine = _compare(config, data)
    _write_text(_run_dir(config))
    code = _pipeline(path, overrides, _run_dir(config))
    if code:
        return code
    print(f"\n{time.perf_counter() - started:.0f} s in all. Go on with:")
    print(f"  rankmesh generate {_run_dir(config)} --prompt 'def '")
    print(f"  rankmesh verify {path} model.num_layers=2")
    print(f"  rankmesh trace {_pipeline_dir(_run_dir(config))} --svg pipeline.svg")
    return 0 if fine else 1


def _run_dir(config: RunConfig) -> Path:
    return Path(config.log.run_dir)


def _pipeline(path: Path, overrides: list[str], run_dir: Path) -> int:
    """A few more steps from the weights, on 8 processes; returns the exit code."""
    folder = _pipeline_dir(run_dir)
    print("\n5. the same model on dp 2 x pp 2 x tp 2, 8 processes, for 20 steps")
    # Fresh optimizer state: a low, constant rate.
    more = [*overrides, *_PIPELINE, f"model.init_from={run_dir}", f"log.run_dir={folder}"]
    config = load_config(path, more)
    code = launch(
        ["train", str(path), *more],
        world_size_of(config.parallel),
        log_folder(folder),
        on_failure=lambda text: note_failure(folder, text),
    )
    if code == 0:
        print(f"   {bubble_line(folder)}")
    return code


def _pipeline_dir(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}-pipeline")


def _write_config(args: argparse.Namespace, data: DemoData) -> tuple[Path, list[str]]:
    """The demo's config, for a fresh run folder each time, and the overrides for it."""
    text = resources.files(__package__).joinpath("demo.toml").read_text(encoding="ascii")
    text = text.replace('"data/train"', f'"{data.train_prefix}"')
    text = text.replace('"data/valid"', f'"{data.valid_prefix}"')
    number = 1
    while (args.dir / f"run-{number}").exists():
        number += 1
    path = args.dir / "demo.toml"
    path.write_text(f'{text}run_dir = "{args.dir / f"run-{number}"}"\n', encoding="utf-8")
    return path, list(args.overrides)


def _compare(config: RunConfig, data: DemoData) -> bool:
    """Validation loss beside that of a smoothed bigram model of the same tokens."""
    spec = open_weights(_run_dir(config)).spec
    valid = TokenFile(Path(data.valid_prefix))
    train = TokenFile(Path(data.train_prefix))
    length = config.data.seq_len
    samples = min(
        config.train.eval_steps * config.train.global_batch_size,
        (valid.num_tokens - 1) // length,
    )
    bigram = bigram_loss(
        train.tokens(0, train.num_tokens), valid.tokens(0, samples * length + 1), spec.vocab_size
    )
    evaluated = [
        row["eval_loss"]
        for row in read_metrics(metrics_path(_run_dir(config)))
        if "eval_loss" in row
    ]
    loss: float = evaluated[-1]
    fine = loss <= _GOAL * bigram.loss
    smoothing = f"{bigram.smoothing.kind} {bigram.smoothing.strength:g}"
    side = "below" if loss < bigram.loss else "above"
    below = f"{abs(100 * (1 - loss / bigram.loss)):.1f}% {side} the bigram model"
    print("\n3. validation loss, nats a token, on held-out files")
    print(f"   {'unigram model':<28}{bigram.unigram_loss:.3f}")
    print(f"   {'smoothed bigram model':<28}{bigram.loss:.3f}   ({smoothing})")
    print(f"   {'this run, first evaluation':<28}{evaluated[0]:.3f}")
    print(f"   {'this run, last evaluation':<28}{loss:.3f}   ({below})")
    print(f"   the goal, 10% below: {'met' if fine else 'NOT met'}")
    return fine


def _write_text(run_dir: Path) -> None:
    """A few lines from the trained weights."""
    source = open_weights(run_dir)
    assert source.tokenizer is not None
    tokenizer, model = load_tokenizer(source.tokenizer), load_model(source)
    print("\n4. text from the weights")
    for seed, prompt in enumerate(_PROMPTS):
        ids = tokenizer.encode(prompt)
        tokens = generate(
            model,
            ids,
            max_new_tokens=60,
            context=source.spec.max_seq_len,
            sampling=Sampling(temperature=0.7, top_k=40, top_p=1.0),
            seed=seed,
            vocab_size=tokenizer.vocab_size,
            stop_id=tokenizer.eod_id,
        )
        text = tokenizer.decode([*ids, *tokens])
        print("   " + "-" * 60)
        print("\n".join(f"   {line}" for line in text.splitlines()))
