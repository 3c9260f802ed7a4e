"""What `StrategyExtended` offers, and where it may be called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.errors import ContextError, EndOfInputError, UnsupportedError
from unisono.strategies.steps import MultiStepContext

Make = Callable[..., uo.MirroredStrategy]


def per_replica(*values: Any) -> uo.PerReplica:
    return uo.PerReplica(torch.tensor(value) for value in values)


def made(strategy: uo.Strategy, value: Any = 0.0, **options: Any) -> uo.Variable:
    with strategy.scope():
        return uo.Variable(value, **options)


def numbers(value: uo.DistributedValues) -> list[Any]:
    return [component.tolist() for component in value.values]


@pytest.fixture
def pair(mirrored: Make, memories: str) -> uo.MirroredStrategy:
    return mirrored()


# Variables


def test_update_calls_the_function_for_each_component(pair: uo.MirroredStrategy) -> None:
    variable = made(pair)
    values = uo.Mirrored([torch.tensor(2.0), torch.tensor(3.0)])

    for _ in range(2):
        results = pair.extended.update(variable, Tensor.copy_, args=(values,), group=False)
        assert [one.item() for one in results] == [2, 3]
        assert numbers(variable) == [2, 3]
    grouped = pair.extended.update(variable, Tensor.add_, args=(1.0,))
    assert numbers(grouped) == numbers(variable) == [3, 4]
    assert pair.extended.update(variable, lambda own: None) is None


def test_update_gives_the_function_a_variable(pair: uo.MirroredStrategy) -> None:
    variable = made(pair, [1.0, 2.0])
    given = per_replica(1.0, 10.0)
    plain: list[type] = []

    def update(own: Any, amount: Tensor) -> Any:
        before = own.read_value()
        own.assign_add(amount.expand(2))
        own.assign_sub([1.0, 1.0])
        own.scatter_mul([0], [[3.0]][0])
        plain.append(type(own * 2))
        assert own.assign(own, read_value=False) is None
        return own.assign(own) - before

    results = pair.extended.update(variable, update, args=(given,), group=False)

    assert [one.tolist() for one in results] == [[2, 0], [29, 9]]
    assert numbers(variable) == [[3, 2], [30, 11]]
    assert set(plain) == {Tensor}
    with pytest.raises(UnsupportedError, match="do not broadcast"):
        pair.extended.update(variable, lambda own: own.assign(1.0))


def test_update_on_a_replica_is_a_merge_call(pair: uo.MirroredStrategy) -> None:
    variable = made(pair)

    def step(x: Tensor) -> None:
        pair.extended.update(variable, lambda own, given: own.add_(given), args=(x,))

    pair.run(step, args=(per_replica(1.0, 10.0),))

    assert numbers(variable) == [1, 10]


def test_update_is_for_variables_of_the_strategy(pair: uo.MirroredStrategy, mirrored: Make) -> None:
    with pytest.raises(UnsupportedError, match="got Tensor"):
        pair.extended.update(torch.ones(1), Tensor.zero_)  # type: ignore[arg-type]
    with pytest.raises(ContextError, match="made under"):
        pair.extended.update(made(mirrored()), Tensor.zero_)


def test_update_non_slot_calls_the_function_for_each_device(pair: uo.MirroredStrategy) -> None:
    extended = pair.extended
    variable, value = made(pair), uo.Mirrored([torch.tensor(2.0), torch.tensor(3.0)])
    devices = extended.non_slot_devices([variable])

    def double(own: Tensor, times: int) -> Any:
        return (own + value) * times

    results = extended.update_non_slot(devices, double, (value,), {"times": 2}, group=False)
    assert [one.item() for one in results] == [8, 12]
    assert numbers(extended.update_non_slot(devices, double, (value, 1))) == [4, 6]
    with pytest.raises(UnsupportedError, match="got cpu:7"):
        extended.update_non_slot([uo.Device("cpu", 7)], double)


@pytest.mark.parametrize(
    ("aggregation", "synchronization"),
    [("MEAN", "ON_WRITE"), ("SUM", "ON_READ"), ("NONE", "AUTO")],
)
def test_the_container_of_a_component_is_its_variable(
    pair: uo.MirroredStrategy, aggregation: str, synchronization: str
) -> None:
    variable = made(
        pair,
        aggregation=uo.VariableAggregation[aggregation],
        synchronization=uo.VariableSynchronization[synchronization],
    )

    for component in variable.values:
        assert pair.extended.value_container(component) is variable
    assert pair.extended.value_container(variable) is variable
    for other in (torch.ones(1), 5, None, "text"):
        assert pair.extended.value_container(other) is other


def test_the_container_of_a_leaf_is_the_parameter_of_the_model(pair: uo.MirroredStrategy) -> None:
    with pair.scope():
        model = nn.Linear(1, 1)

    leaves = pair.run(lambda: model.weight)

    assert leaves.values[0] is not model.weight
    for leaf in leaves.values:
        assert pair.extended.value_container(leaf) is model.weight


def test_variables_know_their_strategy(pair: uo.MirroredStrategy, mirrored: Make) -> None:
    extended = pair.extended

    assert extended.variable_created_in_scope(made(pair))
    assert not extended.variable_created_in_scope(made(mirrored()))
    assert not extended.variable_created_in_scope(torch.ones(1))


def test_colocate_vars_with_takes_a_variable_of_the_strategy_in_its_scope(
    pair: uo.MirroredStrategy, mirrored: Make
) -> None:
    other = mirrored()
    variable, others = made(pair), made(other)

    with pair.scope(), pair.extended.colocate_vars_with(variable):
        assert uo.Variable(1.0).devices == variable.devices
    with pair.scope(), pytest.raises(ValueError, match="takes a variable of"):
        pair.extended.colocate_vars_with(others).__enter__()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="outside its scope"):
            pair.extended.colocate_vars_with(variable).__enter__()
    with other.scope(), pytest.raises(RuntimeError, match="outside its scope"):
        pair.extended.colocate_vars_with(variable).__enter__()


def test_read_var_reads_as_the_aggregation_says(pair: uo.MirroredStrategy) -> None:
    variable = made(
        pair,
        1.0,
        synchronization=uo.VariableSynchronization.ON_READ,
        aggregation=uo.VariableAggregation.SUM,
    )

    assert pair.extended.read_var(variable).item() == 2
    assert [one.item() for one in pair.run(lambda: pair.extended.read_var(variable)).values] == [
        1,
        1,
    ]


# Reductions


def test_a_structure_is_reduced_leaf_by_leaf(pair: uo.MirroredStrategy) -> None:
    value = {"a": per_replica(1.0, 3.0), "b": [per_replica(10.0, 30.0)]}

    for _ in range(2):
        reduced = pair.extended.reduce_to("SUM", value, "cpu:0")
        assert (reduced["a"].item(), reduced["b"][0].item()) == (4, 40)


@pytest.mark.parametrize("destinations", [None, ["cpu:0", "cpu:1"], ()])
def test_destinations_are_named_or_a_value(pair: uo.MirroredStrategy, destinations: Any) -> None:
    with pytest.raises(ValueError, match="destinations"):
        pair.extended.reduce_to("SUM", per_replica(1.0, 2.0), destinations)
    with pytest.raises(ValueError, match="destinations"):
        pair.extended.broadcast_to(torch.ones(1), destinations)


# Several steps


def test_steps_on_an_iterator_run_one_after_another(pair: uo.MirroredStrategy) -> None:
    iterator = pair.make_dataset_iterator([torch.arange(4.0) + 10 * i for i in range(5)])
    seen: list[Any] = []

    def step(x: Tensor) -> Tensor:
        return x.sum()

    def fn(context: MultiStepContext, x: Any) -> None:
        assert uo.in_cross_replica_context()
        sums = pair.run(step, args=(x,))
        seen.append(numbers(sums))
        context.set_last_step_output("total", sums, "SUM")
        context.set_last_step_output("sums", sums)
        context.set_non_tensor_output("number", len(seen))

    context = pair.extended.experimental_run_steps_on_iterator(fn, iterator, iterations=3)

    assert seen == [[1, 5], [21, 25], [41, 45]]
    assert context.last_step_outputs["total"].item() == 86
    assert numbers(context.last_step_outputs["sums"]) == [41, 45]
    assert context.non_tensor_outputs == {"number": 3}
    pair.extended.experimental_run_steps_on_iterator(fn, iterator)
    assert seen[-1] == [61, 65]
    with pytest.raises(EndOfInputError):
        pair.extended.experimental_run_steps_on_iterator(fn, iterator, 2)
    assert len(seen) == 5


def test_a_step_gives_its_outputs_on_the_replicas_too(pair: uo.MirroredStrategy) -> None:
    iterator = pair.make_dataset_iterator([torch.arange(4.0)])

    def step(context: MultiStepContext, x: Tensor) -> None:
        context.set_last_step_output("mean", x.mean(), uo.ReduceOp.MEAN)
        context.set_non_tensor_output("sizes", f"{len(x)} samples")
        with pytest.raises(UnsupportedError, match="reduce_op"):
            context.set_last_step_output("own", x)

    context = pair.extended.experimental_run_steps_on_iterator(
        lambda context, x: pair.run(step, args=(context, x)), iterator
    )

    assert context.last_step_outputs["mean"].item() == 1.5
    assert context.non_tensor_outputs == {"sizes": ("2 samples", "2 samples")}


def test_without_a_step_there_are_the_initial_values(pair: uo.MirroredStrategy) -> None:
    iterator = pair.make_dataset_iterator([torch.arange(4)])

    context = pair.extended.experimental_run_steps_on_iterator(
        lambda *_: pytest.fail("there is no step"), iterator, 0, {"loss": 0.5}
    )

    assert context.last_step_outputs == {"loss": 0.5}
    with pytest.raises(UnsupportedError, match="got -1"):
        pair.extended.experimental_run_steps_on_iterator(lambda *_: None, iterator, -1)


def test_what_is_for_the_program_is_refused_elsewhere(
    pair: uo.MirroredStrategy, mirrored: Make
) -> None:
    other, iterator = mirrored(3), pair.make_dataset_iterator([torch.arange(4)])
    calls: list[Callable[[], Any]] = [
        lambda: pair.extended.experimental_run_steps_on_iterator(lambda *_: None, iterator),
        lambda: pair.extended.update_non_slot([], lambda: None),
        lambda: pair.experimental_run(lambda x: x, iterator),
    ]

    for call in calls:
        with pytest.raises(ContextError, match="on a replica"):
            pair.run(call)
        with other.scope(), pytest.raises(ContextError, match="another strategy"):
            call()
    assert iterator.progress.num_steps == 0


def test_a_numpy_dataset_has_the_rows_of_arrays(pair: uo.MirroredStrategy) -> None:
    rows = pair.extended.experimental_make_numpy_dataset({"x": torch.arange(3).numpy()})

    assert [rows[i]["x"].item() for i in range(len(rows))] == [0, 1, 2]


# Older names


@pytest.mark.filterwarnings("ignore:.*is an older name.*:DeprecationWarning")
def test_older_names_do_what_they_did(mirrored: Make) -> None:
    strategy: Any = mirrored()
    variable = made(strategy)

    assert strategy.call_for_each_tower(lambda x, y: x + y, 1, y=2, run_concurrently=False) == 3
    assert (strategy.num_towers, strategy.is_single_tower) == (2, False)
    assert (strategy.between_graph, strategy.should_init) == (False, True)
    assert strategy.worker_devices == strategy.parameter_devices
    assert strategy.broadcast(torch.ones(1), "cpu:0").tolist() == [1]
    assert strategy.batch_reduce("SUM", [(per_replica(1.0, 2.0), "cpu:0")])[0].item() == 3
    strategy.update(variable, Tensor.add_, 2.0)
    assert strategy.read_var(variable).item() == 2
    assert strategy.update(variable, lambda own: 1, grouped=False) == (1, 1)
    assert strategy.update_non_slot(strategy.worker_devices, lambda: 1, grouped=False) == (1, 1)
    dataset = strategy.distribute_dataset(lambda: [torch.arange(2), torch.arange(2, 4)])
    assert [numbers(element) for element in dataset] == [[[0, 1], [2, 3]]]
    assert numbers(dataset.make_one_shot_iterator().get_next()) == [[0, 1], [2, 3]]
    assert strategy.call_for_each_tower(lambda i: i, strategy.worker_device_index).values == (0, 1)
    assert strategy.experimental_run_v2(lambda x: x, args=(4,)) == 4
    assert strategy.value_container(variable.values[0]) is variable


@pytest.mark.filterwarnings("ignore:.*is an older.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("aggregation", "total"),
    [
        (uo.VariableAggregation.SUM, 3.0),
        (uo.VariableAggregation.MEAN, 1.5),
        (uo.VariableAggregation.ONLY_FIRST_REPLICA, 1.0),
    ],
)
def test_values_are_reduced_as_in_1_12(
    mirrored: Make, aggregation: uo.VariableAggregation, total: float
) -> None:
    strategy: Any = mirrored()
    value = per_replica(1.0, 2.0)

    results = [
        strategy.reduce(aggregation, value, "cpu:1"),
        strategy.reduce(aggregation, value, ["cpu:1", "cpu:0"]),
        strategy.reduce(aggregation, value, value),
        strategy.reduce(aggregation, value),
    ]

    assert all(type(result) is uo.Mirrored for result in results)
    assert [numbers(result) for result in results] == [[total], *[[total] * 2] * 3]
    assert [str(device) for device in results[1].devices] == ["cpu:1", "cpu:0"]


def test_the_older_form_of_a_reduction_says_what_to_write(mirrored: Make) -> None:
    with pytest.warns(DeprecationWarning, match=r"write `strategy\.extended\.reduce_to") as caught:
        mirrored().reduce(uo.VariableAggregation.SUM, per_replica(1.0, 2.0), "cpu:0")
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore:.*is an older.*:DeprecationWarning")
def test_an_aggregation_must_say_how(mirrored: Make) -> None:
    with pytest.raises(UnsupportedError, match="SUM or MEAN"):
        mirrored().reduce(uo.VariableAggregation.NONE, per_replica(1.0, 2.0))


@pytest.mark.filterwarnings("ignore:.*is an older name.*:DeprecationWarning")
def test_batches_and_broadcasts_go_to_lists_of_devices_as_in_1_12(mirrored: Make) -> None:
    strategy: Any = mirrored()
    pairs = [(per_replica(1.0, 2.0), ["cpu:1"]), (per_replica(3.0, 4.0), per_replica(0, 0))]

    results = strategy.batch_reduce(uo.VariableAggregation.SUM, pairs)

    assert [type(result) for result in results] == [uo.Mirrored] * 2
    assert [numbers(result) for result in results] == [[3], [7, 7]]
    assert numbers(strategy.broadcast(torch.ones(()))) == [1, 1]
    assert numbers(strategy.broadcast(torch.ones(()), ["cpu:1"])) == [1]


def test_devices_in_the_place_of_an_axis_are_told_where_to_go(mirrored: Make) -> None:
    with pytest.raises(UnsupportedError, match=r"write `strategy\.extended\.reduce_to"):
        mirrored().reduce("SUM", per_replica(1.0, 2.0), "cpu:0")


def test_an_older_name_says_what_to_write(mirrored: Make) -> None:
    strategy: Any = mirrored()

    with pytest.warns(DeprecationWarning, match=r"write `strategy\.extended\.update`") as caught:
        _ = strategy.update
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="no attribute 'tower_of_babel'"):
        _ = strategy.tower_of_babel


def test_a_strategy_of_one_host_takes_no_cluster(mirrored: Make) -> None:
    strategy = mirrored()

    assert strategy.configure(session_config={"a": 1}) is None  # type: ignore[func-returns-value]
    with pytest.raises(UnsupportedError, match="runs in one process"):
        strategy.configure(cluster_spec={"worker": ["a:1"]})
