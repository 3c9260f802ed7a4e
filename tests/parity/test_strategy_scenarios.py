"""Strategies, contexts and `run`, asked what TensorFlow was asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from on_replica import replica as context
from on_replica import replica_id as rid
from scenarios import PR, Scenario, check, each, per_replica
from torch import Tensor

import unisono as uo
from unisono.errors import ContextError, UnequalCallsError

PAIR = per_replica([1.0, 2.0], [3.0, 4.0])
SQUARES = per_replica([[1.0, 2], [3, 4]], [[5.0, 6], [7, 8]])


def merged(strategy: uo.Strategy) -> Any:
    def add_up(merging: uo.Strategy, value: Any) -> Any:
        return merging.reduce("SUM", value)

    def step() -> Tensor:
        own = torch.tensor(3.0 + rid())
        return own + context().merge_call(add_up, args=(own,))  # type: ignore[no-any-return]

    return strategy.run(step)


def merged_unequally(strategy: uo.Strategy) -> Any:
    def step() -> None:
        for _ in range(1 + rid()):
            context().merge_call(lambda _: None)

    return strategy.run(step)


def failing(where: str) -> Callable[[uo.Strategy], Any]:
    def fail(_: Any = None) -> Any:
        raise LookupError(where)

    def step() -> Any:
        if where == f"replica {rid()}":
            fail()
        return context().merge_call(fail if where == "merge" else lambda _: None)

    return lambda strategy: strategy.run(step)


def reduced(op: str, first: list[Any], second: list[Any]) -> Callable[[uo.Strategy], Any]:
    """All-reduces two tensors, of which each replica has its own."""

    def step() -> Any:
        own = [torch.tensor(first[rid()]), torch.tensor(second[rid()])]
        return tuple(t.tolist() for t in context().all_reduce(op, own))

    return lambda strategy: strategy.experimental_local_results(strategy.run(step))[-1]


def gradient(op: str) -> Callable[[uo.Strategy], Any]:
    def step() -> Any:
        own = torch.tensor(5.0, requires_grad=True)
        (context().all_reduce(op, own) * (1.0 + 2 * rid())).backward()
        return own.grad

    return lambda strategy: strategy.run(step)


def one_replica(strategy: uo.Strategy) -> Any:
    def step() -> Any:
        own = torch.tensor(4.0, requires_grad=True)
        total = context().all_reduce("SUM", [own, torch.tensor([42.0, 43.0])])
        (total[0] * 3).backward()
        return [*total, own.grad]

    return strategy.run(step)


def sparse_mean(strategy: uo.Strategy) -> Any:
    def step() -> Any:
        own = torch.sparse_coo_tensor(
            torch.tensor([[rid()]]), torch.tensor([rid() + 1.0]), (2,), check_invariants=True
        )
        total = context().all_reduce("MEAN", own)
        return total._values(), total._indices()[0]

    return strategy.run(step)


def integers(op: str, dtype: torch.dtype, count: int = 1) -> Callable[[uo.Strategy], Any]:
    def step() -> Any:
        totals = context().all_reduce(op, [torch.tensor(rid(), dtype=dtype)] * count)
        return [(t.item(), str(t.dtype)) for t in totals]

    return lambda strategy: [
        one.values[0] if isinstance(one, uo.PerReplica) else one
        for pair in strategy.run(step)
        for one in pair
    ]


def gathered(make: Callable[[], Any], axis: int = 0) -> Callable[[uo.Strategy], Any]:
    return lambda strategy: strategy.run(lambda: context().all_gather(make(), axis))


def gather_gradient(strategy: uo.Strategy) -> Any:
    factors = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]])

    def step() -> Any:
        own = torch.ones(2, requires_grad=True)
        (context().all_gather(own, 0) * factors[rid()]).sum().backward()
        return own.grad

    return strategy.run(step)


def in_other_scope(strategy: uo.Strategy) -> Any:
    with uo.OneDeviceStrategy("cpu:0").scope():
        return strategy.reduce("SUM", PAIR)


def in_and_out_of_scope(strategy: uo.Strategy) -> Any:
    with strategy.scope():
        inside = strategy.reduce("SUM", strategy.run(lambda: torch.ones(())))
    return [inside, strategy.reduce("SUM", strategy.run(lambda: torch.ones(())))]


def lengths() -> Tensor:
    return torch.full((rid() + 1,), float(rid()))


DOUBLED = per_replica(2.0, 4.0)
SAME = torch.ones(2)
SAME_ON_BOTH = uo.Mirrored([torch.tensor(3.0), torch.tensor(3.0)])

SCENARIOS = [
    Scenario(59, "run", lambda s: s.run(lambda: rid() + 1), PR([1, 2])),
    Scenario(
        60,
        "run gives a structure",
        lambda s: s.run(lambda v: {"a": 2 * v, "b": v * v}, args=(per_replica(1.0, 2.0),)),
        {"a": PR([2, 4]), "b": PR([1, 4])},
    ),
    Scenario(
        61,
        "run takes keywords",
        lambda s: s.run(
            lambda a, b: a + 2 * b + 2, kwargs={"a": DOUBLED, "b": per_replica(1.0, 4.0)}
        ),
        PR([6, 14]),
    ),
    Scenario(62, "a number", lambda s: s.run(lambda: 4), 4),
    Scenario(62, "nothing", lambda s: s.run(lambda: None), None),
    Scenario(62, "one tensor", lambda s: s.run(lambda: SAME) is SAME, True),
    Scenario(63, "other lengths", lambda s: s.run(lambda: [0] * rid()), ValueError),
    Scenario(64, "one value", lambda s: s.run(lambda v: v, args=(per_replica(1.0),)), ValueError),
    Scenario(
        64,
        "three values",
        lambda s: s.run(lambda v: v, args=(per_replica(1.0, 2.0, 3.0),)),
        PR([1, 2]),
    ),
    Scenario(65, "args no tuple", lambda s: s.run(lambda v: v, args=SAME), ValueError),
    Scenario(66, "merge", merged, PR([10, 11])),
    Scenario(
        67,
        "other merge functions",
        lambda s: s.run(lambda: context().merge_call((lambda _: "0", lambda _: "1")[rid()])),
        "0",
    ),
    Scenario(68, "unequal merges", merged_unequally, UnequalCallsError),
    Scenario(69, "error on replica 0", failing("replica 0"), LookupError),
    Scenario(69, "error on replica 1", failing("replica 1"), LookupError),
    Scenario(69, "error in a merge", failing("merge"), LookupError),
    Scenario(
        70, "all_reduce SUM", reduced("SUM", [1.0, 3.0], [[39.0, 2], [3.0, 41]]), (4, [42, 43])
    ),
    Scenario(
        71, "all_reduce MEAN", reduced("MEAN", [1.0, 3.0], [[39.0, 2], [3.0, 41]]), (2, [21, 21.5])
    ),
    Scenario(72, "gradient of SUM", gradient("SUM"), PR([4, 4])),
    Scenario(72, "gradient of MEAN", gradient("MEAN"), PR([2, 2])),
    Scenario(73, "one replica", one_replica, [4, [42, 43], 3], 1),
    Scenario(74, "sparse MEAN", sparse_mean, (PR([[0.5, 1]] * 2), PR([[0, 1]] * 2))),
    Scenario(75, "int32 SUM", integers("SUM", torch.int32), [1, "torch.int32"]),
    Scenario(75, "int32 MEAN", integers("MEAN", torch.int32), [0.5, "torch.float64"]),
    # TensorFlow cannot reduce two int32 values in one batch, nor one with a float.
    Scenario(76, "two int32", integers("SUM", torch.int32, 2), [1, "torch.int32"] * 2),
    Scenario(76, "int32 and float", reduced("SUM", [1, 3], [[1.0], [2.0]]), (4, [3])),
    Scenario(77, "two int64", integers("SUM", torch.int64, 2), [1, "torch.int64"] * 2),
    # TensorFlow has no MAX.
    Scenario(78, "MAX", reduced("MAX", [1.0, 3.0], [[1.0], [2.0]]), (3, [2])),
    Scenario(78, "no operation", reduced("MEDIAN", [1.0, 3.0], [[1.0], [2.0]]), ValueError),
    Scenario(
        79,
        "all_gather",
        gathered(lambda: torch.tensor([[1, 2], [3, 4]][rid()])),
        PR([[1, 2, 3, 4]] * 2),
    ),
    Scenario(
        80,
        "all_gather of a structure",
        gathered(
            lambda: {
                "a": torch.tensor([rid()]),
                "b": torch.tensor([[[0, 1]], [[2, 3], [4, 5]]][rid()]),
            }
        ),
        {"a": PR([[0, 1]] * 2), "b": PR([[[0, 1], [2, 3], [4, 5]]] * 2)},
    ),
    Scenario(81, "gradient of all_gather", gather_gradient, PR([[11, 22], [33, 44]])),
    Scenario(
        82,
        "gather of four",
        lambda s: tuple(s.gather(s.run(lambda: torch.ones(1, 2, 3)), 2).shape),
        (1, 2, 12),
        4,
    ),
    Scenario(83, "SUM", lambda s: s.reduce("SUM", PAIR, None), [4, 6]),
    Scenario(83, "MEAN", lambda s: s.reduce("MEAN", PAIR, None), [2, 3]),
    Scenario(84, "SUM axis 0", lambda s: s.reduce("SUM", PAIR, 0), 10),
    Scenario(84, "MEAN axis 0", lambda s: s.reduce("MEAN", PAIR, 0), 2.5),
    Scenario(85, "SUM of lengths", lambda s: s.reduce("SUM", s.run(lengths), 0), 2),
    Scenario(
        85,
        "MEAN of lengths",
        lambda s: abs(s.reduce("MEAN", s.run(lengths), 0).item() - 2 / 3) < 1e-7,
        True,
    ),
    Scenario(
        86,
        "the same on each",
        lambda s: [s.reduce(op, per_replica(*[[1.0, 2.0]] * 3), 0) for op in ("MEAN", "SUM")],
        [1.5, 9],
        3,
    ),
    Scenario(
        87, "no axis", lambda s: s.reduce("SUM", per_replica([0.0, 1, 2, 3], [4.0, 5])), ValueError
    ),
    Scenario(
        87,
        "uneven",
        lambda s: [
            s.reduce(op, per_replica([0.0, 1, 2, 3], [4.0, 5]), 0) for op in ("SUM", "MEAN")
        ],
        [15, 2.5],
    ),
    Scenario(88, "one empty", lambda s: s.reduce("MEAN", per_replica([3.0, 5.0], []), 0), 4),
    Scenario(
        88,
        "both empty",
        lambda s: math.isnan(s.reduce("MEAN", per_replica([], []), 0)),
        True,
    ),
    Scenario(89, "MEAN axis -1", lambda s: s.reduce("MEAN", SQUARES, -1), [3.5, 5.5]),
    Scenario(89, "MEAN axes", lambda s: s.reduce("MEAN", SQUARES, (0, 1)), 4.5),
    Scenario(89, "SUM axes", lambda s: s.reduce("SUM", SQUARES, (0, 1)), 36),
    Scenario(
        90,
        "integers",
        lambda s: [
            (mean := s.reduce("MEAN", per_replica([1, 2], [3, 5]), 0)),
            str(mean.dtype),
        ],
        [2.75, "torch.float64"],
    ),
    Scenario(91, "SUM of 5", lambda s: s.reduce("SUM", 5), ValueError),
    Scenario(91, "MEAN of 5", lambda s: s.reduce("MEAN", 5), 5),
    Scenario(91, "SUM of 5 on one", lambda s: s.reduce("SUM", 5), 5, 1),
    Scenario(
        92,
        "one tensor with an axis",
        lambda s: [s.reduce(op, torch.tensor([5.0, 6.0]), 0) for op in ("SUM", "MEAN")],
        [22, 5.5],
    ),
    Scenario(93, "SUM of Mirrored", lambda s: s.reduce("SUM", SAME_ON_BOTH), ValueError),
    Scenario(
        93,
        "MEAN of Mirrored",
        lambda s: s.reduce("MEAN", SAME_ON_BOTH),
        3,
    ),
    Scenario(94, "on a replica", lambda s: s.run(lambda: s.reduce("SUM", 1.0)), ContextError),
    Scenario(94, "in another scope", in_other_scope, ContextError),
    Scenario(95, "in and out of scope", in_and_out_of_scope, [2, 2]),
    Scenario(
        96,
        "values from a function",
        lambda s: s.experimental_distribute_values_from_function(
            lambda c: 10 * c.replica_id_in_sync_group + c.num_replicas_in_sync
        ),
        PR([2, 12]),
    ),
    Scenario(
        96,
        "equal values",
        lambda s: s.experimental_distribute_values_from_function(lambda c: 5),
        PR([5, 5]),
    ),
    Scenario(
        97,
        "local results",
        lambda s: [
            s.experimental_local_results(value)
            for value in (per_replica(1, 2), 5, [per_replica(1, 2), 1])
        ],
        [(1, 2), (5,), ([1, 1], [2, 1])],
    ),
]


@each(SCENARIOS)
def test_the_answer_is_that_of_tensorflow_or_better(
    scenario: Scenario, mirrored: Callable[..., uo.MirroredStrategy]
) -> None:
    check(scenario, mirrored)


def test_no_scenario_is_left_out() -> None:
    assert {one.number for one in SCENARIOS} == set(range(59, 98))
