from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unisono import MirroredStrategy


@pytest.fixture
def mirrored() -> Iterator[Callable[..., MirroredStrategy]]:
    """Makes strategies of CPU replicas, whose threads end with the test."""
    made: list[MirroredStrategy] = []

    def make(num_replicas: int = 2, **options: Any) -> MirroredStrategy:
        made.append(MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()
