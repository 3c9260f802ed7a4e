"""What every cross-device operation must do, whatever its algorithm, packing and path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tables import every
from torch import Tensor

import unisono as uo
from unisono.experimental import CommunicationOptions
from unisono.kernels import gpu, result_dtype, tree_reduce
from unisono.packing import SmallGroups
from unisono.testing import separate_memories, virtual_gpus

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN

MAKERS: dict[str, Callable[[], Any]] = {
    "one_device": uo.ReductionToOneDevice,
    "one_device_at_cpu:2": lambda: uo.ReductionToOneDevice("cpu:2"),
    "hierarchical": uo.HierarchicalCopyAllReduce,
    "hierarchical_unpacked": lambda: uo.HierarchicalCopyAllReduce(num_packs=0),
    "hierarchical_3_packs": lambda: uo.HierarchicalCopyAllReduce(num_packs=3),
    "hierarchical_small": lambda: uo.HierarchicalCopyAllReduce(SmallGroups(64, 2)),
    "nccl": uo.NcclAllReduce,
    "nccl_9_packs": lambda: uo.NcclAllReduce(num_packs=9),
    "contrib_nccl": uo.contrib.AllReduceCrossDeviceOps,
    "contrib_grouped": lambda: uo.contrib.AllReduceCrossDeviceOps("hierarchical_copy", 0, 64, 3),
}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
SHAPES = [(), (1, 0), (5,), (3, 4), (17,)]


@pytest.fixture(params=MAKERS)
def ops(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]()


# Where replica i is, on each kind of host.
HOSTS: dict[str, Callable[[int], str]] = {
    "shared": lambda i: "cpu",
    "separate": lambda i: "cpu",
    "gpus": lambda i: "cuda",
    "gpus_without_triton": lambda i: "cuda",
    "mixed": lambda i: "cpu" if i % 2 else "cuda",
}
# Without a GPU they are not even skipped: they are thousands.
GPU_HOSTS = list(HOSTS)[2:] if torch.cuda.is_available() else []
here = "shared"


@pytest.fixture(autouse=True, params=["shared", "separate", *GPU_HOSTS])
def _every_path(
    path: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Runs every test natively and through torch, in one memory, in several, and on GPUs."""
    with ExitStack() as stack:
        monkeypatch.setitem(globals(), "here", request.param)
        if here == "separate":
            stack.enter_context(separate_memories())
        elif here != "shared":
            stack.enter_context(virtual_gpus(16))
        if here == "gpus_without_triton":
            monkeypatch.setattr(gpu, "triton_status", lambda: gpu.Triton("off"))
        yield


def at(device: str) -> str:
    """The device of this kind of host that stands where `device`, a CPU, is named."""
    index = int(device.split(":")[1])
    return f"{HOSTS[here](index)}:{index}"


def per_replica(components: Sequence[Any]) -> uo.PerReplica:
    """The components on the devices of this kind of host."""
    devices = [at(f"cpu:{i}") for i in range(len(components))]
    placed = [
        one.to(device.split(":")[0]) if isinstance(one, Tensor) else one
        for one, device in zip(components, devices, strict=True)
    ]
    return uo.PerReplica(placed, devices)


def destination(named: Any) -> Any:
    """The destination of this kind of host that stands where CPUs are named."""
    if isinstance(named, str):
        return at(named)
    if isinstance(named, uo.DistributedValues):
        return type(named)(named.values, [at(str(device)) for device in named.devices])
    return named


def values(num_replicas: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    real = torch.float64 if dtype.is_floating_point or dtype.is_complex else torch.int64
    drawn = [torch.randn(shape, dtype=torch.float64) * 9 for _ in range(num_replicas)]
    if dtype.is_complex:
        return [torch.complex(one, one.flip(-1) if one.dim() else -one).to(dtype) for one in drawn]
    # Through int64 and its absolute value, so that no negative number meets an unsigned dtype.
    return [one.to(real).abs().to(dtype) if real == torch.int64 else one.to(dtype) for one in drawn]


def sparse_rows(rows: list[int], values: list[list[float]], num_rows: int) -> Tensor:
    shape = (num_rows, len(values[0]))
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.tensor(values), shape, check_invariants=True
    )


def components(result: Any) -> tuple[Tensor, ...]:
    return result.values if isinstance(result, uo.Mirrored) else (result,)


