"""What the processes of an engine share with each other and with the machine: blocks of memory, names, ends, CPUs."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_PAGE = mmap.PAGESIZE
# No process that has the descriptor can change the block's size: a page that is cut off would kill its readers.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedBlock:
    """A block of zeroes with a descriptor, or the same block in another process, mapped from that descriptor.

    It is freed with the last array over it. Pages use memory only once they are written. No process can change its
    size.

    >>> block = SharedBlock(100)
    >>> SharedBlock.of(os.dup(block.fd)).array is not block.array
    True
    """

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        if fd < 0:
            fd = os.memfd_create("paellapy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, -(-max(1, nbytes) // _PAGE) * _PAGE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        self.fd, self.nbytes = fd, os.fstat(fd).st_size
        self.array: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, self.nbytes), np.uint8)
        self._close = weakref.finalize(self, os.close, fd)

    @staticmethod
    def of(fd: int) -> SharedBlock:
        """Maps a block of another process; this object owns the descriptor from now on."""
        try:
            return SharedBlock(0, fd)
        except OSError:
            os.close(fd)
            raise

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def close_descriptor(self) -> None:
        """Closes the descriptor, when no other process will map the block."""
        self._close()


def name_process(name: str) -> None:
    """Sets the name that `ps` and `top` show: up to 15 characters."""
    libc: Any = ctypes.CDLL(None)
    libc.prctl(15, ctypes.create_string_buffer(name.encode()[:15]))  # PR_SET_NAME


def die_with_parent(signal: int) -> None:
    """Makes the kernel send this process the signal when its parent ends in any way."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, ctypes.c_ulong(signal)) != 0:  # PR_SET_PDEATHSIG
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


FEW_CORES = 4  # on this many CPUs or fewer, a spinning thread takes a core that others need


def spare_a_cpu() -> bool:
    """Leaves PyTorch a thread for each CPU but one; whether it had more. With one for each, one of them shares its CPU
    with a core that spins, and every operation on the CPU waits for that one, often for two ticks of the scheduler.
    """
    torch = sys.modules.get("torch")
    cpus = int(usable_cpus())
    if torch is None or cpus <= FEW_CORES or torch.get_num_threads() < cpus:
        return False
    torch.set_num_threads(cpus - 1)
    return True


def usable_cpus(quota: Path = _QUOTA) -> float:
    """The number of CPUs that this process may use at once, including the quota of its container."""
    found = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return min(found, int(allowed) / int(period))
    except (OSError, ValueError):  # there is no quota, or it is "max"
        return found
