"""What this machine is and what it lacks: cores, memory, accelerators, limits, loopback.

Owns the facts of one host and the warnings that follow from them alone. It knows no other host,
no rank and no process group.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import torch

from rankmesh.comm.preflight import Finding

__all__ = ["machine_facts", "machine_findings"]

_GIB = 1 << 30
_SHM = Path("/dev/shm")
_LEAST_SHM = 64 << 20
_LEAST_FILES = 1024


def machine_facts() -> dict[str, Any]:
    """Facts of this host as plain values; memory and limits in bytes, -1 for no limit.

    accelerators: name, memory and identity of each that is visible. shm_bytes: None where the
    system has no /dev/shm. loopback: address -> whether a message comes back on it.
    """
    memory = _memory()
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.get("MemTotal", 0),
        "memory_free_bytes": memory.get("MemAvailable", 0),
        "accelerators": [
            _accelerator(torch.device("cuda", index)) for index in range(torch.cuda.device_count())
        ],
        "shm_bytes": shutil.disk_usage(_SHM).free if _SHM.is_dir() else None,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "processes": _limit(resource.RLIMIT_NPROC),
        "loopback": {
            "127.0.0.1": _loopback_works(socket.AF_INET, "127.0.0.1"),
            "::1": _loopback_works(socket.AF_INET6, "::1"),
        },
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }


def machine_findings(facts: dict[str, Any]) -> list[Finding]:
    """What is wrong with a host, by its facts alone; only a dead loopback is fatal."""
    host = facts["host"]
    found = []
    if not any(facts["loopback"].values()):
        found.append(Finding("0", f"{host}: no message comes back over the loopback device"))
    shm = facts["shm_bytes"]
    if shm is not None and shm < _LEAST_SHM:
        text = f"{host}: /dev/shm has {shm >> 20} MiB free; data loaders and NCCL need 64 or more"
        found.append(Finding("0", text, fatal=False))
    if 0 <= facts["open_files"] < _LEAST_FILES:
        text = f"{host}: {facts['open_files']} open files are allowed (ulimit -n); set 1024 or more"
        found.append(Finding("0", text, fatal=False))
    if facts["accelerators"] and 0 <= facts["locked_memory_bytes"] < _GIB:
        locked = facts["locked_memory_bytes"] >> 20
        text = f"{host}: {locked} MiB may be locked (ulimit -l); RDMA between hosts needs unlimited"
        found.append(Finding("0", text, fatal=False))
    return found


def _accelerator(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "id": str(getattr(properties, "uuid", device.index)),
    }


def _memory() -> dict[str, int]:
    """/proc/meminfo in bytes; empty on other systems."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return {}
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _limit(kind: int) -> int:
    return int(resource.getrlimit(kind)[0])


def _loopback_works(family: socket.AddressFamily, address: str) -> bool:
    """Whether a byte sent to a port of ours comes back."""
    try:
        with socket.create_server((address, 0), family=family) as server:
            with socket.create_connection(server.getsockname()[:2], timeout=5) as client:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(5)
                    client.sendall(b"x")
                    return peer.recv(1) == b"x"
    except OSError:
        return False
