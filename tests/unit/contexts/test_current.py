import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica_id as own_id

import unisono as uo
from unisono.errors import ContextError

Make = Callable[..., uo.MirroredStrategy]


def where() -> tuple[bool, bool, bool]:
    """Whether there is a replica context, a cross-replica context, and a strategy."""
    replica = uo.get_replica_context() is not None
    return replica, uo.in_cross_replica_context(), uo.has_strategy()


OUTSIDE = (True, False, False)
IN_SCOPE = (False, True, True)
ON_REPLICA = (True, False, True)


def test_outside_code_is_the_one_replica_of_the_default_strategy() -> None:
    context = uo.get_replica_context()

    assert where() == OUTSIDE
    assert context is not None
    assert context.replica_id_in_sync_group == 0
    assert context.num_replicas_in_sync == uo.get_strategy().num_replicas_in_sync == 1


def test_a_scope_is_a_cross_replica_context(mirrored: Make) -> None:
    strategy = mirrored()

    with strategy.scope() as entered:
        inside = where(), uo.get_strategy(), uo.get_replica_context()

    assert entered is strategy
    assert inside == (IN_SCOPE, strategy, None)
    assert where() == OUTSIDE


def test_run_is_a_replica_context_of_each_replica(mirrored: Make) -> None:
    strategy = mirrored(3)

    def step() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        assert context.strategy is strategy is uo.get_strategy()
        return where(), context.replica_id_in_sync_group, context.num_replicas_in_sync

    inside = strategy.experimental_local_results(strategy.run(step))

    assert inside == tuple((ON_REPLICA, i, 3) for i in range(3))
    assert where() == OUTSIDE


def test_each_replica_knows_its_device(mirrored: Make) -> None:
    strategy = mirrored()

    def step() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return str(context.device), context.devices == (context.device,)

    results = strategy.experimental_local_results(strategy.run(step))

    assert results == (("cpu:0", True), ("cpu:1", True))


def test_a_merge_call_is_a_cross_replica_context(mirrored: Make) -> None:
    strategy = mirrored()

    def merge(merged: uo.Strategy) -> Any:
        return merged is strategy, where()

    def step() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.merge_call(merge), where()

    merged, after = strategy.run(step)

    assert strategy.experimental_local_results(merged[0]) == (True,)
    assert [r.values if isinstance(r, uo.PerReplica) else r for r in merged[1]] == list(IN_SCOPE)
    assert after == ON_REPLICA


def test_a_scope_can_be_entered_again(mirrored: Make) -> None:
    strategy = mirrored()

    with strategy.scope():
        with strategy.scope():
            assert where() == IN_SCOPE
        assert uo.get_strategy() is strategy

    assert where() == OUTSIDE


def test_a_scope_ends_with_an_error(mirrored: Make) -> None:
    with pytest.raises(ZeroDivisionError), mirrored().scope():
        _ = 1 / 0

    assert where() == OUTSIDE


def calls_of(strategy: uo.Strategy) -> list[Callable[[], Any]]:
    """What a program calls outside of its steps."""
    value = uo.PerReplica([1.0] * strategy.num_replicas_in_sync)
    return [
        lambda: strategy.scope().__enter__(),
        lambda: strategy.run(where),
        lambda: strategy.reduce("SUM", value),
        lambda: strategy.gather(value, 0),
        lambda: strategy.mirror(torch.nn.Linear(1, 1)),
        lambda: strategy.extended.reduce_to("SUM", value, "cpu:0"),
        lambda: strategy.extended.batch_reduce_to("SUM", [(value, value)]),
        lambda: strategy.extended.broadcast_to(1.0, "cpu:0"),
    ]


def test_another_strategy_is_refused_in_a_scope(mirrored: Make) -> None:
    outer, inner = mirrored(), mirrored(3)

    for call in calls_of(inner):
        with outer.scope(), pytest.raises(ContextError, match="another strategy"):
            call()


def test_call_for_each_replica_of_another_strategy_is_refused(mirrored: Make) -> None:
    outer, inner = mirrored(), mirrored(3)

    with outer.scope(), pytest.raises(ContextError, match="another strategy"):
        inner.extended.call_for_each_replica(where)


def test_what_is_for_the_program_is_refused_on_a_replica(mirrored: Make) -> None:
    strategy = mirrored()

    for call in calls_of(strategy):
        with pytest.raises(ContextError, match="on a replica"):
            strategy.run(call)


def test_gather_on_a_replica_names_all_gather(mirrored: Make) -> None:
    strategy = mirrored()

    with pytest.raises(ContextError, match="all_gather"):
        strategy.run(lambda: strategy.gather(torch.ones(1), 0))


