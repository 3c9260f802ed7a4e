"""The store of a job: a table that rank 0 serves, for processes that know the key of the job.

torch's own `TCPStore` asks nobody who it is, listens on all interfaces, and waits for a server that
is stopped without a deadline and deaf to Ctrl-C. Here every connection begins with a greeting (see
`greeting`), every message carries an HMAC, and every wait ends in time.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from unisono.communicators import greeting
from unisono.communicators.sockets import Encryption, close_in_children

_FRAME = struct.Struct("!I32s")
_MAX_BYTES = 16 << 20
# Once its time is over, rank 0 may still be asked, for example who is missing.
_LEAST_SECONDS = 2.0
_log = logging.getLogger("unisono")


class JobStore(Store):
    """What all stores of a job share: `torch.distributed` can use it like any other store.

    Attributes:
        answer_by: When rank 0 must have answered at the latest; None allows it the time that the
            store may wait for a key.
        before_asking: Called before every question, to raise where no answer can help.
    """

    def __init__(
        self,
        host: str,
        port: int,
        ask: Callable[[list[Any], float], Any],
        close: Callable[[], None],
    ) -> None:
        super().__init__()
        self.host = host
        self.port = port
        self.answer_by: float | None = None
        self.before_asking: Callable[[], None] | None = None
        self._put = ask
        self._seconds = 300.0
        # Also when nobody uses the store any more, or Python ends.
        self.close = weakref.finalize(self, close)

    def _ask(self, *question: Any) -> Any:
        if self.before_asking is not None:
            self.before_asking()
        now = time.monotonic()
        by = now + self._seconds if self.answer_by is None else self.answer_by
        return self._put(list(question), max(by, now + _LEAST_SECONDS))

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("set", key, data.decode("latin-1"))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [value or b"" for value in self.look(keys)]

    def look(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values of all keys at one moment, None for those that are not there."""
        found = self._ask("get", list(keys))
        return [None if value is None else str(value).encode("latin-1") for value in found]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self.look(keys)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    # The name by which torch calls it.
    deleteKey = delete_key

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        pause = 0.001
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise DistStoreError(f"Nobody has written {', '.join(keys)} in {seconds:g} s.")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


class _Table:
    """Values by key."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def answer(self, question: list[Any]) -> Any:
        kind, key, *rest = question
        with self._lock:
            if kind == "get":
                return [self._values.get(one) for one in key]
            if kind == "set":
                (self._values[key],) = rest
            elif kind == "add":
                self._values[key] = str(int(self._values.get(key, "0")) + rest[0])
                return int(self._values[key])
            elif kind == "delete":
                return self._values.pop(key, None) is not None
        return None


class _Server:
    """A thread that answers what processes of the job ask."""

    def __init__(self, listener: socket.socket, key: bytes, keys: Encryption | None) -> None:
        self.table = _Table()
        self._key = key
        self._keys = keys
        self._reception = greeting.Reception(listener, self._steps)
        self._wake, self._bell = socket.socketpair()
        close_in_children(self._bell)
        self._reception.wake_with(self._wake)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="unisono store", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._reception.turn(None)
        self._reception.close()
        self._wake.close()
        self._bell.close()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        # The garbage collector may close this from within the thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _steps(self, guest: greeting.Guest) -> greeting.Steps[None]:
        address = guest.socket.getpeername()[0]
        try:
            greeted = yield from greeting.welcome(guest, self._key, self._keys)
        except greeting.RefusedError as error:
            _log.warning(
                "A process at %s, rank %d by its own account, was refused.", address, error.rank
            )
            self.table.answer(["set", f"refused/{error.rank}", f"a process at {address}"])
            return
        guest.is_known = True
        messages = _Messages(greeted, is_caller=False)
        # Without a token a stranger may come as far as this.
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
            while True:
                question = yield from messages.receive()
                yield from messages.send(self.table.answer(question))


class _Messages:
    """Messages in JSON on a connection that was greeted, each with an HMAC."""

    def __init__(self, greeted: greeting.Greeted, *, is_caller: bool) -> None:
        self.socket, _, self._key = greeted
        self._ways = (b">", b"<") if is_caller else (b"<", b">")
        self._counts = [0, 0]

    def send(self, message: Any) -> greeting.Steps[None]:
        body = json.dumps(message).encode()
        yield from greeting.send(self.socket, _FRAME.pack(len(body), self._proof(0, body)) + body)

    def receive(self) -> greeting.Steps[Any]:
        length, proof = _FRAME.unpack((yield from greeting.receive(self.socket, _FRAME.size)))
        if length > _MAX_BYTES:
            raise ConnectionError(f"it sent {length} bytes")
        body = yield from greeting.receive(self.socket, length)
        if not hmac.compare_digest(proof, self._proof(1, body)):
            raise ConnectionError("somebody has changed what it sent")
        return json.loads(body)

    def _proof(self, way: int, body: bytes) -> bytes:
        self._counts[way] += 1
        counted = self._ways[way] + struct.pack("!Q", self._counts[way]) + body
        return hmac.digest(self._key, counted, "sha256")


def local_store() -> JobStore:
    """Returns a store for a process that is alone."""
    table = _Table()
    return JobStore("", 0, lambda question, _: table.answer(question), lambda: None)


def serve_store(
    host: str, listener: socket.socket, key: bytes, keys: Encryption | None
) -> JobStore:
    """Returns a store that this process serves, for as long as the store is used here."""
    server = _Server(listener, key, keys)
    port = listener.getsockname()[1]
    return JobStore(host, port, lambda question, _: server.table.answer(question), server.close)


def store_at(address: tuple[str, int], greeted: greeting.Greeted) -> JobStore:
    """Returns the store at the other end of a connection, which threads share."""
    messages, lock = _Messages(greeted, is_caller=True), threading.Lock()

    def exchanged(question: list[Any]) -> greeting.Steps[Any]:
        yield from messages.send(question)
        return (yield from messages.receive())

    def ask(question: list[Any], deadline: float) -> Any:
        start = time.monotonic()
        with lock:
            try:
                return greeting.finish(exchanged(question), messages.socket, deadline)
            except BaseException as error:
                # An answer that nobody waits for would be taken for that to the next question.
                messages.socket.close()
                if isinstance(error, TimeoutError):
                    waited = f"Rank 0 has not answered for {time.monotonic() - start:.1f} s."
                    raise DistStoreError(waited) from None
                if isinstance(error, OSError):
                    raise DistNetworkError(f"The connection to rank 0 broke: {error}.") from None
                raise

    return JobStore(*address, ask, messages.socket.close)
