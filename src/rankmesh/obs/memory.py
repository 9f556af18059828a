"""Peak memory of this process on the host.

Owns the reading of the operating system's figure. It knows no device; see cuda_memory.py.
"""

from __future__ import annotations

import resource
import sys


def peak_rss_bytes() -> int:
    """The largest resident set that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
