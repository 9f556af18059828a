"""Peak rates of accelerators.

Owns the catalogue beside it (hardware.json) and the look-up by the name that the driver reports.
It asks no device.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator. tflops: dense (not sparse) peak by dtype in 10^12 FLOP/s."""

    name: str
    device_name: str
    tflops: dict[str, float]
    source: str


def _read() -> tuple[Accelerator, ...]:
    text = resources.files(__package__).joinpath("hardware.json").read_text(encoding="ascii")
    return tuple(Accelerator(**row) for row in json.loads(text)["accelerators"])


CATALOGUE = _read()


def find(device_name: str) -> Accelerator | None:
    """The accelerator that the driver calls `device_name`; None where the catalogue does not have
    it.

    The whole name must fit: a slice of a device (MIG) or a variant with other clocks is not its
    namesake.
    """
    bare = re.sub(r"^(NVIDIA|Tesla) ", "", device_name.strip())
    for accelerator in CATALOGUE:
        if re.fullmatch(accelerator.device_name, bare):
            return accelerator
    return None


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak in FLOP/s for matmuls in `dtype` (one of DTYPES); None where it is not known."""
    found = find(device_name)
    tflops = found.tflops.get(dtype) if found is not None else None
    return None if tflops is None else tflops * 1e12
