"""Packages that take seconds to import: every process that runs tests reads all test files."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pytest


class Late:
    """A package that is imported when a test first uses it; without it, the test is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _package(self) -> Any:
        return pytest.importorskip(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)