def assert_same_bits(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(bits(result.detach().cpu()), bits(expected))


def bits(tensor: Tensor) -> Tensor:
    # A copy, since what has one element may count as contiguous with any strides.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@every("num_replicas", range(1, 10))
@every("op", uo.ReduceOp)
def test_an_all_reduce_gives_every_replica_the_tree_of_all(
    ops: Any, op: uo.ReduceOp, num_replicas: int
) -> None:
    tensors = values(num_replicas, torch.float32, (3, 4))
    value, expected = per_replica(tensors), tree_reduce(op, tensors)

    for _ in range(2):
        results = components(ops.reduce(op, value, value))

        assert len(results) == num_replicas
        for result in results:
            assert_same_bits(result, expected)


@every("dtype", FLOATS + INTEGERS + UNSIGNED + COMPLEX)
@every("num_replicas", [1, 2, 3, 6])
def test_a_batch_of_any_dtype_has_the_bits_of_single_reductions(
    ops: Any, dtype: torch.dtype, num_replicas: int
) -> None:
    tensors = [values(num_replicas, dtype, shape) for shape in SHAPES]
    batch = [per_replica(one) for one in tensors]
    for op in (SUM, MEAN) if dtype.is_complex else tuple(uo.ReduceOp):
        results = ops.batch_reduce(op, [(value, value) for value in batch])

        for result, one in zip(results, tensors, strict=True):
            expected = tree_reduce(op, one)
            assert components(result)[-1].dtype == result_dtype(op, dtype)
            for component in components(result):
                assert_same_bits(component, expected)


@every(
    ("destinations", "devices"),
    [
        ("cpu:1", ["cpu:1"]),
        ("/cpu:7", ["cpu:7"]),
        (torch.device("cpu"), ["cpu:0"]),
        (torch.zeros(2), ["cpu:0"]),
        (uo.PerReplica([0.0, 0.0], ["cpu:4", "cpu:1"]), ["cpu:4", "cpu:1"]),
        (uo.Mirrored([0.0, 0.0, 0.0], ["cpu:2", "cpu:0", "cpu:1"]), ["cpu:2", "cpu:0", "cpu:1"]),
        (uo.Mirrored([0.0], ["cpu:5"]), ["cpu:5"]),
        (uo.Mirrored([0.0, 0.0], ["cpu:0", "cpu:0"]), ["cpu:0", "cpu:0"]),
    ],
)
def test_results_are_on_the_destinations_in_their_order(
    ops: Any, destinations: Any, devices: list[str]
) -> None:
    value = per_replica([torch.tensor(10.0**i) for i in range(3)])
    asked = destination(destinations)
    expected = devices if asked is destinations else [at(device) for device in devices]

    for result in [ops.reduce(SUM, value, asked), ops.batch_reduce(SUM, [(value, asked)])[0]]:
        assert [float(component) for component in components(result)] == [111.0] * len(devices)
        types = [component.device.type for component in components(result)]
        assert types == [device.split(":")[0] for device in expected]
        if isinstance(result, uo.Mirrored):
            assert [str(device) for device in result.devices] == expected


def test_a_batch_may_mix_dtypes_layouts_and_destinations(ops: Any) -> None:
    dense = per_replica([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    whole = per_replica([torch.tensor(1, dtype=torch.int32), torch.tensor(2, dtype=torch.int32)])
    sparse = per_replica([torch.eye(2).to_sparse(), torch.eye(2).to_sparse()])

    results = ops.batch_reduce(
        SUM,
        iter([(dense, dense), (whole, at("cpu:1")), (sparse, sparse), (dense, at("cpu:3"))]),
    )

    assert [components(r)[0].to_dense().tolist() for r in results] == [
        [11.0, 22.0],
        3,
        [[2.0, 0.0], [0.0, 2.0]],
        [11.0, 22.0],
    ]


def test_an_empty_batch_gives_an_empty_list(ops: Any) -> None:
    assert ops.batch_reduce(SUM, []) == []


@every("op", [SUM, MEAN])
def test_sparse_values_are_put_end_to_end_in_replica_order(ops: Any, op: uo.ReduceOp) -> None:
    first = sparse_rows([1], [[1.0, 2.0]], 5)
    second = sparse_rows([1, 3], [[3.0, 4.0], [5.0, 6.0]], 5)
    value = per_replica([first, second])

    for result in components(ops.reduce(op, value, value)):
        count = 2 if op is MEAN else 1
        assert result._indices().tolist() == [[1, 1, 3]]
        assert (result._values() * count).tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_a_value_that_is_sparse_on_one_replica_only_becomes_dense(ops: Any) -> None:
    sparse = sparse_rows([1], [[1.0, 2.0]], 3)
    value = per_replica([sparse, torch.ones(3, 2)])

    result = components(ops.reduce(SUM, value, value))[1]

    assert result.tolist() == [[1.0, 1.0], [2.0, 3.0], [1.0, 1.0]]


@every(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.reshape(1, 4, 6, 1).to(memory_format=torch.channels_last),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: torch.complex(t, t)[:1, :1].conj().imag,
        lambda t: t.requires_grad_(),
    ],
)
def test_any_view_is_reduced_like_its_copy(ops: Any, view: Callable[[Tensor], Tensor]) -> None:
    tensors = [view(torch.randn(4, 6)) for _ in range(3)]
    value = per_replica(tensors)

    for result in components(ops.reduce(MEAN, value, value)):
        assert_same_bits(result, tree_reduce(MEAN, [t.detach().clone() for t in tensors]))
        assert not result.requires_grad


def test_inputs_are_untouched_and_results_share_no_memory(ops: Any) -> None:
    same = torch.ones(4)
    value = per_replica([same, same, same[:4]])

    results = components(ops.reduce(SUM, value, value))
    results[0].add_(100)

    assert [one.tolist() for one in value.values] == [[1.0] * 4] * 3
    assert [float(result[0]) for result in results] == [103.0, 3.0, 3.0]


def test_a_value_alone_on_its_device_is_copied(ops: Any) -> None:
    value = per_replica([torch.ones(3)])

    result = components(ops.reduce(MEAN, value, at("cpu:0")))[0]
    result.zero_()

    assert value.values[0].tolist() == [1.0, 1.0, 1.0]


@every("bytes_per_pack", [1, 8, 20, 1000])
def test_bytes_per_pack_never_changes_a_bit(ops: Any, bytes_per_pack: int) -> None:
    tensors = [values(3, torch.float32, shape) for shape in SHAPES]
    pairs = [(value, value) for value in map(per_replica, tensors)]
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)

    results = ops.batch_reduce(MEAN, pairs, options=options)

    for result, one in zip(results, tensors, strict=True):
        assert_same_bits(components(result)[2], tree_reduce(MEAN, one))


@every("destinations", ["cpu:1", uo.Mirrored([0, 0], ["cpu:0", "cpu:3"])])
def test_broadcast_copies_to_every_destination(ops: Any, destinations: Any) -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)

    for given in (tensor, tensor.detach().numpy(), [1.0, 2.0], uo.Mirrored([tensor, tensor])):
        for copy in components(ops.broadcast(given, destination(destinations))):
            assert copy.tolist() == [1.0, 2.0]
            assert not copy.requires_grad
            copy.zero_()
    assert tensor.tolist() == [1.0, 2.0]


