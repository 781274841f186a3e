"""Keeping freed memory in the process, where the C library would give it back after every step."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["keep_freed_memory"]

# mallopt(3). The threshold is glibc's own maximum; larger blocks are mapped and unmapped as ever.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD = 32 * 1024 * 1024
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have glibc's malloc reuse freed blocks of up to 32 MiB rather than return them to the kernel.

    Gradients are allocated and freed in every step. By default glibc unmaps such blocks, and the next step faults every
    page in again; in small networks that costs more than communication. The setting holds for the whole process.

    Returns:
        Whether the C library is glibc and took the setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
