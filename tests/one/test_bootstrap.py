"""Start-up in one process: its order, the device that is bound, and what a failure is."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankmesh.comm import bootstrap
from rankmesh.comm.bootstrap import Options, bind_device, run_rank, start
from rankmesh.comm.environ import Launch, alone, read_launch
from rankmesh.comm.failure import Failure, Lifeline, first_failure, lost_peer
from rankmesh.comm.identity import code_digest, digest, identify, rank_records
from rankmesh.comm.links import Limits, LinkReport
from rankmesh.errors import MeshError, RankmeshError, UserError
from rankmesh.topology.plan import ParallelPlan

PHASES = (
    "environment",
    "device",
    "rendezvous",
    "preflight A",
    "world group",
    "groups",
    "preflight B",
)


def launched(**changes: Any) -> Launch:
    """Rank 0 of 2 on one host, with the devices the wrong way round."""
    fields: dict[str, Any] = {
        "launcher": "torchrun",
        "rank": 0,
        "world_size": 2,
        "local_rank": 1,
        "local_world_size": 2,
        "master_addr": "localhost",
        "master_port": 29500,
    }
    return Launch(**{**fields, **changes})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A host with eight GPUs and peers that agree with everything; lists the steps taken."""
    seen: list[str] = []

    def step(name: str, result: object = None) -> Any:
        return lambda *args, **kwargs: seen.append(name.format(*args, **kwargs)) or result

    cuda = types.SimpleNamespace(
        device_count=lambda: 8,
        set_device=step("bind {0}"),
        get_device_properties=lambda device: types.SimpleNamespace(name="gpu", uuid="GPU-1"),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(bootstrap, "_connect", step("store", dist.HashStore()))
    monkeypatch.setattr(bootstrap, "check_identities", step("preflight A", ()))
    monkeypatch.setattr(dist, "init_process_group", step("world group {0} on {device_id}"))
    monkeypatch.setattr(bootstrap, "make_groups", step("groups", {}))
    monkeypatch.setattr(bootstrap, "check_links", step("preflight B", LinkReport(())))
    return seen


def test_the_order_of_start_up(steps: list[str]) -> None:
    """Field report G04: the device is bound before anything that could use another.

    It is the local rank's, not the rank's, and the world group is told of it.
    """
    started = start(ParallelPlan(dp=2), launched())
    assert steps == [
        "bind cuda:1",
        "store",
        "preflight A",
        "world group nccl on cuda:1",
        "groups",
        "preflight B",
    ]
    assert tuple(name for name, _ in started.phases) == PHASES
    assert started.mesh.device == torch.device("cuda", 1)


def test_each_rank_binds_the_device_of_its_local_rank(steps: list[str]) -> None:
    """Field report G04: LOCAL_RANK swapped against RANK, as far as one machine can tell."""
    bind_device(launched(rank=0, local_rank=1), "auto")
    bind_device(launched(rank=1, local_rank=0), "cuda")
    assert steps == ["bind cuda:1", "bind cuda:0"]
    assert bind_device(launched(), "cpu") == torch.device("cpu") and len(steps) == 2


def test_cuda_where_there_is_none() -> None:
    """One line; no fall-back behind the user's back."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="no CUDA device is visible"):
        bind_device(launched(), "cuda")
    assert bind_device(launched(), "auto") == torch.device("cpu")


def test_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process needs no launcher, no process group and no network; the map is logged."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("test-alone")
    with caplog.at_level(logging.DEBUG, logger="test-alone"):
        started = start(ParallelPlan(), options=Options(device="cpu", host="alpha"), logger=logger)
    assert tuple(name for name, _ in started.phases) == PHASES
    assert not dist.is_initialized() and started.mesh.groups == {}
    assert [one.host for one in started.ranks] == ["alpha"]
    assert caplog.messages[0].startswith("1 rank on 1 host: one rank; start-up ")
    assert caplog.messages[1].startswith("rank 0: alpha cpu pid ")
    assert caplog.messages[1].endswith("tp 0 cp 0 dp 0 pp 0")
    record = rank_records(started.mesh.plan, started.ranks)[0]
    assert (record.rank, record.host, record.device) == (0, "alpha", "cpu")
    assert set(record.coordinate) >= {"tp", "cp", "dp", "pp", "ep"}


def test_the_environment_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report U08: contradictory variables end the start before anything else happens."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        start(ParallelPlan())


def test_a_plan_for_another_world_is_refused() -> None:
    """The line names both numbers."""
    with pytest.raises(MeshError, match=r"dp 4\) has 4 ranks, the launcher started 1"):
        start(ParallelPlan(dp=4), alone())


def test_a_taken_port_is_named() -> None:
    """Field report U03: another job's port gives a clear line, at once."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MeshError) as caught:
            start(ParallelPlan(dp=2), launched(master_port=port), options=Options(device="cpu"))
    assert f"rank 0 ({socket.gethostname()}) cannot keep" in str(caught.value)
    assert f"localhost:{port}" in str(caught.value) and "MASTER_PORT" in str(caught.value)


def test_an_absent_store_is_named() -> None:
    """No rank 0: a line within the limit instead of a wait."""
    options = Options(device="cpu", limits=Limits(arrive_s=0.5))
    with pytest.raises(MeshError, match="rank 1 .* cannot reach .* at localhost:9"):
        start(ParallelPlan(dp=2), launched(rank=1, local_rank=0, master_port=9), options=options)


def test_without_a_launcher_errors_pass_through() -> None:
    """The command line shows them; nothing ends the process."""

    def body(lifeline: object) -> int:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_rank(alone(), body)
    assert run_rank(alone(), lambda lifeline: 3) == 3


def test_what_is_agreed_upon() -> None:
    """Hashes depend on values, not on order; the code's hash sees every file."""
    assert digest({"a": 1, "b": [2]}) == digest({"b": (2,), "a": 1}) != digest({"a": 1, "b": [3]})
    assert code_digest() == code_digest() and len(code_digest()) == 12
    mine = identify(alone(), torch.device("cpu"), {"config": "x"}, "alpha")
    assert set(mine.agree) == {"python", "torch", "code", "config"}
    assert (mine.host, mine.device, mine.device_id) == ("alpha", "cpu", "")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("data.train: no such file"), 2, "rank 3 (alpha): data.train: no such file"),
        (MeshError("a\nb"), 1, "rank 3 (alpha): a b"),
        (ValueError("boom"), 1, "rank 3 (alpha): ValueError: boom"),
        (KeyError(), 1, "rank 3 (alpha): KeyError"),
        (KeyboardInterrupt(), 130, "rank 3 (alpha): KeyboardInterrupt"),
    ],
)
def test_a_failure_in_one_line(error: BaseException, code: int, line: str) -> None:
    """Our own errors speak for themselves; others name their class."""
    failure = Failure.of(error, 3, "alpha")
    assert (failure.code, failure.line) == (code, line)
    assert failure.known == isinstance(error, RankmeshError | KeyboardInterrupt)


