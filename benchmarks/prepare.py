"""`rankmesh prepare` against the plain loop.

`python -m benchmarks.prepare`. The plain loop is what a person writes: json, `encode_batch` of the
package `tokenizers`, numpy's `tofile`, on one core. Whole processes are timed, start-up included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import BinaryIO

import numpy as np
from tokenizers import Encoding, Tokenizer

from rankmesh.data.corpus import stdlib_corpus
from rankmesh.data.tokenizer import train_bpe

DOCUMENT = 2_000
BATCH = 1_000
VOCAB = 32_000


def plain_loop(source: str, tokenizer: str, out: str, fast: bool) -> None:
    """JSON lines -> uint16 ids, each document with its end mark. fast: by `encode_batch_fast`."""
    engine = Tokenizer.from_file(tokenizer)
    encode = engine.encode_batch_fast if fast else engine.encode_batch
    eod = engine.token_to_id("<|endoftext|>")
    with open(source, encoding="utf-8") as lines, open(out, "wb") as stream:
        texts: list[str] = []
        for line in lines:
            texts.append(json.loads(line)["text"])
            if len(texts) == BATCH:
                _write(encode, texts, eod, stream)
                texts = []
        _write(encode, texts, eod, stream)


def _write(
    encode: Callable[..., list[Encoding]], texts: list[str], eod: int, stream: BinaryIO
) -> None:
    for found in encode(texts, add_special_tokens=False):
        np.array([*found.ids, eod], dtype=np.uint16).tofile(stream)


def make_text(folder: Path, copies: int) -> tuple[Path, Path]:
    """The standard library's sources in documents of 2,000 characters, and a tokenizer for them."""
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in stdlib_corpus().train]
    train_bpe(texts, VOCAB, folder / "tokenizer.json")
    with (folder / "text.jsonl").open("w") as stream:
        for _ in range(copies):
            for text in texts:
                for start in range(0, len(text), DOCUMENT):
                    if piece := text[start : start + DOCUMENT].strip():
                        stream.write(json.dumps({"text": piece}) + "\n")
    return folder / "text.jsonl", folder / "tokenizer.json"


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Seconds of wall and of processor time that a command and its children took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(folder: Path, copies: int, rounds: int, more: bool) -> None:
    """Runs the sides in turn, `rounds` times, and prints medians and ratios within rounds."""
    source, tokenizer = map(str, make_text(folder, copies))
    plain = [sys.executable, "-m", "benchmarks.prepare", "--plain", source, tokenizer]
    ours = [sys.executable, "-m", "rankmesh", "prepare", source, "--tokenizer", tokenizer]
    one_core = ["env", "TOKENIZERS_PARALLELISM=false"]
    sides = {
        "plain loop, one core": [*one_core, *plain, f"{folder}/plain.bin"],
        "prepare --workers 1": [*ours, "--out", f"{folder}/one", "--workers", "1"],
        "prepare --workers 2": [*ours, "--out", f"{folder}/two", "--workers", "2"],
    }
    if more:
        all_cores = ["env", "TOKENIZERS_PARALLELISM=true"]
        sides["plain, encode_batch_fast"] = [*one_core, *plain, f"{folder}/fast.bin", "--fast"]
        sides["plain loop, all cores"] = [*all_cores, *plain, f"{folder}/all.bin"]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            taken[name].append(timed(sides[name]))
    expected = (folder / "plain.bin").read_bytes()
    for path in folder.glob("*.bin"):
        assert path.read_bytes() == expected, path
    tokens = len(expected) // 2
    print(
        f"{tokens:,} tokens from {Path(source).stat().st_size:,} bytes of JSON lines, "
        f"{rounds} rounds"
    )
    print("side                        tokens/s  x plain loop (each round)  processor time x loop")
    base = taken["plain loop, one core"]
    for name, runs in taken.items():
        rate = tokens / median(wall for wall, _ in runs)
        walls = [other[0] / one[0] for one, other in zip(runs, base, strict=True)]
        work = median(one[1] / other[1] for one, other in zip(runs, base, strict=True))
        every = " ".join(f"{ratio:.2f}" for ratio in walls)
        print(f"{name:<24} {rate:>11,.0f}  {median(walls):.2f} ({every})  {work:.2f}")


def main() -> None:
    """The comparison, or the plain loop in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=4, help="of the text, about 10 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--more", action="store_true", help="two more plain loops")
    parser.add_argument("--fast", action="store_true", help="of --plain")
    parser.add_argument("--plain", nargs=3, metavar=("SOURCE", "TOKENIZER", "OUT"))
    args = parser.parse_args()
    if args.plain:
        plain_loop(*args.plain, fast=args.fast)
    else:
        with tempfile.TemporaryDirectory() as name:
            compare(Path(name), args.copies, args.rounds, args.more)


if __name__ == "__main__":
    main()
