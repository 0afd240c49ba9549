"""Messages between a worker and the engine's process."""

from __future__ import annotations

import asyncio
import os
import resource
import socket

from paellapy.scheduler.core.processes import SharedBlock
from paellapy.serving.workers.channel import Channel, Message


def test_a_channel_that_cannot_take_a_descriptor_ends_and_keeps_none():
    """Going on without some would mix up the memory of models: a worker asks again on a new connection."""

    async def receive() -> tuple[list[str], bool, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told: list[str] = []
        receiver = Channel(theirs, lambda message, fds: told.append(message.name), lambda: None)
        sender = Channel(ours, lambda message, fds: None, lambda: None)
        sender.event("fits", None)
        sender.event("state", None, [ours.fileno()] * 5)
        before = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = os.dup(ours.fileno())
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))  # room for one more
        try:
            while not receiver.closed:
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sender.close()
        return told, receiver.closed, before - len(os.listdir("/proc/self/fd"))

    told, closed, freed = asyncio.run(asyncio.wait_for(receive(), 20))
    assert (told, closed) == (["fits"], True)
    assert freed == 2  # both ends


def test_a_channel_ends_when_memory_cannot_be_mapped():
    """Mapping takes one descriptor more. The model would be missing for ever."""

    async def receive() -> bool:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        block = SharedBlock(1)

        def take(message: Message, fds: list[int]) -> None:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (fds[0] + 1, hard))
            try:
                SharedBlock.of(fds.pop(0))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        receiver, sender = Channel(theirs, take, lambda: None), Channel(ours, lambda message, fds: None, lambda: None)
        before = len(os.listdir("/proc/self/fd"))
        sender.event("state", None, [block.fd] * 3)
        while not receiver.closed:
            await asyncio.sleep(0)
        sender.close()
        return before - len(os.listdir("/proc/self/fd")) == 2  # both ends

    assert asyncio.run(asyncio.wait_for(receive(), 20))
