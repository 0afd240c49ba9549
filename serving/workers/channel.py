"""Messages between a worker and the engine's process: calls with answers, events, and file descriptors.

They travel through a Unix socket of whole messages (SOCK_SEQPACKET) as MessagePack: no pickle, nothing that is
executed. A message too large for a packet is placed in shared memory, and the packet carries its descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.serving.logs import log

PACKET_BYTES = 1 << 15
WITHDRAWN = "withdrawn"  # an event: nobody waits for the call of this number
WANT_LENGTH = "want_length"  # a worker's event: requests want a model at this length
MOST_DESCRIPTORS = 250  # per packet; Linux allows 253

CALL, ANSWER, ERROR, EVENT = range(4)
HELLO = "hello"  # a worker's first call: it gets its part of the shared memory
STATE = "state"  # the event with the registry's present state


class Message(msgspec.Struct, array_like=True):
    kind: int
    number: int  # of the call
    name: str
    data: Any = None
    elsewhere: int = 0  # length of the data, if they are in the first descriptor's memory


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Message).decode
_encode_data, _decode_data = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode

OnMessage = Callable[[Message, list[int]], None]


class Channel:
    """One end of a connection, in an asyncio loop. `on_message` gets calls and events; answers go to their callers."""

    def __init__(self, connection: socket.socket, on_message: OnMessage, on_close: Callable[[], None]) -> None:
        self._socket, self._on_message, self._on_close = connection, on_message, on_close
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self.closed = False
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._readable)

    async def call(self, name: str, data: Any = None) -> Any:
        """Calls the other side's function of that name; an exception it raised is raised here."""
        self._number += 1
        number = self._number
        future = self._waiting[number] = self._loop.create_future()
        try:
            self._send(Message(CALL, number, name, data))
            return await future
        except asyncio.CancelledError:
            if not self.closed:
                self._send(Message(EVENT, number, WITHDRAWN, None))
            raise
        finally:
            self._waiting.pop(number, None)

    def event(self, name: str, data: Any, descriptors: Sequence[int] = ()) -> None:
        self._send(Message(EVENT, 0, name, data), descriptors)

    def answer(self, call: Message, data: Any, descriptors: Sequence[int] = ()) -> None:
        self._send(Message(ANSWER, call.number, call.name, data), descriptors)

    def refuse(self, call: Message, error: BaseException) -> None:
        self._send(Message(ERROR, call.number, call.name, told(error)))

    def close(self) -> None:
        """Closes this end, which also ends the other."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, descriptors in self._unsent:
            _close_all(descriptors)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineAwayError("the engine's process ended and is being restarted; try again"))
        self._on_close()

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        if self.closed:
            raise EngineAwayError("the engine's process ended and is being restarted; try again")
        own: list[int] = [os.dup(fd) for fd in descriptors]  # they must stay open until they are sent
        packet = _encode(message)
        if len(packet) > PACKET_BYTES:
            data = _encode_data(message.data)
            block = SharedBlock(len(data))
            block.array[: len(data)] = np.frombuffer(data, np.uint8)
            own.insert(0, os.dup(block.fd))
            packet = _encode(Message(message.kind, message.number, message.name, None, len(data)))
        self._unsent.append((packet, own))
        if len(self._unsent) == 1:
            self._writable()

    def _writable(self) -> None:
        while self._unsent:
            packet, descriptors = self._unsent[0]
            try:
                socket.send_fds(self._socket, [packet], descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._writable)
                return
            except OSError:
                self.close()
                return
            self._unsent.popleft()
            _close_all(descriptors)
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        for _ in range(64):
            try:
                packet, descriptors, flags, _ = socket.recv_fds(self._socket, 2 * PACKET_BYTES, MOST_DESCRIPTORS)
                if flags & socket.MSG_CTRUNC:  # some are lost
                    _close_all(descriptors)
                    packet, descriptors = self._too_many_files()
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                self.close()
                return
            for fd in descriptors:
                os.set_inheritable(fd, False)
            try:
                self._take(_decode(packet), descriptors)
            except OSError as e:  # a descriptor more is needed while memory is mapped
                if e.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                _close_all(descriptors)
                self._too_many_files()
                self.close()
            if self.closed:
                return

    def _too_many_files(self) -> tuple[bytes, list[int]]:
        """What ends this connection: a worker asks for everything again on a new one."""
        log.error("too many files are open to take memory from another process: raise `ulimit -n`")
        return b"", []

    def _take(self, message: Message, descriptors: list[int]) -> None:
        if message.elsewhere:
            block = SharedBlock.of(descriptors.pop(0))
            message.data = _decode_data(block.array[: message.elsewhere].tobytes())
        if message.kind in (CALL, EVENT):
            self._on_message(message, descriptors)
            return
        future = self._waiting.get(message.number)
        if future is None or future.done():
            _close_all(descriptors)
        elif message.kind == ERROR:
            future.set_exception(raised(*message.data))
        else:
            future.set_result((message.data, descriptors) if descriptors else message.data)


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def told(error: BaseException) -> list[Any]:
    """An error as a message: the name of its class, its text, and those of its attributes that are plain."""
    facts = {key: value for key, value in vars(error).items() if isinstance(value, str | int | float | None)}
    return [type(error).__name__, str(error), facts]


def raised(kind: str, text: str, facts: dict[str, Any]) -> PaellaError:
    """The error of a message. Only our own classes are restored."""
    todo: list[type[PaellaError]] = [PaellaError]
    while todo:
        each = todo.pop()
        if each.__name__ == kind:
            try:
                found = each(text)
            except TypeError:  # its class takes further arguments
                break
            found.__dict__.update(facts)
            return found
        todo += each.__subclasses__()
    return PaellaError(text)
