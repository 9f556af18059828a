"""The options of `rankmesh eval`. Its body, which needs torch, is in eval_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path

AXES = ("tp", "cp", "pp", "ep", "dp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "Every token of a set but each file's first is predicted once, from at most --seq-len "
        "tokens before it; neighbouring samples share no context. Alone it starts N local "
        "processes; under torchrun, srun or mpirun it joins those that are there."
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="a checkpoint, run directory (its newest checkpoint) or Hugging Face folder",
    )
    parser.add_argument(
        "--data", metavar="PREFIX", nargs="+", required=True, help="token files, each a set"
    )
    for axis in AXES[:-1]:
        parser.add_argument(
            f"--{axis}", type=int, default=1, metavar="SIZE", help=f"{axis} of the mesh (default 1)"
        )
    parser.add_argument("--dp", type=int, metavar="SIZE", help="replicas (default: what remains)")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="local processes to start (default: the mesh's ranks on CPUs, else the visible GPUs)",
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="T",
        help="tokens of a sample (default: the model's longest, at most 2048)",
    )
    parser.add_argument(
        "--samples", type=int, metavar="K", help="only the first K samples of each set"
    )
    parser.add_argument(
        "--microbatch-size",
        type=int,
        default=4,
        metavar="B",
        help="samples that a replica computes at once (default: 4)",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "fp64"), default="fp32", help="of the model (default: fp32)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
    )
    parser.add_argument(
        "--any-tokenizer",
        action="store_true",
        help="also token files of another tokenizer than the checkpoint's",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
