"""The names of `tf.distribute.experimental`, and the options of `run`."""

from __future__ import annotations

import pytest
import torch

import unisono as uo
from unisono.errors import UnsupportedError
from unisono.experimental import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    MultiWorkerMirroredStrategy,
    ValueContext,
)


@pytest.mark.filterwarnings("ignore:.*is an older name.*:DeprecationWarning")
def test_the_strategy_takes_the_arguments_of_2_3() -> None:
    resolver = uo.cluster_resolver.SimpleClusterResolver({})

    strategy = MultiWorkerMirroredStrategy(CollectiveCommunication.RING, resolver)

    assert isinstance(strategy, uo.MultiWorkerMirroredStrategy)
    assert strategy.cluster_resolver is resolver
    assert strategy.extended.options.implementation is CommunicationImplementation.RING
    strategy.close()


def test_older_names_say_what_to_write() -> None:
    with pytest.warns(DeprecationWarning, match=r"write `unisono\.MultiWorkerMirroredStrategy`"):
        MultiWorkerMirroredStrategy().close()
    with pytest.warns(DeprecationWarning, match=r"write `unisono\.experimental\.Comm"):
        hints = CollectiveHints(10, timeout_seconds=2.0)
    assert hints == CommunicationOptions(10, 2.0)


def test_values_are_made_with_the_context_that_is_exported() -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    seen: list[ValueContext] = []

    strategy.experimental_distribute_values_from_function(seen.append)

    assert seen == [ValueContext(0, 2), ValueContext(1, 2)]


def test_run_takes_the_options_of_tpus_and_nothing_else() -> None:
    strategy = uo.OneDeviceStrategy("cpu:0")

    assert strategy.run(torch.ones, (1,), options=uo.RunOptions()).item() == 1
    assert uo.RunOptions(experimental_xla_options=3)._asdict() == {
        "experimental_enable_dynamic_batch_size": True,
        "experimental_bucketizing_dynamic_shape": False,
        "experimental_xla_options": 3,
    }
    with pytest.raises(UnsupportedError, match=r"`options` must be `unisono\.RunOptions`, got 5"):
        strategy.run(torch.ones, (1,), options=5)  # type: ignore[arg-type]
