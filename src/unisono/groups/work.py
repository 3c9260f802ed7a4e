"""A collective that is under way, as torch and its users see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from unisono.errors import WorkerTimeoutError

_NO_LIMIT = timedelta(0)


class CollectiveWork(Work):
    """What `async_op=True` returns."""

    def __init__(self, name: str, call: Callable[[], None], outputs: list[Tensor]) -> None:
        super().__init__()
        self._name = name
        self._call: Callable[[], None] | None = call
        self._outputs = outputs
        self._is_inference = torch.is_inference_mode_enabled()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._gate: Future[Any] | None = None
        self._future: Future[list[Tensor]] | None = None

    def run(self) -> None:
        """Does it, on this thread. An error is kept for those who wait."""
        assert self._call is not None
        try:
            if self._is_inference:
                # The thread that runs it has its own mode.
                with torch.inference_mode():
                    self._call()
            else:
                self._call()
        except BaseException as error:
            self._error = error
        # Its tensors may be freed before this object is.
        self._call = None
        with self._lock:
            self._ended.set()
            gate = self._gate
        if gate is not None:
            gate.set_result(None)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Waits for the end, and raises what went wrong. After a timeout the call still goes on."""
        seconds = timeout.total_seconds()
        if not self._ended.wait(seconds if seconds > 0 else None):
            raise WorkerTimeoutError(
                f"{self._name} timed out: it did not finish within {seconds:g} s of `wait()`, "
                "because other ranks have not called it. Check their logs, or pass a longer "
                "timeout."
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        with self._lock:
            if self._future is None:
                # A future must know the GPUs whose tensors it holds.
                gpus: Any = sorted({one.device for one in self._outputs if one.is_cuda}, key=str)
                self._gate = Future(devices=gpus or None)
                # An error that is raised here is one for C++ as well, where DDP waits; one that is
                # set on a future is for Python alone.
                self._future = self._gate.then(lambda _: self.result())
                if self._ended.is_set():
                    self._gate.set_result(None)
            return self._future
