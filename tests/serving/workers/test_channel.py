"""Messages between a worker and the engine's process."""

from __future__ import annotations

import asyncio
import os
import resource
import socket

from paellapy.serving.workers.channel import Channel


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
