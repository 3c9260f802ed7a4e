"""What newcomers write by mistake, and what the error or the log says."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import unisono as uo
from unisono.errors import ContextError, ReplicaMismatchError, UnsupportedError

Make = Callable[..., uo.MirroredStrategy]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_batch_for_more_replicas_is_refused(mirrored: Make, num_replicas: int) -> None:
    (parts,) = mirrored(3).experimental_distribute_dataset([torch.arange(6)])
    strategy = mirrored(num_replicas)

    with pytest.raises(ReplicaMismatchError, match=f"for 3 replicas, but there are {num_replicas}"):
        strategy.run(lambda x: x.sum(), args=(parts,))


def test_a_model_of_an_earlier_strategy_is_called_that(mirrored: Make) -> None:
    with mirrored().scope():
        model = nn.Linear(2, 1)

    with pytest.raises(ContextError, match="Linear was made under another strategy"):
        mirrored().run(lambda: model(torch.ones(1, 2)).sum().backward())


def test_a_strategy_and_its_variables_cannot_be_pickled(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        variable = uo.Variable(1.0)

    with pytest.raises(UnsupportedError, match=r"Save the `state_dict\(\)` of the model"):
        pickle.dumps(strategy)
    with pytest.raises(UnsupportedError, match=r"Save `variable.state\(\)`"):
        pickle.dumps(variable)


def test_data_parallel_modules_are_refused(mirrored: Make) -> None:
    strategy = mirrored()

    with pytest.raises(UnsupportedError, match="Make the plain model"), strategy.scope():
        nn.DataParallel(nn.Linear(2, 1))


def test_a_function_that_calls_run_says_once_that_it_is_not_captured(
    mirrored: Make, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = mirrored()
    train = uo.function(lambda: strategy.run(lambda: 1))

    with caplog.at_level(logging.WARNING, "unisono"):
        assert [train(), train()] == [1, 1]
        strategy.run(uo.function(lambda: torch.ones(())))

    assert [record.getMessage().count("mark the step") for record in caplog.records] == [1]


def test_an_older_input_function_must_be_a_function(mirrored: Make) -> None:
    with (
        pytest.deprecated_call(),
        pytest.raises(UnsupportedError, match="`dataset_fn` must be a function"),
    ):
        mirrored().distribute_dataset([torch.ones(2)])  # type: ignore[attr-defined]
