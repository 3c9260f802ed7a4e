"""Small messages between ranks, which a thread sends and receives."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from unisono.communicators.gloo_stream import GlooStream
from unisono.communicators.sockets import NOT_NOW, close_in_children

# How long messages that were given before the end may take to leave, and how long to wait for a
# thread that is busy.
_FLUSH_SECONDS = 1.0
_END_SECONDS = 10.0
_CHUNK_BYTES = 1 << 16
# How often to look for messages that come without a file descriptor that tells of them.
_LOOK_SECONDS = 0.25
_log = logging.getLogger("unisono")
Stream: TypeAlias = socket.socket | GlooStream


class Lines:
    """Connections to ranks, each for messages that are lists of what JSON knows.

    A thread moves the bytes and makes all calls. It sleeps until there is something to do. Without
    file descriptors it looks for messages from time to time, and takes no descriptor itself.

    Args:
        heard: Called with a rank and a message that has come from it.
        ended: Called with a rank whose connection has ended, and the reason: an error, or None if
            the other end was closed.
    """

    def __init__(
        self,
        streams: Mapping[int, Stream],
        heard: Callable[[int, list[Any]], None],
        ended: Callable[[int, OSError | None], None],
    ) -> None:
        self._lines = {rank: _Line(one) for rank, one in streams.items()}
        self._heard = heard
        self._ended = ended
        # The garbage collector may close this anywhere. Such a queue can be filled then, too.
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self._end_by: float | None = None
        self._bell: tuple[socket.socket, ...] = ()
        if any(one.fileno() >= 0 for one in streams.values()):
            self._bell = socket.socketpair()
        for one in self._bell:
            one.settimeout(0)
            close_in_children(one)
        # Held while the bell is rung or closed: its number may be used again for another file.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="unisono watch", daemon=True)

    def start(self) -> None:
        """Begins to listen, which may call `heard` and `ended` at once."""
        self._thread.start()

    def send(self, rank: int, *message: Any) -> None:
        """Sends a message, if the connection still exists. Any thread may call it."""
        self.call(partial(self._post, rank, message))

    def call(self, callback: Callable[[], None]) -> None:
        """Lets the thread call `callback` soon. Any thread may call it."""
        self._calls.put(callback)
        # A forked process has no thread, and another thread may have held the lock then.
        if self._bell and self._thread.is_alive():
            # A bell that cannot be rung has been rung, or is gone.
            with self._lock, contextlib.suppress(OSError):
                self._bell[0].send(b"!")

    def call_after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in a while. Only the thread may call it, once at a time."""
        self._alarm = time.monotonic() + seconds, callback

    def close(self) -> None:
        """Sends what is left, and ends the connections. May be called twice."""
        self._end_by = self._end_by or time.monotonic() + _FLUSH_SECONDS
        self.call(lambda: None)
        # The garbage collector may come here anywhere: within the thread, or where this thread
        # keeps the other one from going on. A forked process has no such thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_SECONDS)

    # What the thread does.

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
        except Exception:
            _log.exception("A connection that watches over other ranks cannot go on.")
        for line in self._lines.values():
            line.close()
        with self._lock:
            for one in self._bell:
                one.close()

    def _turn(self) -> bool:
        """Waits for something to do, does it, and returns whether that was the last turn."""
        times = [one for one in (self._alarm and self._alarm[0], self._end_by) if one is not None]
        self._wait(max(0.0, min(times) - time.monotonic()) if times else None)
        for rank, line in list(self._lines.items()):
            for message in line.move():
                self._heard(rank, message)
            if line.has_ended:
                del self._lines[rank]
                line.close()
                self._ended(rank, line.error)
        if self._alarm is not None and time.monotonic() >= self._alarm[0]:
            (_, callback), self._alarm = self._alarm, None
            callback()
        if self._end_by is None:
            return False
        is_sent = self._calls.empty() and not any(one.outgoing for one in self._lines.values())
        return is_sent or time.monotonic() > self._end_by

    def _wait(self, seconds: float | None) -> None:
        """Waits until something can be moved or called, at most so long, and makes the calls."""
        with contextlib.suppress(Empty):
            if self._bell:
                self._poll(None if seconds is None else seconds * 1000 + 1)
            else:
                most = _LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS)
                self._calls.get(timeout=most)()
            while True:
                self._calls.get_nowait()()

    def _poll(self, milliseconds: float | None) -> None:
        poll = select.poll()
        poll.register(self._bell[1], select.POLLIN)
        for line in self._lines.values():
            poll.register(line.stream, select.POLLIN | (select.POLLOUT if line.outgoing else 0))
        poll.poll(milliseconds)
        with contextlib.suppress(BlockingIOError):
            self._bell[1].recv(_CHUNK_BYTES)

    def _post(self, rank: int, message: tuple[Any, ...]) -> None:
        if rank in self._lines:
            self._lines[rank].outgoing += json.dumps(message).encode() + b"\n"


class _Line:
    """A connection, and what is under way on it."""

    def __init__(self, stream: Stream) -> None:
        stream.settimeout(0)
        self.stream = stream
        self.outgoing = bytearray()
        self.has_ended = False
        self.error: OSError | None = None
        self._incoming = b""

    def move(self) -> list[list[Any]]:
        """Moves bytes out and in, and returns the messages that are complete."""
        try:
            with contextlib.suppress(*NOT_NOW):
                while more := self.stream.recv(_CHUNK_BYTES):
                    self._incoming += more
                self.has_ended = True
            with contextlib.suppress(*NOT_NOW):
                while self.outgoing:
                    del self.outgoing[: self.stream.send(self.outgoing)]
        except OSError as error:
            self.has_ended, self.error = True, error
        *complete, self._incoming = self._incoming.split(b"\n")
        return [json.loads(text) for text in complete]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()
