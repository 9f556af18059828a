"""The options of `rankmesh completion`. Its body is in completion_run.py."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
        [
            "Prints a script that completes commands, options, their values and config keys.",
            "",
            "  bash  echo 'source <(rankmesh completion bash)' >> ~/.bashrc",
            "  zsh   echo 'source <(rankmesh completion zsh)' >> ~/.zshrc    (after compinit)",
            "  fish  rankmesh completion fish > ~/.config/fish/completions/rankmesh.fish",
        ]
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell to write for")
