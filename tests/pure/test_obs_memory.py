"""Owns the peak memory of a rank: the device's figure on CUDA, the host's elsewhere."""

import pytest
import torch

from rankmesh.obs.cuda_memory import peak_memory_bytes, reset_peak_memory
from rankmesh.obs.memory import peak_rss_bytes


def test_cpu_reports_the_process() -> None:
    reset_peak_memory(torch.device("cpu"))
    before = peak_rss_bytes()
    assert before <= peak_memory_bytes(torch.device("cpu")) <= peak_rss_bytes()


def test_cuda_reports_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that is asked for, not the current one."""
    asked: list[torch.device] = []
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 7
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    device = torch.device("cuda", 1)
    assert peak_memory_bytes(device) == 7
    reset_peak_memory(device)
    assert asked == [device, device]
