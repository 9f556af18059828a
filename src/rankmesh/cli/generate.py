"""The options of `rankmesh generate`. Its body, which needs torch, is in generate_run.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="folder of weights, run directory (its newest checkpoint) or Hugging Face folder",
    )
    parser.add_argument("--prompt", default="", help="text to go on from (default: none)")
    parser.add_argument(
        "--bos-id",
        type=int,
        metavar="ID",
        help="token id put before the prompt, where a published model expects a begin mark",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="divides the logits; 0 always takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens only (default: 0, from all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that hold probability P (default: 1, from all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text")
    parser.add_argument(
        "--tokenizer",
        metavar="T",
        help="bytes, a tokenizer.json or a folder with one (default: the one beside the weights)",
    )
    parser.add_argument(
        "--device", metavar="D", help="cpu or cuda (default: cuda where there is one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
