"""No command reaches for the network: what a user types works, and tries nothing, without one.

Each command runs in a network namespace that has a loopback device and nothing else, where the
kernel lets an ordinary user make one; everywhere, an audit hook refuses and records every Python
call that looks up or connects to another machine.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Put on the path as `sitecustomize`, so that every Python process of a command starts with it.
WATCH = """
import ipaddress, json, os, socket, sys

LOG = {log!r}
OWN = {{"", "localhost", "ip6-localhost", socket.gethostname()}}

def is_local(host):
    if host is None or str(host) in OWN:
        return True
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified

def watch(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = args[1]
        if not isinstance(address, tuple):  # a unix socket, or a socket connected before
            return
        host = address[0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
        host = host.decode() if isinstance(host, bytes) else host
    else:
        return
    if not is_local(host):
        with open(LOG, "a") as log:
            log.write(json.dumps([event, str(host), sys.argv]) + "\\n")
        raise OSError("the network is blocked: " + event + " " + str(host))

sys.addaudithook(watch)
"""

TEXT = "A mesh of ranks holds one model between them. " * 400

CONFIG = """
[model]
family = "llama"
num_layers = 1
hidden_size = 16
num_heads = 2
ffn_size = 32
vocab_size = 257
max_seq_len = 16

[data]
train = ["{prefix}"]
seq_len = 16
tokenizer = "bytes"

[train]
steps = 2
global_batch_size = 2
microbatch_size = 2

[log]
run_dir = "{run_dir}"
"""

Command = Callable[..., str]


@cache
def _namespace() -> tuple[str, ...]:
    """Words that run a command with no network but loopback; () where that cannot be had."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return ()
    words = ("unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    return words if tried.returncode == 0 else ()


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs Python with the network blocked; returns stdout, and fails on an error or an attempt."""
    log = tmp_path / "attempts.jsonl"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(WATCH.format(log=str(log)), encoding="ascii")
    source = Path(__file__).resolve().parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", f"{hooks}:{source}")

    def run(*words: str) -> str:
        done = subprocess.run(
            [*_namespace(), sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
        )
        attempts = log.read_text(encoding="ascii") if log.exists() else ""
        assert not attempts, attempts
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_watch_notices_an_attempt(tmp_path: Path, blocked: Command) -> None:
    """A connection, a look-up and a datagram are each refused and recorded."""
    code = """
import socket
for attempt in (
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=5),
    lambda: socket.getaddrinfo("example.invalid", 80),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 80)),
):
    try:
        attempt()
    except OSError as error:
        assert "the network is blocked" in str(error), error
    else:
        raise SystemExit("an attempt went through")
"""
    with pytest.raises(AssertionError):
        blocked("-W", "ignore", "-c", code)
    lines = (tmp_path / "attempts.jsonl").read_text(encoding="ascii").splitlines()
    assert [json.loads(line)[0] for line in lines] == [
        "socket.getaddrinfo",
        "socket.getaddrinfo",
        "socket.sendto",
    ]


def test_loopback_stays_open(blocked: Command) -> None:
    """The rendezvous of local processes is not an attempt."""
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), timeout=5).close()
server.close()
print("ok")
"""
    assert blocked("-c", code) == "ok\n"


def test_the_namespace_has_no_way_out(blocked: Command) -> None:
    """Where namespaces can be had, the kernel itself refuses what the hook would not see."""
    if not _namespace():
        pytest.skip("this kernel gives no network namespace to an ordinary user")
    code = "import subprocess; print(subprocess.check_output(['ip', 'route'], text=True))"
    assert blocked("-c", code).strip() == ""


def test_map_needs_no_network(blocked: Command) -> None:
    """`rankmesh map` prints a world of sixteen ranks."""
    words = ("map", "--world-size", "16", "--tp", "2", "--pp", "4", "--json")
    printed = json.loads(blocked("-m", "rankmesh", *words))
    assert printed["groups"]["tp"][0] == [0, 1]


def test_training_needs_no_network(tmp_path: Path, blocked: Command) -> None:
    """From text to weights on one process and on two: prepare, train, and a run on disk."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="ascii")
    prefix = tmp_path / "tokens"
    blocked("-m", "rankmesh", "prepare", str(text), "--tokenizer", "bytes", "--out", str(prefix))
    for processes in (1, 2):
        run_dir = tmp_path / f"run-{processes}"
        config = tmp_path / f"config-{processes}.toml"
        config.write_text(CONFIG.format(prefix=prefix, run_dir=run_dir), encoding="ascii")
        blocked("-m", "rankmesh", "train", str(config), "--nproc", str(processes))
        steps = (run_dir / "metrics.jsonl").read_text(encoding="ascii").splitlines()
        assert [json.loads(step)["step"] for step in steps if "loss" in step] == [1, 2]
    words = ("eval", str(tmp_path / "run-2"), "--data", str(prefix), "--tp", "2", "--json")
    assert json.loads(blocked("-m", "rankmesh", *words))["world_size"] == 2
    runs = (str(tmp_path / "run-1"), str(tmp_path / "run-2"))
    assert "equal: 2 steps" in blocked("-m", "rankmesh", "compare", *runs, "--rtol", "1e-4")


def test_tensorboard_needs_no_network(tmp_path: Path, blocked: Command) -> None:
    """The one tracker that is all files."""
    pytest.importorskip("tensorboard")
    code = """
import sys
from pathlib import Path
from rankmesh.obs.trackers import Trackers, load_trackers
Trackers(load_trackers(["tensorboard"]), Path(sys.argv[1]), {}, sys.exit).close()
"""
    blocked("-c", code, str(tmp_path))
    assert list((tmp_path / "tensorboard").iterdir())
