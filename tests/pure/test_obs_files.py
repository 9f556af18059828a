"""Owns metrics.jsonl, the run folder and the masking of secrets. Imports no torch."""

import errno
import json
import logging
import math
import multiprocessing
import os
from pathlib import Path

import pytest

from rankmesh.errors import RankmeshError, UserError
from rankmesh.obs.jsonfile import decode, encode, read_json, write_json
from rankmesh.obs.log import RankLog
from rankmesh.obs.metrics import MetricsWriter, StepMetrics, read_metrics
from rankmesh.obs.rundir import (
    RankRecord,
    RunDir,
    config_path,
    log_folder,
    metrics_path,
    note_failure,
    read_launches,
    read_status,
)
from rankmesh.obs.secrets import MASK, is_secret, mask_text, masked


def metrics(step: int, **given: object) -> StepMetrics:
    figures: dict[str, object] = {
        "loss": 2.5,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 512,
        "tokens_per_s": 1000.0,
        "mfu": None,
        "step_time_s": 0.5,
        "peak_memory_bytes": 2**30,
        "comm_bytes": {"tp": 128, "dp": 64},
    }
    return StepMetrics(step=step, **{**figures, **given})  # type: ignore[arg-type]


# metrics.jsonl


def test_metrics_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(metrics(1))
        # Each step can be read while the run goes on.
        assert len(read_metrics(path)) == 1
        writer.write(metrics(2, eval_loss=2.25, extra={"exposed_s": 0.125}))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert list(first) == [
        "format_version",
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "mfu",
        "step_time_s",
        "peak_memory_bytes",
        "comm_bytes",
    ]
    assert first["comm_bytes"] == {"tp": 128, "dp": 64}
    assert first["mfu"] is None
    assert (second["eval_loss"], second["exposed_s"]) == (2.25, 0.125)


def test_not_a_number_is_valid_json_and_visible(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(metrics(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf))

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is no JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert (line["loss"], line["grad_norm"], line["lr"]) == ("NaN", "Infinity", "-Infinity")
    (record,) = read_metrics(path)
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["lr"]) == (math.inf, -math.inf)


