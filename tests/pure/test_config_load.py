"""Owns reading a config: files, overrides, types, values and the one line of each refusal.

Imports no torch.
"""

from pathlib import Path

import pytest

from rankmesh.config import LogConfig, OptimizerConfig, RunConfig, TrainConfig, load_config
from rankmesh.config.model import RopeScalingConfig
from rankmesh.errors import ConfigError

FILE = """
[model]
preset = "llama-tiny"

[data]
train = ["text", ["more", 1]]

[optimizer]
lr = 1
warmup_steps = 100
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "run.toml"
    found.write_text(FILE)
    return found


def refusal(path: Path | None, *overrides: str) -> str:
    """The message of the ConfigError, which must be one line of ASCII."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isascii()
    return message


def test_no_file_is_all_defaults() -> None:
    assert load_config(None) == RunConfig()


def test_file(path: Path) -> None:
    config = load_config(path)
    assert config.model.preset == "llama-tiny"
    assert config.data.train == ("text", ("more", 1.0))
    assert config.optimizer == OptimizerConfig(lr=1.0, warmup_steps=100)
    assert type(config.optimizer.lr) is float
    assert config.train == TrainConfig()


def test_overrides(path: Path) -> None:
    config = load_config(
        path,
        [
            "train.steps=200",
            "train.steps = 300",
            "optimizer.lr=2e-3",
            "optimizer.betas=[0.9, 0.99]",
            "optimizer.schedule=wsd",
            'train.dtype="fp64"',
            "data.train=['a b', 'c']",
            "parallel.sequence_parallel=true",
            "log.run_dir=runs/x=y",
        ],
    )
    assert config.train.steps == 300
    assert config.optimizer.lr == 2e-3
    assert config.optimizer.betas == (0.9, 0.99)
    assert config.optimizer.schedule == "wsd"
    assert config.train.dtype == "fp64"
    assert config.data.train == ("a b", "c")
    assert config.parallel.sequence_parallel is True
    assert config.log.run_dir == "runs/x=y"


@pytest.mark.parametrize("text", ["2026", "2026-01-31", "true", "1e3", "[x", "a#b", "none", "1\n2"])
def test_override_of_a_text_key_is_text(text: str) -> None:
    if "\n" in text:
        assert "control characters" in refusal(None, f"log.run_dir={text}")
    else:
        assert load_config(None, [f"log.run_dir={text}"]).log.run_dir == text


def test_none_unsets(path: Path) -> None:
    assert load_config(path, ["model.preset=none"]).model.preset is None
    assert load_config(None, ["parallel.dp=2", "parallel.dp=none"]).parallel.dp is None
    assert load_config(None, ['model.preset="none"']).model.preset == "none"
    assert "expected a number" in refusal(None, "optimizer.lr=none")


