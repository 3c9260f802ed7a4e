from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono.strategies import MirroredStrategy
from unit.variables.made import replicas


@pytest.fixture(params=[1, 2, 3])
def strategy(request: pytest.FixtureRequest, memories: str) -> Iterator[MirroredStrategy]:
    with replicas(request.param) as made:
        yield made


@pytest.fixture
def pair(memories: str) -> Iterator[MirroredStrategy]:
    with replicas(2) as made:
        yield made
