"""The options of `rankmesh convert`. Its body, which needs torch, is in convert_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "source",
        metavar="SRC",
        type=Path,
        help="checkpoint, run directory (its newest checkpoint) or Hugging Face folder",
    )
    parser.add_argument("target", metavar="DST", type=Path, help="folder to make")
    parser.add_argument("--to", required=True, choices=("hf", "rankmesh"), help="the format of DST")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of all tensors (default: as they are stored)",
    )
    parser.add_argument(
        "--like",
        metavar="HF",
        type=Path,
        help="Hugging Face folder whose tokenizer, generation config and other files come along "
        "(default: those that came with SRC)",
    )
    parser.add_argument(
        "--shard-gb",
        type=float,
        metavar="GB",
        help="size of the weight files, hf only (default: as SRC had them, else 5)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
