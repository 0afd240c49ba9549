"""A client on plain sockets: it sends any bytes, and reads one answer after another."""

from __future__ import annotations

import socket


class Client:
    def __init__(self, server):
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""

    def send(self, data):
        self._socket.sendall(data)

    def answer(self):
        """Status, headers and content of the next answer."""
        while b"\r\n\r\n" not in self._held:
            self._more()
        head, _, self._held = self._held.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines[1:])}
        length = int(headers.get("content-length", 0))  # 100 Continue has none
        while len(self._held) < length:
            self._more()
        body, self._held = self._held[:length], self._held[length:]
        return int(lines[0].split()[1]), headers, body

    def until(self, text):
        """The bytes before this text."""
        while text not in self._held:
            self._more()
        found, _, self._held = self._held.partition(text)
        return found

    def _more(self):
        data = self._socket.recv(1 << 16)
        assert data, "the connection was closed"
        self._held += data

    @property
    def closed(self):
        return self._socket.recv(1) == b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._socket.close()
