"""How soon a large token file is ready to train on, and in how much memory.

`python -m benchmarks.ready`. The file has a million documents and 10^8 samples; being full of holes
it takes little space on disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from rankmesh.data.blend import BlendOrder, Phase
from rankmesh.data.indexed import TokenFile
from rankmesh.data.order import SampleOrder
from rankmesh.data.samples import Samples

DOCUMENTS, SAMPLES, SEQ_LEN = 10**6, 10**8, 64


def sparse_file(folder: Path) -> Path:
    """Writes the file; returns its prefix."""
    length = SAMPLES * SEQ_LEN // DOCUMENTS
    prefix = folder / "large"
    lengths = np.full(DOCUMENTS, length, "<i4")
    lengths[-1] += 1
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(2 * int(lengths.sum(dtype=np.int64)))
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, DOCUMENTS, DOCUMENTS + 1))
        offsets = np.arange(DOCUMENTS, dtype="<i8") * 2 * length
        for array in (lengths, offsets, np.arange(DOCUMENTS + 1, dtype="<i8")):
            stream.write(array.tobytes())
    return prefix


def ready(prefix: str) -> None:
    """Opens the file up to its first sample, alone and as half of a blend; prints what it took."""
    start = time.perf_counter()
    samples = Samples([TokenFile(prefix)], SEQ_LEN)
    samples.sample(SampleOrder(0, len(samples)).index(0))
    alone = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    both = Samples([TokenFile(prefix), TokenFile(prefix)], SEQ_LEN, weights=(0.7, 0.3))
    both.sample(BlendOrder(0, both.sizes, [Phase(0, (0.7, 0.3))]).index(10**9))
    blend = time.perf_counter() - start
    figures = {"alone_s": alone, "blend_s": blend, "peak_mib": peak, "samples": len(samples)}
    print(json.dumps(figures))


def measure(folder: Path, rounds: int) -> None:
    """A process of its own for each round."""
    prefix = sparse_file(folder)
    command = [sys.executable, "-m", "benchmarks.ready", "--ready", str(prefix)]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(rounds)
    ]
    print(f"{DOCUMENTS:,} documents, {runs[0]['samples']:,} samples, ready for the first one:")
    for name, words in (("alone_s", "one file"), ("blend_s", "a blend of it with itself")):
        print(
            f"  {words}: {median(run[name] for run in runs):.3f} s (best {_best(runs, name):.3f})"
        )
    print(
        f"  peak memory of the process, with numpy: {max(run['peak_mib'] for run in runs):.0f} MiB"
    )


def _best(runs: Sequence[dict[str, float]], name: str) -> float:
    return min(run[name] for run in runs)


def main() -> None:
    """The measurement, or one round of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ready", metavar="PREFIX")
    args = parser.parse_args()
    if args.ready:
        ready(args.ready)
    else:
        with tempfile.TemporaryDirectory() as name:
            measure(Path(name), args.rounds)


if __name__ == "__main__":
    main()
