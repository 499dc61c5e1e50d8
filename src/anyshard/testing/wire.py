"""Plain values over a socket between a test and its ranks: length, then the value in the codec of the checkpoints. No pickle."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any, Final, final

from anyshard.records.values import ValueRegistry, decode_value, encode_value

SOCKET: Final = "socket"

_LENGTH = struct.Struct("<Q")


def pack(message: dict[str, object]) -> bytes:
    """A message as bytes; raises `UnsupportedValue` with the address of what is no plain value."""
    data = encode_value(message, address="message", registry=ValueRegistry())
    return _LENGTH.pack(len(data)) + data


def connect(directory: Path) -> Wire:
    """A wire to whoever listens in `directory`."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(directory / SOCKET))
    return Wire(connection)


@final
class Wire:
    """One end of a connection. One thread may send while another one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, object]) -> None:
        """Send one message of plain values."""
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """Send what `pack` made."""
        self._connection.sendall(data)

    def receive(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message; raises `EOFError` when the other end is gone, `TimeoutError` when it is late."""
        self._connection.settimeout(timeout_s)
        try:
            (nbytes,) = _LENGTH.unpack(self._read(_LENGTH.size))
            data = self._read(nbytes)
        except ConnectionError as error:
            raise EOFError("the other end is gone") from error
        message = decode_value(data, registry=ValueRegistry(), file="message")
        assert isinstance(message, dict)
        return message

    def close(self) -> None:
        """Hang up; the other end sees the end of the stream."""
        self._connection.close()

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        position = 0
        while position < nbytes:
            received = self._connection.recv_into(memoryview(data)[position:])
            if not received:
                raise EOFError("the other end is gone")
            position += received
        return data
