"""Small messages between ranks, which a thread sends and receives."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from unisono.communicators.sockets import NOT_NOW

# How long messages that were given before the end may take to leave.
_FLUSH_SECONDS = 1.0
_CHUNK_BYTES = 1 << 16


class Lines:
    """Connections to ranks, each for messages that are lists of what JSON knows.

    One thread moves all bytes and makes all calls. It sleeps until there is something to do.

    Args:
        name: The name of the thread.
        sockets: A connected socket for each rank; closed with this object.
        heard: Called with a rank and a message that has come from it.
        ended: Called with a rank whose connection has ended, and the reason: an error, or None if
            the other end was closed.
    """

    def __init__(
        self,
        name: str,
        sockets: Mapping[int, socket.socket],
        heard: Callable[[int, list[Any]], None],
        ended: Callable[[int, OSError | None], None],
    ) -> None:
        self._lines = {rank: _Line(one) for rank, one in sockets.items()}
        self._heard = heard
        self._ended = ended
        self._outbox: list[tuple[int, list[Any]]] = []
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self._end_by: float | None = None
        # Held while the bell is rung or closed: a number of a closed socket may be used again for
        # another one. The garbage collector may close this anywhere, so it can be taken twice.
        self._bell_lock = threading.RLock()
        self._wake, self._bell = socket.socketpair()
        self._wake.settimeout(0)
        self._bell.settimeout(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins to listen, which may call `heard` and `ended` at once."""
        self._thread.start()

    def send(self, rank: int, *message: Any) -> None:
        """Sends a message, if the connection still exists. Any thread may call it."""
        self._outbox.append((rank, list(message)))
        self._ring()

    def call_after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in a while. Only `heard` and `ended` may call it, once at a time."""
        self._alarm = time.monotonic() + seconds, callback

    def close(self) -> None:
        """Sends what is left, and ends connections and the thread."""
        if self._end_by is None:
            self._end_by = time.monotonic() + _FLUSH_SECONDS
            self._ring()
        # The garbage collector may close this from within the thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ring(self) -> None:
        # A bell that cannot be rung has been rung, or is gone.
        with self._bell_lock, contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._wait()
                self._post()
                for rank, line in list(self._lines.items()):
                    self._serve(rank, line)
                if self._alarm is not None and time.monotonic() >= self._alarm[0]:
                    (_, callback), self._alarm = self._alarm, None
                    callback()
        finally:
            for line in self._lines.values():
                line.close()
            with self._bell_lock:
                self._wake.close()
                self._bell.close()

    def _is_over(self) -> bool:
        if self._end_by is None:
            return False
        is_sent = not self._outbox and not any(line.outgoing for line in self._lines.values())
        return is_sent or time.monotonic() > self._end_by

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for line in self._lines.values():
            poll.register(line.socket, select.POLLIN | (select.POLLOUT if line.outgoing else 0))
        times = [self._alarm[0]] if self._alarm else []
        times += [self._end_by] if self._end_by else []
        left = max(0.0, min(times) - time.monotonic()) if times else None
        poll.poll(None if left is None else left * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(_CHUNK_BYTES):
                pass

    def _post(self) -> None:
        """Takes up messages that threads have given."""
        while self._outbox:
            rank, message = self._outbox.pop(0)
            if rank in self._lines:
                self._lines[rank].outgoing += json.dumps(message).encode() + b"\n"

    def _serve(self, rank: int, line: _Line) -> None:
        for message in line.move():
            self._heard(rank, message)
        if line.has_ended:
            del self._lines[rank]
            line.close()
            self._ended(rank, line.error)


class _Line:
    """A connection, and what is under way on it.

    Attributes:
        outgoing: What is still to be sent.
        has_ended: Whether nothing will come any more.
        error: Why, unless the other end was closed.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(0)
        self.socket = connected
        self.outgoing = bytearray()
        self.has_ended = False
        self.error: OSError | None = None
        self._incoming = b""

    def move(self) -> list[list[Any]]:
        """Moves bytes out and in, and returns the messages that are complete."""
        try:
            self._receive()
            self._send()
        except OSError as error:
            self.has_ended, self.error = True, error
        *complete, self._incoming = self._incoming.split(b"\n")
        return [json.loads(text) for text in complete]

    def _send(self) -> None:
        with contextlib.suppress(*NOT_NOW):
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]

    def _receive(self) -> None:
        with contextlib.suppress(*NOT_NOW):
            while more := self.socket.recv(_CHUNK_BYTES):
                self._incoming += more
            self.has_ended = True

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