def merging(merge_fn: Callable[..., Any]) -> Callable[[], Any]:
    """A step that merges the numbers 10 and 20 of two replicas."""

    def step() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.merge_call(merge_fn, (torch.tensor(10.0 * (1 + own_id())),))

    return step


@pytest.mark.parametrize("options", [{}, {"serial": True}], ids=["at once", "serial"])
def test_replicas_that_merge_can_be_called(mirrored: Make, options: Any) -> None:
    strategy = mirrored(2, **options)

    def merge(merged: uo.Strategy, value: Any) -> Any:
        assert uo.in_cross_replica_context()
        result = merged.extended.call_for_each_replica(lambda own: own + own_id(), (value,))
        assert uo.in_cross_replica_context()
        return result

    for _ in range(2):
        assert [v.item() for v in strategy.run(merging(merge)).values] == [10, 21]


def test_replicas_that_are_called_in_a_merge_call_merge_again(mirrored: Make) -> None:
    def add_up(merged: uo.Strategy, value: Any) -> Any:
        return merged.reduce("SUM", value)

    def inner(own: Any) -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.merge_call(add_up, (own,)) + context.all_reduce("MAX", own)

    def merge(merged: uo.Strategy, value: Any) -> Any:
        return merged.run(inner, (value,))

    results = mirrored().run(merging(merge))

    assert [v.item() for v in results.values] == [50, 50]


def test_one_replica_can_be_called_in_its_merge_call(mirrored: Make) -> None:
    def merge(merged: uo.Strategy, value: Any) -> Any:
        return merged.run(lambda own: own + 1, (value,))

    assert mirrored(1).run(merging(merge)).item() == 11


def test_gradients_of_replicas_that_are_called_in_a_merge_call_are_reduced(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)

    def merge(merged: uo.Strategy, value: Any) -> Any:
        return merged.run(lambda own: model(own.reshape(1, 1)).backward(), (value,))

    strategy.run(merging(merge))

    assert model.weight.grad is not None
    assert model.weight.grad.item() == 15


def test_an_error_in_a_merge_call_s_replica_ends_the_step(mirrored: Make) -> None:
    strategy = mirrored()

    def inner() -> None:
        if own_id() == 1:
            raise LookupError("here")

    with pytest.raises(LookupError, match="here"):
        strategy.run(merging(lambda merged, _: merged.run(inner)))
    assert strategy.run(lambda: 1) == 1


def test_replicas_that_are_called_in_a_merge_call_must_make_the_same_calls(mirrored: Make) -> None:
    strategy = mirrored()

    def inner() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return own_id() or context.merge_call(lambda _: None)

    with pytest.raises(uo.errors.UnequalCallsError, match="replica 1 has returned"):
        strategy.run(merging(lambda merged, _: merged.run(inner)))
    assert strategy.run(lambda: 1) == 1


def test_run_on_a_replica_is_refused(mirrored: Make) -> None:
    strategy = mirrored()

    with pytest.raises(ContextError, match="was called on a replica"):
        strategy.run(lambda: strategy.run(own_id))


def test_a_merge_call_of_the_default_strategy_is_under_no_strategy() -> None:
    context = uo.get_replica_context()
    assert context is not None

    found = context.merge_call(
        lambda _: (uo.has_strategy(), uo.in_cross_replica_context(), uo.get_replica_context())
    )

    assert found == (False, True, None)


def test_local_results_can_be_asked_for_anywhere(mirrored: Make) -> None:
    strategy, other = mirrored(), mirrored()
    value = uo.PerReplica((1.0, 2.0))

    with other.scope():
        assert strategy.experimental_local_results(value) == (1.0, 2.0)
    on_replica = strategy.run(lambda: strategy.experimental_local_results(value) == (1.0, 2.0))
    assert on_replica is True


def test_no_sync_is_for_replicas(mirrored: Make) -> None:
    strategy = mirrored()

    with pytest.raises(ContextError, match="outside `run`"), strategy.no_sync():
        pass


def test_the_context_of_one_thread_is_not_that_of_another(mirrored: Make) -> None:
    seen: list[Any] = []

    with mirrored().scope():
        thread = threading.Thread(target=lambda: seen.append(where()))
        thread.start()
        thread.join()

    assert seen == [OUTSIDE]


def test_a_program_that_has_made_no_strategy_yet() -> None:
    calls = ["get_replica_context().all_reduce('SUM', torch.tensor(2.0))", "Variable(2.0)"]
    asserted = "; ".join(f"assert float(uo.{call}) == 2.0" for call in calls)
    program = f"import torch, unisono as uo; {asserted}"

    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