def test_the_loss_of_a_peer_is_told_from_an_error_of_ones_own() -> None:
    """Also where the seam has wrapped it."""
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]")
    wrapped = MeshError("all_reduce over dp failed")
    wrapped.__cause__ = gloo
    assert lost_peer(gloo) and lost_peer(wrapped) and lost_peer(dist.DistNetworkError("x"))
    assert not lost_peer(ValueError("connection reset")) and not lost_peer(RuntimeError("shape"))


def content(failure: Failure | None) -> Mapping[str, Any]:
    """An error file as torch's agent reads it."""
    if failure is None:
        return {"message": "<NONE>"}
    return {"message": {"message": failure.line, "rankmesh": vars(failure)}}


def test_the_first_failure_is_found_among_its_consequences() -> None:
    """By time, but a lost peer never hides an error."""
    lost = Failure(0, "a", "MeshError", "lost", 1, time=10.0, by_peer=True)
    boom = Failure(1, "a", "ValueError", "boom", 1, time=11.0)
    late = Failure(2, "a", "ValueError", "late", 1, time=12.0)
    files = {0: content(lost), 1: content(late), 2: content(boom), 3: content(None)}
    assert first_failure(files) == boom
    assert first_failure({0: content(lost), 3: content(None)}) == lost
    assert first_failure({3: content(None)}) is None


CONTRADICTION = """
import sys
from rankmesh.comm.environ import read_launch
from rankmesh.errors import RankmeshError
try:
    read_launch()
except RankmeshError as error:
    sys.exit(f"{error.exit_code} {error}")
"""


def test_the_environment_of_a_real_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report U08: RANK=5 of 4, as a shell would pass it."""
    variables = {"RANK": "5", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError):
        read_launch()
    done = subprocess.run(
        [sys.executable, "-c", CONTRADICTION],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**variables, "PYTHONPATH": "src"},
    )
    assert done.stderr.startswith("2 RANK=5 does not fit WORLD_SIZE=4")


def test_a_record_that_finds_no_room_is_spoken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a record would end torch's agent with a traceback of its own; none is read by nobody."""
    record = tmp_path / "rank-00000.error.json"
    record.with_suffix(".partial").symlink_to("/dev/full")
    lifeline = Lifeline(replace(alone(), error_file=record), "here")
    lifeline.tell(RankmeshError("no room"))
    assert capsys.readouterr().err == "rankmesh: error: rank 0 (here): no room\n"
    assert list(tmp_path.iterdir()) == []
