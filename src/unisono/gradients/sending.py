"""A separate thread sends packs to the other workers, in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Sender:
    """Exchanges packs one after another."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._threads: ThreadPoolExecutor | None = None

    def send(self, exchange: Callable[[], None], sent: list[Future[None]]) -> None:
        """Exchanges a pack after those that were `sent`, and adds it to them."""
        before = sent[-1:]

        def send() -> None:
            # An error holds the frames that it passes, so no frame holds the future of the error.
            if before:
                before.pop().result()
            exchange()

        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="unisono-exchange")
        sent.append(self._threads.submit(send))

    def settle(self, sent: Sequence[Future[None]]) -> None:
        """Waits until packs are exchanged, or have failed."""
        try:
            wait(sent)
        except KeyboardInterrupt:
            # Or the thread that sends would wait on, and the process could not end without it.
            self._close()
            raise

    def finish(self, sent: list[Future[None]]) -> None:
        """Waits until packs are exchanged, and forgets them; raises if one has failed."""
        self.settle(sent)
        # The last one has failed if any has.
        del sent[:-1]
        sent.pop().result()

    def close(self) -> None:
        """Ends the thread."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
