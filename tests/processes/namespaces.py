"""Hosts for a test, which is skipped where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest

from unisono.cluster.elastic import doors
from unisono.errors import UnsupportedError
from unisono_tools import namespaces
from unisono_tools.namespaces import Hosts, enter

__all__ = ["Hosts", "apart", "enter", "make_hosts"]


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Makes hosts, or skips the test where the kernel refuses."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.make_hosts(count))
        except UnsupportedError as error:
            pytest.skip(str(error))
        yield hosts


@contextmanager
def apart(name: str) -> Iterator[None]:
    """No process of another host is seen to end, as if the hosts were separate machines."""
    own = f"{doors.machine_identity()} {name}"
    with patch.object(doors, "machine_identity", lambda: own):
        yield
