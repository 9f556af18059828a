"""Peak memory of this rank on its device.

Owns the choice between the device's figure and the host's. The one file of `obs` that imports
torch; only code that trains loads it.
"""

from __future__ import annotations

import torch

from rankmesh.obs.memory import peak_rss_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes of tensors held on a CUDA device since the last reset; on a CPU the peak resident
    set.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_rss_bytes()


def reset_peak_memory(device: torch.device) -> None:
    """Start the peak of a CUDA device anew; the host's cannot be."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
