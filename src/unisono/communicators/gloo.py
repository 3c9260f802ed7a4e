"""Gloo, through process groups of torch.distributed that belong to Unisono alone."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, distributed
from torch._C._autograd import _enable_record_function, _profiler_enabled
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.hosts import own_address
from unisono.communicators.stores import Countdown, connected, have_come, in_background
from unisono.errors import UnsupportedError

# The watch gives up before Gloo does, and can say for whom it has waited.
GRACE_SECONDS = 2.0
# Gloo waits for a connection this many times as long as its timeout.
_GLOO_PATIENCE = 5
# How long the first attempt to connect waits for each rank, and how long to wait between attempts.
_FIRST_SECONDS = 5.0
_PAUSE_SECONDS = 0.3
# A tag that no other message has.
_UNUSED_TAG = 0x7FFFFFFF

_log = logging.getLogger(__name__)
# Returns a group, once it is given what raises if a rank is lost, in so many seconds.
GlooMaker: TypeAlias = Callable[[Callable[[float], None]], Any]
_devices: WeakValueDictionary[tuple[int, str, str | None], Any] = WeakValueDictionary()
# What each group needs as long as it is in use, such as its device.
_kept_for: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def make_gloo_group(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_seconds: float,
    joining_seconds: float | None = None,
    check_health: Callable[[float], None] = lambda _: None,
) -> Any:
    """Returns a new group, apart from torch's default one.

    The network is that of `own_address`. `GLOO_DEVICE_TRANSPORT=TCP_TLS`, with
    `GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY`, `..._CERT` and `..._CA_FILE`, encrypts what is sent, where
    torch was built with it.

    Args:
        store: One store, or one prefix of it, serves one call.
        check_health: Raises a `CommunicationError` if a rank is lost, in so many seconds.
    """
    left = Countdown(timeout_seconds if joining_seconds is None else joining_seconds)
    own = own_address(store, rank, size, timeout_seconds=left.seconds())
    attempts = _Attempts(store, rank, size, own, left)
    ends = PrefixStore("ends", store)
    made = connected(ends, rank, size, "Gloo", attempts.make, left.seconds(), check_health)
    made._set_default_timeout(timedelta(seconds=timeout_seconds + GRACE_SECONDS))
    return made


class _Attempts(NamedTuple):
    """Connects the ranks, again and again as long as there is time.

    Gloo gives up at the first error of the network, such as a route that is missing for a moment.
    An attempt succeeds on all ranks or on none of them.
    """

    store: Store
    rank: int
    size: int
    address: str
    left: Countdown

    def make(self, is_over: threading.Event) -> Any:
        began, number = time.monotonic(), 0
        while True:
            passed = time.monotonic() - began
            # Grows, so that a network on which connections take long has the time it needs.
            patience = min(max(_FIRST_SECONDS, passed), self.left.seconds())
            try:
                return self._attempt(PrefixStore(f"gloo {number}", self.store), patience, is_over)
            except RuntimeError as error:
                if is_over.is_set():
                    raise
                why = str(error).splitlines()[0]
            if number == 0:
                _log.warning("Gloo could not connect all ranks and tries again: %s", why)
            number += 1
            is_over.wait(max(_PAUSE_SECONDS, passed / 10))

    def _attempt(self, store: Store, seconds: float, is_over: threading.Event) -> Any:
        group: Any = distributed.ProcessGroupGloo
        options = group._Options()
        options._timeout = timedelta(seconds=seconds / _GLOO_PATIENCE)
        device = _device(self.address)
        options._devices = [device]
        # They serve collectives of Gloo, which are few. Sends and receives need none.
        options._threads = 1
        try:
            made = group(_PatientStore(store, is_over.is_set), self.rank, self.size, options)
        except RuntimeError:
            store.set("failed", "")
            # It may still hold callbacks of connections that have failed.
            _devices.pop(_key(self.address), None)
            raise
        keep_for(made, [device])
        if store.add("connected", 1) == self.size:
            store.set("all", "")
        left = self.left.seconds()
        if not have_come(store, ["all"], left, lambda: is_over.is_set() or store.check(["failed"])):
            raise RuntimeError("another rank could not connect")
        return made


class _PatientStore(Store):
    """Waits for the addresses of all ranks as long as there is time, whatever Gloo's timeout is."""

    def __init__(self, store: Store, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_over = is_over

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # The stub knows strings only.

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not have_come(self._store, list(keys), math.inf, self._is_over):
            raise RuntimeError("not all ranks have said where they listen")


def _device(address: str) -> Any:
    """Returns what connects groups to an address: a thread, a listening socket and its queue.

    The groups of a process share it, and it ends with the last of them. A forked child has none of
    its threads, so it gets another.
    """
    key = _key(address)
    if (device := _devices.get(key)) is None:
        group: Any = distributed.ProcessGroupGloo
        try:
            device = _devices[key] = group.create_device(hostname=address)
        except RuntimeError as error:
            if (transport := key[-1]) is None:
                raise
            raise UnsupportedError(
                f"GLOO_DEVICE_TRANSPORT is {transport!r}, which Gloo in torch {torch.__version__} "
                f"could not open ({str(error).splitlines()[0]}). TCP_TLS needs a torch that was "
                "built with USE_GLOO_WITH_OPENSSL, and files for key, certificate and authority. "
                "Unset it to send unencrypted."
            ) from error
    return device


def _key(address: str) -> tuple[int, str, str | None]:
    return os.getpid(), address, os.environ.get("GLOO_DEVICE_TRANSPORT")


def send(group: Any, data: Tensor, rank: int, tag: int) -> Any:
    """Begins to send, and returns the work of Gloo."""
    return _unseen(group.send, data, rank, tag)


def receive(group: Any, room: Tensor, rank: int, tag: int) -> Any:
    """Begins to receive, and returns the work of Gloo."""
    return _unseen(group.recv, room, rank, tag)


def _unseen(call: Any, tensor: Tensor, rank: int, tag: int) -> Any:
    # The profiler would be told at the end of a message, which may come long after the profiler has
    # ended. That crashes the process.
    is_watched = _profiler_enabled()
    if is_watched:
        _enable_record_function(False)  # noqa: FBT003
    try:
        return call([tensor], rank, tag)
    finally:
        if is_watched:
            _enable_record_function(True)  # noqa: FBT003


def keep_for(group: Any, needed: Iterable[Any]) -> None:
    """Keeps what a group needs until its end."""
    _kept_for.setdefault(group, []).extend(needed)


def break_connections(group: Any) -> None:
    """Ends everything that a Gloo group waits for, with an error.

    Gloo gives up all connections when a receive is too late, and offers no other way. A receive
    from a rank whose connection is broken already ends before that, so every rank is tried.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                receive(group, torch.empty(1), peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def have_left(sent: Sequence[Any], seconds: float, check: Callable[[], None]) -> bool:
    """Waits until messages have left, and returns whether they have.

    A thread waits for Gloo, which hears neither of Ctrl-C nor always of a connection that breaks.
    `check` raises a RuntimeError then.
    """
    if not sent:
        return True

    def end() -> None:
        for work in sent:
            work.wait(timedelta(seconds=seconds))

    left, ended = Countdown(seconds), in_background(end, "unisono gloo end")
    with suppress(RuntimeError):
        while not wait([ended], _PAUSE_SECONDS).done and not left.is_over():
            check()
    return ended.done() and ended.exception() is None