def test_metrics_append_after_a_cut_line(tmp_path: Path) -> None:
    """A run killed while writing loses its last line only, also when it is resumed."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(metrics(1))
        writer.write(metrics(2))
    text = path.read_bytes()
    for cut in range(text.index(b"\n") + 2, len(text) - 1):
        path.write_bytes(text[:cut])
        assert [record["step"] for record in read_metrics(path)] == [1]
        with MetricsWriter(path) as writer:
            writer.write(metrics(3))
        assert [record["step"] for record in read_metrics(path)] == [1, 3]


def test_metrics_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(path)
    path.write_text("hello\n")
    with pytest.raises(UserError, match="line 1 is no JSON object: 'hello'"):
        read_metrics(path)
    path.write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="line 1 has no format_version 1"):
        read_metrics(path)


# Secrets


@pytest.mark.parametrize(
    "name",
    ["token", "hf_token", "HF_TOKEN", "apiKey", "api_key", "API-KEY", "apikey", "dbPassword"],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)
    assert masked({name: "abc", "list": [{name: ["abc"]}]}) == {
        name: MASK,
        "list": [{name: [MASK]}],
    }
    assert "abc" not in mask_text(f"started with {name}=abc")
    assert "abc" not in mask_text(f"{{'{name}': 'abc def'}}")


@pytest.mark.parametrize("name", ["tokenizer", "key", "monkey", "secretary", "keys", "apikeyboard"])
def test_plain_names(name: str) -> None:
    assert not is_secret(name)
    assert masked({name: "abc"}) == {name: "abc"}
    assert mask_text(f"{name}=abc") == f"{name}=abc"


def test_secret_after_another_name() -> None:
    assert mask_text("ValueError: token=abc: x=1") == f"ValueError: token={MASK} x=1"
    assert mask_text("token: secret=abc") == f"token: {MASK}"
    assert mask_text("no token") == "no token"


def test_counts_of_tokens_are_no_secret() -> None:
    counts = {"tokens": 512, "tokens_per_s": 1.5, "num_tokens": [1, 2]}
    assert masked(counts) == counts
    assert mask_text("tokens=512, tokens_per_s: 1,024.5") == "tokens=512, tokens_per_s: 1,024.5"


# JSON files


def test_json_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": math.nan, "hf_token": "abc", "path": (1, 2)})
    found = read_json(path)
    assert found["format_version"] == 1
    assert math.isnan(found["a"])
    assert found["hf_token"] == MASK
    assert found["path"] == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]
    assert decode(encode({"a": [math.inf]})) == {"a": [math.inf]}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 2}'])
def test_json_file_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json: "):
        read_json(tmp_path / "x.json")


# The folder of a run


def test_run_folder(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    ranks = [
        RankRecord(rank=r, host="h", device=f"cuda:{r}", pid=10 + r, coordinate={"tp": r, "dp": 0})
        for r in range(2)
    ]
    with RunDir(path, total_steps=10) as run:
        run.write_config("format_version = 1\n")
        run.add_launch({"tp": 2}, ranks)
        run.set_status("running", 0)
        assert read_status(path)["state"] == "running"
        run.set_status("failed", 7, error="rank 1:\n loss is NaN; api_key=abc")
    assert config_path(path).read_text() == "format_version = 1\n"
    assert log_folder(path).is_dir()
    (launch,) = read_launches(path)
    assert (launch["attempt"], launch["world_size"], launch["plan"]) == (1, 2, {"tp": 2})
    assert launch["ranks"][1] == vars(ranks[1])
    status = read_status(path)
    assert (status["state"], status["step"], status["total_steps"]) == ("failed", 7, 10)
    assert status["error"] == f"rank 1: loss is NaN; api_key={MASK}"
    assert status["pid"] == os.getpid()


def test_launches_add_up(tmp_path: Path) -> None:
    with RunDir(tmp_path, total_steps=1) as run:
        run.add_launch({}, [])
        run.add_launch({}, [])
    assert [launch["attempt"] for launch in read_launches(tmp_path)] == [1, 2]


def test_second_run_is_refused(tmp_path: Path) -> None:
    with RunDir(tmp_path, total_steps=1), pytest.raises(UserError) as caught:
        RunDir(tmp_path, total_steps=1)
    message = str(caught.value)
    assert f"in use by process {os.getpid()} on " in message
    assert "\n" not in message
    # Nothing was written: the folder is free and unused again.
    RunDir(tmp_path, total_steps=1).close()


def _hold(path: Path, held: "multiprocessing.synchronize.Event") -> None:
    RunDir(path, total_steps=1).set_status("running", 3)
    held.set()
    os._exit(9)


def test_lock_of_a_dead_run_is_free_but_its_folder_is_used(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    child = context.Process(target=_hold, args=(tmp_path, held))
    child.start()
    child.join(60)
    assert held.is_set()
    with pytest.raises(UserError, match="holds a run that was interrupted; train.resume=auto"):
        RunDir(tmp_path, total_steps=1)


@pytest.mark.parametrize(("state", "said"), [("done", "is done"), ("failed", "is failed")])
def test_used_folder_is_refused(state: str, said: str, tmp_path: Path) -> None:
    with RunDir(tmp_path, total_steps=1) as run:
        run.set_status(state, 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"holds a run that {said}"):
        RunDir(tmp_path, total_steps=1)


def test_a_run_that_made_no_step_does_not_use_its_folder_up(tmp_path: Path) -> None:
    """A wrong key found at start-up: the corrected run starts in the same folder, as attempt 2."""
    with RunDir(tmp_path, total_steps=1) as run:
        run.write_config("first")
        run.add_launch({}, [])
        run.set_status("failed", 0, "no CUDA device")
        MetricsWriter(metrics_path(tmp_path)).close()
    with RunDir(tmp_path, total_steps=1) as run:
        assert run.attempt == 2 and run.write_config("second") == "config-2.toml"
        run.set_status("failed", 0, "again")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds a run that is failed"):
        RunDir(tmp_path, total_steps=1)


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"log.run_dir .*file/run: cannot be written: Not a directory"
    ):
        RunDir(tmp_path / "file" / "run", total_steps=1)


def test_metrics_path_marks_a_used_folder(tmp_path: Path) -> None:
    metrics_path(tmp_path).write_text("")
    with pytest.raises(UserError, match="holds a run"):
        RunDir(tmp_path, total_steps=1)


# Logs


def test_log(tmp_path: Path) -> None:
    shown: list[str] = []
    with RankLog(3, folder=tmp_path / "log", show=shown.append) as log:
        log.logger.debug("detail")
        log.logger.info("start %d", 1)
        log.logger.warning("slow link, hf_token=abc")
    log.logger.error("after the end")
    assert shown == ["start 1", f"warning: slow link, hf_token={MASK}"]
    lines = (tmp_path / "log" / "rank-00003.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "DEBUG detail",
        "INFO start 1",
        f"WARNING slow link, hf_token={MASK}",
    ]
    assert lines[0][10] == "T" and lines[0].split(" ")[0].endswith("Z")


def test_logs_are_apart_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Two logs of one rank in one process, as in tests: no shared handlers, nothing registered."""
    before = set(logging.root.manager.loggerDict)
    shown: list[str] = []
    with RankLog(0, folder=tmp_path / "a") as a, RankLog(0, show=shown.append) as b:
        a.logger.info("to a")
        b.logger.info("to b")
    assert shown == ["to b"]
    assert "to b" not in (tmp_path / "a" / "rank-00000.log").read_text()
    assert set(logging.root.manager.loggerDict) == before
    with RankLog(0) as quiet:
        quiet.logger.error("nobody listens")


