"""`rankmesh init`: a config that explains itself, loads back and overwrites nothing."""

from __future__ import annotations

import errno
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankmesh.cli.config_text import COMMON
from rankmesh.cli.init_size import parse_size, shape_for
from rankmesh.cli.main import main
from rankmesh.config.explain import explain
from rankmesh.config.load import load_config
from rankmesh.config.names import KEYS, SECTIONS
from rankmesh.config.resolve import check_fits, model_spec
from rankmesh.errors import ConfigError
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.hf import spec_to_hf
from rankmesh.specs.presets import names, preset
from rankmesh.theory.params import count_params

DEFAULT = re.compile(r"^#([a-z_.]+) = (\S.*)$")


def init(folder: Path, *words: str) -> Path:
    path = folder / "notes.toml"
    assert main(["init", *words, "--out", str(path)]) == 0
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["init", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("name", names())
def test_every_preset_loads_back(name: str, tmp_path: Path) -> None:
    config = load_config(init(tmp_path, name))
    spec = model_spec(config.model)
    check_fits(config, spec)
    assert spec == preset(name)
    assert config.data.train == ("data/train",) and config.log.run_dir == "runs/notes"


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("size", ["1m", "125m", "7b"])
def test_every_family_has_every_size(family: str, size: str, tmp_path: Path) -> None:
    """Within a tenth, in a shape like that of published models."""
    config = load_config(init(tmp_path, family, "--size", size))
    spec = model_spec(config.model)
    assert spec.family == family
    assert abs(count_params(spec).total / parse_size(size) - 1) < 0.1
    assert 16 <= spec.hidden_size / spec.num_layers <= 200


@pytest.mark.parametrize("words", [("llama", "--size", "10m"), ("llama-mini",), ("gpt2",)])
@pytest.mark.parametrize("everything", [False, True])
def test_the_commented_lines_are_the_defaults(
    words: tuple[str, ...], everything: bool, tmp_path: Path
) -> None:
    """Taking away all the # of lines with a key changes nothing."""
    path = init(tmp_path, *words, *(["--all"] if everything else []))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert all(len(line) <= 100 for line in lines)
    found = [match for line in lines if (match := DEFAULT.match(line))]
    assert len(found) > 20
    # A key inside a table that is not set would set the table.
    bare = [line[1:] if DEFAULT.match(line) and "." not in line.split()[0] else line
            for line in lines]  # fmt: skip
    plain = load_config(path)
    spec = model_spec(plain.model)
    path.write_text("\n".join(bare), encoding="utf-8")
    changed = load_config(path)
    assert model_spec(changed.model) == spec
    for section in SECTIONS:
        if section != "model":
            assert getattr(changed, section) == getattr(plain, section)


def test_every_common_key_is_explained(tmp_path: Path) -> None:
    """Meaning, what it takes, default: right above the line of the key."""
    text = init(tmp_path, "llama-mini").read_text(encoding="utf-8")
    flat = " ".join(text.replace("\n# ", " ").split())
    for section, some in COMMON.items():
        assert f"\n[{section}]\n" in text
        for name in some.split():
            info = explain(f"{section}.{name}")
            assert re.search(rf"^#?{name} =", text, re.MULTILINE), info.key
            assert info.doc in flat and info.allowed in flat


def test_all_writes_every_key(tmp_path: Path) -> None:
    text = init(tmp_path, "llama-mini", "--all").read_text(encoding="utf-8")
    for key in KEYS:
        name = key.partition(".")[2]
        table = any(other.startswith(f"{key}.") for other in KEYS)
        assert table or re.search(rf"^#?{re.escape(name)} =", text, re.MULTILINE), key


def test_overrides_are_written_into_the_file(tmp_path: Path) -> None:
    """Also rarer keys, keys of tables, and those that init would have chosen itself."""
    given = [
        "optimizer.lr=0.01",
        "optimizer.decay_norms=true",
        "model.rope_scaling.factor=4.0",
        "log.run_dir=2026",
        "train.steps=50",
    ]
    path = init(tmp_path, "llama-mini", *given)
    text = path.read_text(encoding="utf-8")
    for line in (
        "lr = 0.01",
        "decay_norms = true",
        "rope_scaling.factor = 4.0",
        'run_dir = "2026"',
    ):
        assert f"\n{line}\n" in text
    config = load_config(path)
    assert config.model.rope_scaling is not None and config.model.rope_scaling.factor == 4.0
    assert config.optimizer.min_lr == 0.001 and config.optimizer.warmup_steps == 5


def test_options_may_stand_anywhere(tmp_path: Path) -> None:
    path = init(tmp_path, "llama", "model.vocab_size=4096", "--size", "20m", "train.steps=7")
    config = load_config(path)
    assert config.model.vocab_size == 4096 and config.train.steps == 7


def test_a_folder_is_started_from(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "weights", max_position_embeddings=64)
    config = load_config(init(tmp_path, str(folder)))
    assert config.model.init_from == str(folder) and config.model.preset is None


def hf_folder(folder: Path, **changes: int) -> Path:
    """A Hugging Face folder as far as `init` reads it."""
    folder.mkdir()
    config = spec_to_hf(preset("llama-tiny")) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_sample_is_not_longer_than_the_model_of_the_folder(tmp_path: Path) -> None:
    """The config runs as it is written; an override of the length counts."""
    folder = hf_folder(tmp_path / "weights", max_position_embeddings=64)
    config = load_config(init(tmp_path, str(folder)))
    assert config.data.seq_len == 64
    longer = ["init", str(folder), "model.max_seq_len=128", "--out", str(tmp_path / "b.toml")]
    assert main(longer) == 0
    assert load_config(tmp_path / "b.toml").data.seq_len == 128


def test_the_tokenizer_of_the_folder_is_advised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids of the model mean what its own tokenizer says."""
    folder = hf_folder(tmp_path / "weights")
    init(tmp_path, str(folder))
    assert "--tokenizer bytes" in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.toml").unlink()
    init(tmp_path, str(folder))
    assert f"--tokenizer {folder} " in capsys.readouterr().out


def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `train` would refuse it."""
    assert f"{tmp_path}: no model here" in refused(capsys, str(tmp_path), "--out", "-")


def test_presets_of_a_name_that_is_no_family_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SmolLM is of the family llama, in published sizes only."""
    error = refused(capsys, "smollm", "--size", "10m", "--out", "-")
    assert "smollm is no preset, family or folder; presets: smollm-135m, smollm-360m" in error
    assert "smollm-135m has its own" in refused(capsys, "smollm-135m", "--size", "1m")


def test_an_unknown_model_is_named_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be is said first, whatever lies there."""
    assert "nope is no preset" in refused(capsys, "nope", "--out", str(init(tmp_path, "gpt2")))


def test_a_full_disk_leaves_no_empty_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second try is not refused for what the first one left."""
    path, plain = tmp_path / "notes.toml", Path.open

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(self: Path, mode: str = "r", **options: str) -> io.TextIOBase:
        plain(self, mode, **options).close()
        return Full()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        error = refused(capsys, "gpt2", "--out", str(path))
    assert error == f"rankmesh: error: {path}: cannot be written: No space left on device\n"
    assert not path.exists()


def test_a_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = init(tmp_path, "llama-mini")
    before = path.read_bytes()
    error = refused(capsys, "gpt2", "--out", str(path))
    assert "exists already" in error and str(path) in error
    assert path.read_bytes() == before


def test_dash_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing but the config, so that it can be piped."""
    assert main(["init", "llama-mini", "--out", "-"]) == 0
    path = tmp_path / "run.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config(path).model.preset == "llama-mini"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lama-mini"], "did you mean llama-mini?"),
        (["llama", "--size", "10x"], "--size 10x"),
        (["llama", "--size", "0m"], "--size 0m"),
        (["llama", "--size", "1k"], "nearest llama model has"),
        (["llama-mini", "--size", "10m"], "only a family has a size"),
        (["llama-mini", "train.stepps=3"], "did you mean train.steps?"),
        (["llama-mini", "data.seq_len=5000"], "at most model.max_seq_len"),
        (["llama", "--out", "no/such/folder/run.toml"], "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(capsys, *words)


@pytest.mark.parametrize(
    ("text", "size"),
    [("10m", 10**7), ("1.5B", 15 * 10**8), ("124000000", 124_000_000), ("7k", 7000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_given_fields_are_kept() -> None:
    """Depth, width and heads that the user names are not chosen anew."""
    given = {"family": "llama", "vocab_size": 1000, "max_seq_len": 64}
    spec = shape_for(10**7, {**given, "num_layers": 3})
    assert spec.num_layers == 3 and abs(count_params(spec).total / 1e7 - 1) < 0.2
    spec = shape_for(10**7, {**given, "hidden_size": 96, "num_heads": 4})
    assert spec.hidden_size == 96 and spec.num_heads == 4
    with pytest.raises(ConfigError, match="nearest"):
        shape_for(10**4, given)


def test_it_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from rankmesh.cli.main import main;"
        "code = main(['init', 'llama-mini', '--out', sys.argv[1]]);"
        "assert code == 0 and 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
