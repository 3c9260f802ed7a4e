"""Mistakes of the first hour: each does what was meant, or says what to write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica
from torch import Tensor

import unisono as uo
from unisono.devices import pretend, replica_devices
from unisono.errors import BatchError, DeviceError, UnisonoError, UnsupportedError

Make = Callable[..., uo.MirroredStrategy]

ODD_LAYOUTS = ["nested", "jagged", "csr"]


def odd_layout(kind: str) -> Tensor:
    if kind == "csr":
        return torch.eye(3).to_sparse_csr()
    layout = torch.jagged if kind == "jagged" else torch.strided
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.parametrize(
    "device", ["cpu", "cpu:1", "/cpu:0", torch.device("cpu"), uo.Device("cpu", 3)]
)
def test_a_single_device_makes_one_replica(device: Any) -> None:
    assert uo.MirroredStrategy(device).num_replicas_in_sync == 1
    strategy = uo.MultiWorkerMirroredStrategy(devices=device)
    assert strategy.num_replicas_in_sync == 1
    strategy.close()


def test_a_number_of_replicas_says_how_to_write_the_devices() -> None:
    with pytest.raises(DeviceError, match=r"devices=\['cpu:0', 'cpu:1', 'cpu:2'\]` for 3 replicas"):
        uo.MirroredStrategy(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [0, -1, 2.5, True, object(), 10**9, "two", "", b"cpu", [3], []])
def test_what_are_no_devices_is_refused(devices: Any) -> None:
    with pytest.raises(DeviceError):
        uo.MirroredStrategy(devices)


def test_cuda_alone_may_mean_one_gpu_or_all() -> None:
    with pretend(gpus=(torch.device("cuda", 0), torch.device("cuda", 1))):
        with pytest.raises(DeviceError, match=r"devices=None` for all of them"):
            replica_devices("cuda")
        assert list(map(str, replica_devices("cuda:1"))) == ["cuda:1"]


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"cross_device_ops": "x"}, "must be a `CrossDeviceOps`"),
        ({"cross_device_ops": uo.ReductionToOneDevice}, r"Write `ReductionToOneDevice\(\)`"),
        ({"cross_device_ops": 0}, "must be a `CrossDeviceOps`"),
        ({"serial": "no"}, "`serial` must be True or False"),
        ({"synchronize_batch_norm": 1}, "`synchronize_batch_norm` must be True or False"),
        ({"reduce_gradients": "median"}, "`reduce_gradients` must be one of"),
    ],
)
@pytest.mark.parametrize("kind", [uo.MirroredStrategy, uo.MultiWorkerMirroredStrategy])
def test_settings_of_a_strategy_are_checked(
    kind: Callable[..., uo.Strategy], keywords: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        kind(devices=["cpu:0", "cpu:1"], **keywords)


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no function": (lambda s: s.run(3), "`fn` must be a function"),
    "args": (lambda s: s.run(abs, args=3), r"Write `args=\(x,\)`"),
    "kwargs": (lambda s: s.run(abs, kwargs="x"), r"Write `kwargs=\{'x': x\}`"),
    "kwargs without names": (lambda s: s.run(abs, kwargs={1: 2}), "`kwargs` must be a dict"),
    "no empty kwargs": (lambda s: s.run(abs, kwargs=0), "`kwargs` must be a dict"),
    "mirror nothing": (lambda s: s.mirror(None), "takes a model, optimizer"),
    "mirror a list": (lambda s: s.mirror([torch.nn.Linear(1, 1)]), "once for each object"),
    "mirror a class": (lambda s: s.mirror(torch.nn.Linear), "takes a model, optimizer"),
    "gather far": (lambda s: s.gather(rows(), axis=99), "`axis` must be from -2 to 1"),
    "gather along a name": (lambda s: s.gather(rows(), axis="rows"), "`axis` must be an int"),
    "gather scalars": (lambda s: s.gather(losses(), axis=0), "A scalar has no axis"),
    "gather one": (lambda s: s.gather(torch.ones(2), axis=99), "`axis` must be from -1 to 0"),
    "reduce far": (lambda s: s.reduce("SUM", rows(), axis=2), "`axis` must be from -2 to 1"),
    "reduce twice": (lambda s: s.reduce("SUM", rows(), axis=(0, -2)), "each dimension once"),
    "reduce how": (lambda s: s.reduce("average", rows()), "`reduce_op` must be one of"),
    "steps": (
        lambda s: s.extended.experimental_run_steps_on_iterator(abs, batches(s), 2.5),
        "`iterations` must be an int",
    ),
    "options": (
        lambda s: s.extended.reduce_to("SUM", losses(), "cpu:0", options={"bytes_per_pack": 3}),
        "`options` must be a `unisono.experimental.CommunicationOptions`",
    ),
}


def batches(strategy: uo.Strategy) -> uo.DistributedIterator:
    return iter(strategy.experimental_distribute_dataset([torch.ones(4)]))


def rows() -> uo.PerReplica:
    return uo.PerReplica([torch.ones(2, 3), torch.ones(1, 3)])


def losses() -> uo.PerReplica:
    return uo.PerReplica([torch.tensor(1.0), torch.tensor(2.0)])


@pytest.mark.parametrize(("call", "says"), CALLS.values(), ids=CALLS)
def test_arguments_of_a_strategy_are_checked_at_the_call(
    call: Callable[[Any], Any], says: str, mirrored: Make
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        call(mirrored())


ON_REPLICA: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gather far": (lambda c: c.all_gather(torch.ones(2), 99), "`axis` must be from -1 to 0"),
    "gather along a name": (lambda c: c.all_gather(torch.ones(2), "x"), "must be an int"),
    "merge nothing": (lambda c: c.merge_call(None), "`merge_fn` must be a function"),
    "merge args": (lambda c: c.merge_call(abs, 3), r"Write `args=\(x,\)`"),
    "options": (lambda c: c.all_reduce("SUM", torch.ones(2), 3), "`options` must be"),
}


@pytest.mark.parametrize(("call", "says"), ON_REPLICA.values(), ids=ON_REPLICA)
def test_arguments_on_a_replica_are_checked_at_the_call(
    call: Callable[[Any], Any], says: str, mirrored: Make
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        mirrored().run(lambda: call(uo.get_replica_context()))


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "reduce": lambda s, t: s.reduce("SUM", uo.PerReplica([t, t])),
    "reduce along": lambda s, t: s.reduce("SUM", uo.PerReplica([t, t]), axis=0),
    "gather": lambda s, t: s.gather(uo.PerReplica([t, t]), axis=0),
    "broadcast": lambda s, t: s.extended.broadcast_to(t, "cpu:0"),
    "all_reduce": lambda s, t: s.run(lambda: replica().all_reduce("SUM", t)),
    "all_gather": lambda s, t: s.run(lambda: replica().all_gather(t, 0)),
    "input": lambda s, t: next(iter(s.experimental_distribute_dataset([t]))),
    "variable": lambda s, t: uo.Variable(t),
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*:UserWarning")
@pytest.mark.parametrize("kind", ODD_LAYOUTS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nested_and_csr_tensors_are_refused(
    use: Callable[[Any, Tensor], Any], kind: str, mirrored: Make
) -> None:
    strategy = mirrored()

    with strategy.scope(), pytest.raises(UnsupportedError, match=r"nested|sparse_csr"):
        use(strategy, odd_layout(kind))


@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*:UserWarning")
@pytest.mark.parametrize("kind", ODD_LAYOUTS)
def test_nested_and_csr_tensors_go_through_run(kind: str, mirrored: Make) -> None:
    given = odd_layout(kind)

    assert mirrored().run(lambda x: x, (given,)) is given


@pytest.mark.parametrize(
    "keywords",
    [
        *({"timeout_seconds": one} for one in (float("nan"), float("inf"), -1, "5", True, 1e300)),
        *({"bytes_per_pack": one} for one in (float("nan"), -1, "5", 2.5, True, None)),
        {"implementation": "CARRIER PIGEON"},
    ],
    ids=str,
)
def test_communication_options_are_checked_when_they_are_made(keywords: dict[str, Any]) -> None:
    (name,) = keywords

    with pytest.raises(UnisonoError, match=f"`{name}` must be"):
        uo.experimental.CommunicationOptions(**keywords)


OPS = uo.ReductionToOneDevice()


@pytest.mark.filterwarnings("ignore:.*is an older name.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: uo.Strategy(uo.StrategyExtended), "extended"),  # type: ignore[arg-type]
        (lambda: uo.StrategyExtended((uo.Device("cpu", 0),), None), "cross_device_ops"),  # type: ignore[arg-type]
        (lambda: uo.StrategyExtended(3, OPS), "devices"),  # type: ignore[arg-type]
        (lambda: uo.experimental.MultiWorkerMirroredStrategy("PIGEON"), "communication"),
        (lambda: uo.contrib.CollectiveAllReduceStrategy(0, "PIGEON"), "communication"),
        (lambda: uo.experimental.ValueContext(2, 2), "replica_id_in_sync_group"),
        (lambda: OPS.reduce_gradients("all", []), "reduce_op"),
        (lambda: uo.contrib.Step("mirrored"), "distribution"),  # type: ignore[arg-type]
        (lambda: uo.contrib.Monitor(3), "step_callable"),  # type: ignore[arg-type]
        (lambda: uo.testing.virtual_gpus("two"), "num_gpus"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_that_cannot_be_used_is_named(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(UnisonoError, match=f"`{name}` must be"):
        call()


def test_gradients_are_reduced_in_pairs() -> None:
    value = uo.PerReplica([torch.ones(2), torch.ones(2)])

    with pytest.raises(BatchError, match="entry 0 is of type PerReplica"):
        OPS.reduce_gradients("sum", [value])  # type: ignore[list-item]
    assert OPS.reduce_gradients("sum", [(value, "cpu:0")])[0].tolist() == [2, 2]


def test_a_value_that_cannot_be_unpacked_is_refused(mirrored: Make) -> None:
    strategy = mirrored()

    with pytest.raises(UnsupportedError, match="`args` must be"):
        strategy.extended.call_for_each_replica(print, uo.PerReplica([1, 2]))  # type: ignore[arg-type]


def test_all_gather_wants_one_axis(mirrored: Make) -> None:
    strategy = mirrored()

    with pytest.raises(UnsupportedError, match="`axis` must be an int"):
        strategy.run(lambda: replica().all_gather(torch.ones(2), [0]))  # type: ignore[arg-type]


def test_what_torch_cannot_add_has_no_sum_along_an_axis(mirrored: Make) -> None:
    value = uo.PerReplica([torch.ones(2).to(torch.float8_e5m2)] * 2)

    with pytest.raises(UnsupportedError, match="torch cannot add"):
        mirrored().reduce("sum", value, axis=0)
