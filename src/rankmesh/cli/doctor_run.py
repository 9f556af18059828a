"""The body of `rankmesh doctor`: starts ranks, or joins them, and tells what does not work.

Owns the report and its two forms. The checks belong to `comm`; starting belongs to `train.launch`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rankmesh.comm.bootstrap import Options, Startup, run_rank, start
from rankmesh.comm.environ import Launch, read_launch
from rankmesh.comm.exchange import Store, consult
from rankmesh.comm.failure import Lifeline
from rankmesh.comm.links import Limits
from rankmesh.comm.machine import machine_facts, machine_findings
from rankmesh.comm.preflight import Finding
from rankmesh.errors import MeshError, UserError
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.launch import launch as start_ranks
from rankmesh.version import __version__, commit

_GIB = 1 << 30


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0, or 1 where something does not work."""
    if args.patience <= 0:
        raise UserError(f"--patience {args.patience:g}: a number above 0 is needed")
    launch = read_launch()
    if launch is not None:
        return run_rank(launch, partial(_rank, args, launch))
    return _alone(args)


def _alone(args: argparse.Namespace) -> int:
    """Starts ranks on this machine, and reports for them also where they fail to start."""
    nproc = args.nproc if args.nproc is not None else _default_ranks(args.device)
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: a whole number of at least 1 is needed")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rankmesh-doctor-") as folder:
        path = Path(folder) / "report.json"
        words = ["doctor", "--device", args.device, "--patience", str(args.patience)]
        code = start_ranks([*words, "--report", str(path)], nproc, announce=False)
        report = json.loads(path.read_text()) if path.is_file() else _report([machine_facts()])
    report["seconds"] = time.perf_counter() - began
    if code and not any(found["fatal"] for found in report["findings"]):
        text = f"{nproc} ranks did not start on this machine; the reason is on stderr"
        report["findings"].append(asdict(Finding("0", text)))
    _print(report, args.json)
    return _code(report)


def _rank(args: argparse.Namespace, launch: Launch, lifeline: Lifeline) -> int:
    """One rank of the check; rank 0 reports."""
    options = Options(
        device=args.device,
        agree={"rankmesh": __version__},
        limits=Limits(arrive_s=3 * args.patience, answer_s=args.patience),
    )
    try:
        plan = ParallelPlan(dp=launch.world_size)
        started = start(plan, launch, lifeline=lifeline, options=options)
    except MeshError as error:
        if args.report is not None and launch.rank == 0:
            report = _report([machine_facts()])
            report["findings"].append(asdict(Finding("", str(error))))
            args.report.write_text(json.dumps(report))
        raise
    machines = _machines(started.store, launch, options.limits.arrive_s)
    if launch.rank:
        return 0
    report = _report(machines, started)
    if args.report is not None:
        args.report.write_text(json.dumps(report))
        return 0
    _print(report, args.json)
    return _code(report)


def _machines(store: Store, launch: Launch, limit_s: float) -> list[dict[str, Any]]:
    """Facts of each host, on every rank; one rank of a host speaks for it."""

    def judge(records: Mapping[int, Any], absent: object) -> list[Any]:
        found = {record["host"]: record for record in records.values() if record is not None}
        return list(found.values())

    machines: list[dict[str, Any]] = consult(
        store,
        "machines",
        rank=launch.rank,
        world_size=launch.world_size,
        record=machine_facts() if launch.local_rank == 0 else None,
        judge=judge,
        limit_s=limit_s,
    )
    return machines


def _report(machines: list[dict[str, Any]], started: Startup | None = None) -> dict[str, Any]:
    """The whole report as plain values; seconds, bytes and bytes a second."""
    findings = [finding for facts in machines for finding in machine_findings(facts)]
    report: dict[str, Any] = {
        "rankmesh": __version__,
        "commit": commit(),
        "machines": machines,
        "ranks": [],
        "phases": {},
        "links": [],
    }
    if started is not None:
        findings += started.findings
        report["ranks"] = [asdict(one) for one in started.ranks]
        report["phases"] = dict(started.phases)
        report["links"] = [
            {**asdict(link), "bytes_per_s": link.bytes_per_s} for link in started.links.links
        ]
    report["findings"] = [asdict(finding) for finding in findings]
    return report


def _code(report: Mapping[str, Any]) -> int:
    return int(any(found["fatal"] for found in report["findings"]))


def _default_ranks(device: str) -> int:
    visible = 0 if device == "cpu" else torch.cuda.device_count()
    return visible or min(4, max(2, machine_facts()["cores"]))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _print(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({**report, "ok": _code(report) == 0}))
        return
    for facts in report["machines"]:
        print("\n".join(_machine_lines(facts)))
    print(f"package   rankmesh {report['rankmesh']} (commit {report['commit']})")
    if report["ranks"]:
        times = ", ".join(f"{name} {took:.2f} s" for name, took in report["phases"].items())
        hosts = {one["host"] for one in report["ranks"]}
        where = f"{_counted(len(report['ranks']), 'rank')} on {_counted(len(hosts), 'host')}"
        print(f"ranks     {where}; {times}")
    for link in report["links"]:
        speed = f"{link['latency_s'] * 1e6:.0f} us, {link['bytes_per_s'] / 1e9:.2f} GB/s"
        print(f"link      rank {link['low']} - rank {link['high']}: {speed}")
    for found in report["findings"]:
        check = f"preflight {found['check']}: " if found["check"] not in ("", "0") else ""
        print(f"{'FAULT' if found['fatal'] else 'warning':<9} {check}{found['text']}")
    if not report["findings"]:
        print("all is well")


def _machine_lines(facts: Mapping[str, Any]) -> list[str]:
    names = [f"{one['name']} ({_gib(one['memory_bytes'])})" for one in facts["accelerators"]]
    shm = "no /dev/shm" if facts["shm_bytes"] is None else f"/dev/shm {_gib(facts['shm_bytes'])}"
    loopback = ", ".join(name for name, works in facts["loopback"].items() if works) or "dead"
    cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ""
    return [
        f"machine   {facts['host']}: {facts['cores']} cores, memory {_gib(facts['memory_bytes'])} "
        f"({_gib(facts['memory_free_bytes'])} free), {', '.join(names) or 'no accelerator'}",
        f"system    {facts['system']}, {shm}, open files {_plain(facts['open_files'])}, "
        f"processes {_plain(facts['processes'])}, loopback {loopback}",
        f"versions  Python {facts['python']}, torch {facts['torch']}{cuda}",
    ]


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def _plain(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)