@every(
    ("bad", "words"),
    [
        (
            [torch.ones(2), torch.ones(2), torch.ones(3)],
            r"replica 2 has \(3,\).*others have \(2,\)",
        ),
        ([torch.ones(()), torch.ones(1), torch.ones(1)], r"replica 0 has \(\).*have \(1,\)"),
        ([torch.ones(2), torch.ones(2).double(), torch.ones(2)], "replica 1 has torch.float64"),
        ([torch.ones(2, dtype=torch.bool)] * 3, "torch.bool"),
        ([None, 1.0, 2.0], "NoneType"),
        ([[1.0, [2.0]], 1.0, 1.0], "list"),
        ([], "holds no values"),
    ],
)
def test_values_that_do_not_go_together_are_refused_in_words(
    ops: Any, bad: list[Any], words: str
) -> None:
    good = per_replica([torch.ones(2)] * 3)

    with pytest.raises(ValueError, match=words):
        ops.reduce(SUM, per_replica(bad), at("cpu:0"))
    with pytest.raises(ValueError, match=words):
        ops.batch_reduce(SUM, [(good, good), (per_replica(bad), good)])


@every("destinations", [None, "", 3, torch.ones(1).numpy(), [], "gpu:99", "c:x"])
def test_what_names_no_device_is_refused(ops: Any, destinations: Any) -> None:
    with pytest.raises(ValueError, match=r"device|destinations|no cuda:99"):
        ops.reduce(SUM, torch.ones(1), destinations)


@every("op", ["average", None, uo.VariableAggregation.SUM, 0])
def test_what_is_no_operation_is_refused(ops: Any, op: Any) -> None:
    value = per_replica([torch.ones(1)])

    with pytest.raises(ValueError, match=r"must be one of ReduceOp\.SUM"):
        ops.reduce(op, value, value)
    with pytest.raises(ValueError, match=r"must be one of ReduceOp\.SUM"):
        ops.batch_reduce(op, [])


@every("pairs", [None, 3, [1], [[1.0, "cpu:0"]], [(1.0, "cpu:0", 2)]])
def test_what_is_no_batch_is_refused(ops: Any, pairs: Any) -> None:
    with pytest.raises(ValueError, match=r"\(value, destinations\) tuples"):
        ops.batch_reduce(SUM, pairs)
