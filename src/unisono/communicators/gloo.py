"""Gloo, through process groups of torch.distributed that belong to Unisono alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.addresses import own_address
from unisono.communicators.stores import Countdown, connected
from unisono.errors import UnsupportedError

# The watch gives up before Gloo does, and can say for whom it has waited.
GRACE_SECONDS = 2.0
# How many times its timeout Gloo takes to give up a rank that has answered and then fallen silent.
_GLOO_PATIENCE = 5
# A tag that no other message has.
_UNUSED_TAG = 0x7FFFFFFF

_devices: WeakValueDictionary[tuple[int, str, str | None], Any] = WeakValueDictionary()
# Keeps the device of each group that is in use.
_device_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def make_gloo_group(
    store: Store,
    rank: int,
    size: int,
    *,
    host: str | None,
    timeout_seconds: float,
    joining_seconds: float | None = None,
    num_threads: int = 4,
) -> Any:
    """Returns a new group, apart from torch's default one.

    The network is that of `own_address`. `GLOO_DEVICE_TRANSPORT=TCP_TLS`, with
    `GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY`, `..._CERT` and `..._CA_FILE`, encrypts what is sent, where
    torch was built with it.
    """
    left = Countdown(timeout_seconds if joining_seconds is None else joining_seconds)
    own = own_address(store, rank, size, host=host, timeout_seconds=left.seconds())
    group: Any = distributed.ProcessGroupGloo
    options = group._Options()
    options._timeout = timedelta(seconds=left.seconds() / _GLOO_PATIENCE)
    device = _device(own)
    options._devices = [device]
    # One thread for each collective that may run at the same time.
    options._threads = num_threads
    patient = _PatientStore(PrefixStore("gloo", store), left)
    make = functools.partial(group, patient, rank, size, options)
    made = connected(PrefixStore("ends", store), rank, size, "Gloo", make, left.seconds())
    _device_of[made] = device
    made._set_default_timeout(timedelta(seconds=timeout_seconds + GRACE_SECONDS))
    return made


class _PatientStore(Store):
    """Waits for the addresses of all ranks as long as there is time, whatever Gloo's timeout is."""

    def __init__(self, store: Store, left: Countdown) -> None:
        super().__init__()
        self._store = store
        self._left = left

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value."""
        self._store.set(key, value)  # type: ignore[arg-type]  # The stub knows strings only.

    def get(self, key: str) -> bytes:
        """Waits for a key, and returns its value."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys."""
        self._store.wait(list(keys), timedelta(seconds=self._left.seconds()))


def _device(address: str) -> Any:
    """Returns what connects groups to an address: a thread, a listening socket and its queue.

    The groups of a process share it, and it ends with the last of them. A forked child has none of
    its threads, so it gets another.
    """
    key = os.getpid(), address, os.environ.get("GLOO_DEVICE_TRANSPORT")
    if (device := _devices.get(key)) is None:
        device = _devices[key] = _make_device(address)
    return device


def _make_device(address: str) -> Any:
    group: Any = distributed.ProcessGroupGloo
    try:
        return group.create_device(hostname=address)
    except RuntimeError as error:
        transport = os.environ.get("GLOO_DEVICE_TRANSPORT")
        if transport is None:
            raise
        raise UnsupportedError(
            f"GLOO_DEVICE_TRANSPORT is {transport!r}, which Gloo in torch {torch.__version__} "
            f"could not open ({str(error).splitlines()[0]}). TCP_TLS needs a torch that was built "
            "with USE_GLOO_WITH_OPENSSL, and files for key, certificate and authority. Unset it to "
            "send unencrypted."
        ) from error


def break_connections(group: Any) -> None:
    """Ends everything that a Gloo group waits for, with an error.

    Gloo gives up all connections when a receive is too late, and offers no other way. A receive
    from a rank whose connection is broken already ends before that, so every rank is tried.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
