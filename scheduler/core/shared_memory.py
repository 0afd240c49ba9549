"""Memory that several processes see: anonymous, handed from one to the other as a file descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE


class SharedBlock:
    """A block of zeroes with a descriptor; in another process, the same block from that descriptor.

    It goes with the last array over it. Pages take memory once they are touched.

    >>> block = SharedBlock(100)
    >>> SharedBlock.of(os.dup(block.fd)).array is not block.array
    True
    """

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        if fd < 0:
            fd = os.memfd_create("paellapy", os.MFD_CLOEXEC)
            os.ftruncate(fd, -(-max(1, nbytes) // _PAGE) * _PAGE)
        self.fd, self.nbytes = fd, os.fstat(fd).st_size
        self.array: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, self.nbytes), np.uint8)
        self._close = weakref.finalize(self, os.close, fd)

    @staticmethod
    def of(fd: int) -> SharedBlock:
        """Over a block of another process; the descriptor is its own from now on."""
        return SharedBlock(0, fd)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def close_descriptor(self) -> None:
        """Nobody else will map it."""
        self._close()


def name_process(name: str) -> None:
    """As `ps` and `top` show it: up to 15 characters."""
    libc: Any = ctypes.CDLL(None)
    libc.prctl(15, ctypes.create_string_buffer(name.encode()[:15]))  # PR_SET_NAME


def die_with_parent(signal: int) -> None:
    """The kernel sends this process the signal when its parent ends, however that ends."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, ctypes.c_ulong(signal)) != 0:  # PR_SET_PDEATHSIG
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
