"""Hosts for a test, which is skipped where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from unisono.errors import UnsupportedError
from unisono_tools import namespaces
from unisono_tools.namespaces import Hosts, enter

__all__ = ["Hosts", "enter", "make_hosts"]


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Makes hosts, or skips the test where the kernel refuses."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.make_hosts(count))
        except UnsupportedError as error:
            pytest.skip(str(error))
        yield hosts
