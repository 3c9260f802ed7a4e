"""Small messages between ranks, which one thread of the process sends and receives."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from unisono.communicators.gloo_stream import GlooStream
from unisono.communicators.sockets import NOT_NOW
from unisono.system import after_fork_in_child

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

    One thread moves the bytes of all lines of the process and makes all calls. It sleeps until
    there is something to do, and ends with the last of them. Lines without file descriptors have
    another thread, which looks for messages from time to time.

    Args:
        heard: Called with a rank and a message that has come from it.
        ended: Called with a rank whose connection has ended, and the reason: an error, or None if
            the other end was closed.
    """

    def __init__(
        self,
        sockets: Mapping[int, Stream],
        heard: Callable[[int, list[Any]], None],
        ended: Callable[[int, OSError | None], None],
    ) -> None:
        self.lines = {rank: _Line(one) for rank, one in sockets.items()}
        self._heard = heard
        self._ended = ended
        self._calls: deque[Callable[[], None]] = deque()
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self._end_by: float | None = None
        self._is_over = threading.Event()
        has_descriptors = any(one.fileno() >= 0 for one in sockets.values())
        self._look_seconds = None if has_descriptors else _LOOK_SECONDS
        self._switchboard = _with_descriptors if has_descriptors else _without

    def start(self) -> None:
        """Begins to listen, which may call `heard` and `ended` at once."""
        self._switchboard.add(self)

    def send(self, rank: int, *message: Any) -> None:
        """Sends a message, if the connection still exists. Any thread may call it."""
        self.call(partial(self._post, rank, message))

    def call(self, callback: Callable[[], None]) -> None:
        """Lets the thread call `callback` soon. Any thread may call it."""
        self._calls.append(callback)
        self._switchboard.ring()

    def call_after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls `callback` in a while. Only the thread may call it, once at a time."""
        self._alarm = time.monotonic() + seconds, callback

    def close(self) -> None:
        """Sends what is left, and ends the connections."""
        if self._end_by is None:
            self._end_by = time.monotonic() + _FLUSH_SECONDS
            self._switchboard.ring()
        self._switchboard.await_end(self._is_over)

    # What the thread calls.

    def next_time(self) -> float | None:
        """Returns when there is something to do at the latest."""
        times = [time.monotonic() + self._look_seconds] if self._look_seconds else []
        times += [self._alarm[0]] if self._alarm else []
        times += [self._end_by] if self._end_by else []
        return min(times, default=None)

    def turn(self) -> bool:
        """Does what can be done now, and returns whether that was the last turn."""
        while self._calls:
            self._calls.popleft()()
        for rank, line in list(self.lines.items()):
            for message in line.move():
                self._heard(rank, message)
            if line.has_ended:
                del self.lines[rank]
                line.close()
                self._ended(rank, line.error)
        if self._alarm is not None and time.monotonic() >= self._alarm[0]:
            (_, callback), self._alarm = self._alarm, None
            callback()
        if self._end_by is None:
            return False
        is_sent = not self._calls and not any(line.outgoing for line in self.lines.values())
        return is_sent or time.monotonic() > self._end_by

    def end(self, remove: Callable[[], None]) -> None:
        """Ends the connections."""
        for line in self.lines.values():
            line.close()
        remove()
        self._is_over.set()

    def _post(self, rank: int, message: Sequence[Any]) -> None:
        if rank in self.lines:
            self.lines[rank].outgoing += json.dumps(message).encode() + b"\n"


class _Line:
    """A connection, and what is under way on it."""

    def __init__(self, connected: Stream) -> None:
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


class _Bell:
    """Wakes up a thread that waits for sockets."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self._number = self._other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._number, self._other = os.pipe()
            os.set_blocking(self._number, False)
            os.set_blocking(self._other, False)

    def ring(self) -> None:
        # A bell that cannot be rung has been rung.
        with contextlib.suppress(BlockingIOError):
            os.write(self._other, (1).to_bytes(8, "little"))

    def wait(self, served: Sequence[Lines], seconds: float | None) -> None:
        poll = select.poll()
        poll.register(self._number, select.POLLIN)
        for lines in served:
            for line in lines.lines.values():
                poll.register(line.socket, select.POLLIN | (select.POLLOUT if line.outgoing else 0))
        poll.poll(None if seconds is None else seconds * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self._number, _CHUNK_BYTES)

    def close(self) -> None:
        for number in {self._number, self._other}:
            os.close(number)


class _Knocker:
    """Wakes up a thread that waits for nothing else. It takes no file descriptor."""

    def __init__(self) -> None:
        # Held while nobody has rung. The garbage collector may ring anywhere, so no condition.
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._silence.release()

    def wait(self, _: Sequence[Lines], seconds: float | None) -> None:
        self._silence.acquire(timeout=-1 if seconds is None else seconds)

    def close(self) -> None:
        pass


class _Switchboard:
    """A thread that serves lines of this process, for as long as there are any."""

    def __init__(self, kind: type[_Bell | _Knocker]) -> None:
        self._kind = kind
        self._is_forgotten = False
        self._served: list[Lines] = []
        # Held while the bell is rung or closed: its number may be used again for another file. The
        # garbage collector may close lines anywhere, so it can be taken twice.
        self._lock = threading.RLock()
        self._bell: _Bell | _Knocker | None = None
        self._thread: threading.Thread | None = None

    def add(self, lines: Lines) -> None:
        """Serves `lines` from now on."""
        with self._lock:
            if self._bell is None:
                thread = threading.Thread(target=self._run, name="unisono watch", daemon=True)
                thread.start()
                self._bell, self._thread = self._kind(), thread
            self._served.append(lines)
            self.ring()

    def ring(self) -> None:
        """Lets the thread take a turn."""
        # Another thread may have held the lock when this process was forked.
        if self._is_forgotten:
            return
        with self._lock:
            if self._bell is not None:
                self._bell.ring()

    def await_end(self, is_over: threading.Event) -> None:
        """Waits until lines have ended, and the thread if they were the last."""
        # The garbage collector may come here anywhere: within the thread, or where this thread
        # keeps the other one from going on. A forked process has no such thread.
        if self._is_forgotten or threading.current_thread() is self._thread:
            return
        is_over.wait(_END_SECONDS)
        with self._lock:
            thread = self._thread if self._bell is None else None
        if thread is not None:
            thread.join(_END_SECONDS)

    def forget(self) -> None:
        """Ends what a forked process has of it, which has no thread and must wake no other."""
        self._is_forgotten = True
        if self._bell is not None:
            self._bell.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                served, bell = list(self._served), self._bell
            if bell is None or self._thread is not threading.current_thread():
                return
            times = [one for lines in served if (one := lines.next_time()) is not None]
            bell.wait(served, max(0.0, min(times) - time.monotonic()) if times else None)
            for lines in served:
                try:
                    is_last = lines.turn()
                except Exception:
                    _log.exception("A connection that watches over other ranks cannot go on.")
                    is_last = True
                if is_last:
                    lines.end(partial(self._remove, lines))

    def _remove(self, lines: Lines) -> None:
        with self._lock:
            self._served.remove(lines)
            if not self._served and self._bell is not None:
                self._bell.close()
                self._bell = None


_with_descriptors, _without = _Switchboard(_Bell), _Switchboard(_Knocker)


def _begin_anew() -> None:
    global _with_descriptors, _without
    for one in (_with_descriptors, _without):
        one.forget()
    _with_descriptors, _without = _Switchboard(_Bell), _Switchboard(_Knocker)


after_fork_in_child(_begin_anew)
