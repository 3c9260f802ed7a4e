import dataclasses
from typing import Any

import pytest

from unisono.errors import UnsupportedError
from unisono.input import InputContext, InputOptions, InputReplicationMode, ValueContext

PER_REPLICA = InputReplicationMode.PER_REPLICA


def test_a_context_is_of_the_only_pipeline_and_replica_by_default() -> None:
    assert InputContext() == InputContext(1, 0, 1)
    assert ValueContext() == ValueContext(0, 1)


@pytest.mark.parametrize(("global_batch_size", "share"), [(0, 0), (4, 2), (10, 5)])
def test_a_global_batch_is_shared_evenly(global_batch_size: int, share: int) -> None:
    context = InputContext(num_replicas_in_sync=2)

    assert context.get_per_replica_batch_size(global_batch_size) == share


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch of 5 .* 2 replicas: the remainder is 1"):
        InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((2, 2, 1), "from 0 to 1"), ((1, -1, 1), "got -1"), ((1, 0, 0), "1 or more, got 0")],
)
def test_an_impossible_context_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        InputContext(*arguments)


def test_options_fetch_one_step_ahead_to_the_device_once_a_worker() -> None:
    assert InputOptions() == InputOptions(True, InputReplicationMode.PER_WORKER, False, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"experimental_place_dataset_on_device": True},
        {
            "experimental_place_dataset_on_device": True,
            "experimental_replication_mode": PER_REPLICA,
        },
        {"experimental_place_dataset_on_device": True, "experimental_fetch_to_device": False},
        {"experimental_replication_mode": "PER_REPLICA"},
        {"experimental_per_replica_buffer_size": -1},
    ],
)
def test_options_that_do_not_go_together_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="experimental_"):
        InputOptions(**settings)


def test_a_dataset_on_the_device_is_one_a_replica_and_not_fetched() -> None:
    options = InputOptions(False, PER_REPLICA, True)

    assert options.experimental_place_dataset_on_device


@pytest.mark.parametrize("made", [InputContext(), InputOptions(), ValueContext()])
def test_contexts_and_options_never_change(made: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, 3)