def test_tables() -> None:
    whole = load_config(None, ["model.rope_scaling={factor = 4}"])
    assert whole.model.rope_scaling == RopeScalingConfig(factor=4.0)
    part = load_config(
        None,
        ["model.rope_scaling.factor=9", "model.rope_scaling={}", "model.rope_scaling.factor=2"],
    )
    assert part.model.rope_scaling == RopeScalingConfig(factor=2.0)
    lost = load_config(None, ["model.rope_scaling.factor=9", "model.rope_scaling={}"])
    assert lost.model.rope_scaling == RopeScalingConfig()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("optimiser.lr=1", "unknown key optimiser.lr; did you mean optimizer.lr?"),
        ("train.lr=1", "unknown key train.lr; did you mean optimizer.lr?"),
        ("optimizer.seed=1", "did you mean data.seed or train.seed?"),
        ("train.epochs=1", "known in [train]: steps, global_batch_size, "),
        ("x.y=1", "known sections: model, parallel, "),
        ("optimizer.lr.x=1", "unknown key optimizer.lr.x; "),
        ("optimizer.lr", 'override "optimizer.lr": expected section.key=value'),
        ("lr=1", 'override "lr": expected section.key=value'),
        ("=1", "expected section.key=value"),
        ("optimizer.lr=high", 'override: optimizer.lr = "high": expected a number'),
        ("optimizer.lr=", 'optimizer.lr = "": expected a number'),
        ("optimizer.lr=true", "optimizer.lr = true: expected a number"),
        ("optimizer.lr=nan", "optimizer.lr = nan: expected a finite number"),
        ("optimizer.lr=-inf", "optimizer.lr = -inf: expected a finite number"),
        ("optimizer.lr=0", "optimizer.lr = 0.0: expected a number above 0"),
        ("optimizer.betas=[0.9, 1.0]", "[0.9, 1.0]: expected a number at least 0 and below 1"),
        ("optimizer.betas=[0.9, nan]", "expected a finite number"),
        ("optimizer.betas=[0.9]", "[0.9]: expected a list [number, number]"),
        ("optimizer.betas=0.9", "0.9: expected a list [number, number]"),
        ("optimizer.min_lr=1", "expected at most optimizer.lr, which is 0.0003"),
        ("optimizer.warmup_steps=1001", "1001: expected at most train.steps, which is 1000"),
        ("train.steps=-1", "train.steps = -1: expected a number at least 0"),
        ("train.steps=1.0", "train.steps = 1.0: expected an integer"),
        ("train.steps=true", "train.steps = true: expected an integer"),
        ("train.steps=9223372036854775808", "expected an integer of 64 bits"),
        ("train.global_batch_size=0", "expected a number at least 1"),
        ("train.microbatch_size=0", "expected a number at least 1"),
        ("train.dtype=fp8", '"fp8": expected one of "fp32", "fp64"'),
        ("train.dtype=fp8", '"fp16"'),
        ("train.label_smoothing=1", "expected a number at least 0 and below 1"),
        ("parallel.tp=0", "expected a number at least 1"),
        ("parallel.zero=4", "4: expected one of 0, 1, 2, 3"),
        ("parallel.sequence_parallel=1", "1: expected true or false"),
        ("parallel.order=['tp', 'cp']", "expected tp, cp, dp, pp, once each"),
        ("parallel.order=['tp', 'cp', 'dp', 'px']", "expected one of "),
        ("data.train=text", "expected a list, each element a string or a list [string, "),
        ("data.train=[3]", "data.train[0] = 3: expected a string or a list [string, number]"),
        ("data.train=['a', ['b', -2]]", "expected weights above 0"),
        ("data.train=[['a', 0]]", "expected weights above 0"),
        ("data.train=['']", "expected text that is not empty"),
        ("data.split=9,x,1", '"9,x,1": expected one to three numbers of at least 0, the first'),
        ("data.split=0,1", "expected one to three numbers of at least 0, the first above 0"),
        ("data.split=[9, -1]", "expected one to three numbers of at least 0"),
        ("data.split=[6, 2, 1, 1]", "expected one to three numbers"),
        ("data.split=[]", "expected one to three numbers"),
        ("data.split=1e999", "data.split"),
        ("data.split=98", "98: expected a string or a list of numbers"),
        ("log.run_dir=", "expected text that is not empty"),
        ("log.timeout_s=0", "expected a number above 0"),
        ("model.dropout=1.0", "expected a number at least 0 and below 1"),
        (
            "model.rope_scaling={low_freq_factor=4, high_freq_factor=4}",
            "number below high_freq_factor",
        ),
        ("model.rope_scaling={fact=8}", "did you mean model.rope_scaling.factor?"),
        ("model.rope_scaling=3", "model.rope_scaling = 3: expected a table"),
    ],
)
def test_override_refused(override: str, message: str) -> None:
    found = refusal(None, override)
    assert message in found
    assert found.startswith("override")


