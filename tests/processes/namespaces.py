"""Hosts for a test, which is skipped where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from unisono.cluster import Address
from unisono.errors import UnsupportedError
from unisono_tools import namespaces
from unisono_tools.launching.board import Board
from unisono_tools.namespaces import Hosts, enter

__all__ = ["Hosts", "board_on", "enter", "make_hosts"]


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Makes hosts, or skips the test where the kernel refuses."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.make_hosts(count))
        except UnsupportedError as error:
            pytest.skip(str(error))
        yield hosts


def board_on(hosts: Hosts, host: int, port: int) -> Board:
    """Returns what a launcher on a host would keep for its workers, at the port after this one."""

    def make() -> Board:
        enter(hosts.names[host])
        return Board([Address(hosts.address(host), port)])

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result(60)