def test_log_appends_and_masks_exceptions(tmp_path: Path) -> None:
    for text in ("token=abc", "password: abc"):
        error = ValueError(text)
        with RankLog(0, folder=tmp_path) as log:
            log.logger.error("failed", exc_info=error)
    text = (tmp_path / "rank-00000.log").read_text()
    assert text.count("ValueError: ") == 2
    assert "abc" not in text


# full disks


def full(*_: object) -> None:
    """Stands for the call that finds no room."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays, and nothing beside it."""
    path = tmp_path / "status.json"
    write_json(path, {"state": "running"})
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(RankmeshError) as caught:
            write_json(path, {"state": "done"})
    assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert read_json(path)["state"] == "running" and list(tmp_path.iterdir()) == [path]


def test_a_failed_run_says_so_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the old status, where there is no room for a new one; also from the launcher."""
    with RunDir(tmp_path / "run", 5) as folder, monkeypatch.context() as patch:
        folder.set_status("running", 3)
        patch.setattr("os.fsync", full)
        folder.set_status("failed", 3, "no room")
        assert read_status(folder.path) | {"state": "failed", "error": "no room"} == read_status(
            folder.path
        )
        note_failure(folder.path, "ended")
        assert read_status(folder.path)["error"] == "ended"
        with pytest.raises(RankmeshError, match=r"status\.json: cannot be written"):
            folder.set_status("running", 4)


def test_metrics_on_a_full_disk_name_the_file(tmp_path: Path) -> None:
    """/dev/full takes nothing."""
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with MetricsWriter(path) as writer:
        with pytest.raises(RankmeshError) as caught:
            writer.write(metrics(1))
    assert str(caught.value) == f"{path}: cannot be written: No space left on device"


def test_a_log_on_a_full_disk_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback of logging's on the console, where the lines still are."""
    (tmp_path / "rank-00000.log").symlink_to("/dev/full")
    shown: list[str] = []
    with RankLog(0, folder=tmp_path, show=shown.append) as log:
        log.logger.info("step 1")
    assert shown == ["step 1"] and capsys.readouterr() == ("", "")


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    """Neither the path again nor an error number."""
    for read in (read_json, read_metrics):
        with pytest.raises(UserError) as caught:
            read(tmp_path / "none.json")
        expected = f"{tmp_path / 'none.json'}: cannot be read: No such file or directory"
        assert str(caught.value) == expected