@pytest.mark.parametrize("value", ["9" * 6000, "0x" + "f" * 6000, "[" * 6000, "x\x00y\u00e9"])
def test_monstrous_values(value: str, tmp_path: Path) -> None:
    """Values that break Python's own conversions are refused like any other, and cut short."""
    assert len(refusal(None, f"optimizer.lr={value}")) < 300
    assert len(refusal(None, f"optimizer.lr=[{value}]")) < 300
    (tmp_path / "x.toml").write_text(f"[optimizer]\nlr = {value}\n", encoding="utf-8")
    assert len(refusal(tmp_path / "x.toml")) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimiser]\nlr = 1", "unknown section [optimiser]; did you mean optimizer?"),
        ("[zzz]\nlr = 1", "unknown section [zzz]; known sections: model, "),
        ("lr = 1", "unknown key lr; did you mean optimizer.lr?"),
        ("train = 3", "train = 3: expected a table"),
        ("[[train]]\nsteps = 3", "expected a table"),
        ("[optimizer]\nlr = 2026-01-31", "optimizer.lr = 2026-01-31: expected a number"),
        ("[optimizer.lr]\nx = 1", "optimizer.lr = {x = 1}: expected a number"),
        ("[optimizer]\nschedul = 'x'", "did you mean optimizer.schedule?"),
        ("[train]\nsteps = 3\nsteps = 4", "not valid TOML: Cannot overwrite a value"),
        ("[train\n", "not valid TOML"),
        (
            "format_version = 2",
            "format_version = 2: expected 1, the version that",
        ),
        ("format_version = true", "format_version = true: expected 1"),
        ("[data]\ntokenizer = 3", "data.tokenizer = 3: expected a string"),
    ],
)
def test_file_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    found = refusal(path)
    assert message in found
    assert found.startswith(f"{path}: ")


def test_unreadable_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.toml")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[model]\npreset = '\xe9'\n")
    assert "not UTF-8" in refusal(tmp_path / "latin.toml")


def test_refusal_names_who_gave_the_value(path: Path) -> None:
    """The file's own value is blamed on the file, also where an override made it impossible."""
    assert refusal(path, "train.steps=5").startswith(f"{path}: optimizer.warmup_steps = 100: ")
    assert refusal(path, "optimizer.warmup_steps=2000").startswith("override: ")
    path.write_text("train = 3")
    assert refusal(path, "train.steps=5") == f"{path}: train = 3: expected a table"


def test_secret_in_an_unknown_key_is_not_repeated() -> None:
    assert "hunter2" not in refusal(None, "log.hf_token=hunter2")
    assert "hunter2" not in refusal(None, "hf_token=hunter2")


def test_warmup_may_exceed_a_short_trial_of_a_long_schedule(path: Path) -> None:
    config = load_config(path, ["train.steps=5", "optimizer.decay_steps=1000"])
    assert config.decay_steps == 1000
    assert load_config(path).decay_steps == 1000
    assert load_config(None, ["train.steps=0"]).decay_steps == 0


def test_wsd_must_fit() -> None:
    wsd = ["optimizer.schedule=wsd", "train.steps=10", "optimizer.warmup_steps=4"]
    assert load_config(None, [*wsd, "optimizer.wsd_decay_steps=6"]).optimizer.wsd_decay_steps == 6
    assert "at most 6: train.steps is 10" in refusal(None, *wsd, "optimizer.wsd_decay_steps=7")


def test_values_are_checked_without_a_file_too() -> None:
    with pytest.raises(ConfigError, match="optimizer.lr = -1.0: expected a number above 0"):
        OptimizerConfig(lr=-1.0)
    with pytest.raises(ConfigError, match="log.console"):
        LogConfig(console="loud")


@pytest.mark.parametrize("given", [5, 0, 2.5, ["a.toml"], object])
def test_what_is_no_config_is_refused(given: object) -> None:
    """`rm.train(5)`: the caller's mistake, in one line."""
    with pytest.raises(ConfigError, match="expected the path of a TOML file, a dict of sections"):
        load_config(given)  # type: ignore[arg-type]
