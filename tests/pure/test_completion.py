"""`rankmesh completion`: scripts that their shells accept, and that complete what can be typed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankmesh.cli.completion_run import SCRIPTS
from rankmesh.cli.completion_words import Place, places
from rankmesh.cli.main import COMMANDS, main
from rankmesh.config.names import KEYS

CHECK = {"bash": ["-n"], "zsh": ["-n"], "fish": ["--no-execute"]}

# Fills in bash's variables as bash does before it calls the function, and prints the answer.
ASK = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_rankmesh 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def found() -> list[Place]:
    return places()


@pytest.fixture(scope="module")
def scripts(found: list[Place], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell, write in SCRIPTS.items():
        (folder / shell).write_text(write(found), encoding="ascii")
    return {shell: folder / shell for shell in SCRIPTS}


def ask(script: Path, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    bash = shutil.which("bash")
    assert bash is not None
    command = [bash, "-c", ASK, "ask", str(script), "rankmesh", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_every_command_is_a_place(found: list[Place]) -> None:
    paths = {place.path for place in found}
    assert paths >= {name for name, command in COMMANDS.items() if not command.hidden}
    assert {"config explain", "config schema"} <= paths
    assert "demo" not in paths


def test_every_option_is_there(found: list[Place], scripts: dict[str, Path]) -> None:
    """In all three scripts: a new option of a command needs no work here."""
    for script in scripts.values():
        text = script.read_text(encoding="ascii")
        for place in found:
            for option in place.options:
                for name in option.names:
                    assert name in text or f"-l {name.removeprefix('--')}" in text, (script, name)


@pytest.mark.parametrize("shell", sorted(CHECK))
def test_the_shell_accepts_its_script(shell: str, scripts: dict[str, Path]) -> None:
    """Where the shell is installed; bash always is."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = [program, *CHECK[shell], str(scripts[shell])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train", "trace"]),
        (["conf"], ["config"]),
        (["config", ""], ["explain", "schema"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["config", "explain", "optimizer.l"], ["optimizer.lr"]),
        (["train", "run.toml", "optimizer.l"], ["optimizer.lr="]),
        (["train", "run.toml", "--np"], ["--nproc"]),
        (["eval", "runs/a", "--dtype", ""], ["fp32", "fp64"]),
        (["eval", "runs/a", "--seq-len", ""], []),
        (["train", ""], []),
    ],
    ids=lambda value: " ".join(value) or "-",
)
def test_bash_offers(words: list[str], offered: list[str], scripts: dict[str, Path]) -> None:
    """Nothing offered means that bash goes on with names of files."""
    assert ask(scripts["bash"], *words) == offered


def test_bash_offers_every_key(scripts: dict[str, Path]) -> None:
    expected = {f"{key}=" for key in KEYS if key.startswith("model.")}
    assert set(ask(scripts["bash"], "train", "run.toml", "model.")) == expected


def test_it_loads_no_torch() -> None:
    """It runs in every new shell of a user."""
    code = (
        "import sys; from rankmesh.cli.main import main; code = main(['completion', 'bash']);"
        "assert code == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "complete -o default -F _rankmesh rankmesh" in done.stdout


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tcsh" in error and "fish" in error
