"""What holds for any batch, packed in any way, on any number of replicas and any memories."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import unisono as uo
from unisono.algorithms import make_plan, one_device, run, two_level
from unisono.experimental import CommunicationOptions
from unisono.kernels import tree_reduce
from unisono.packing import BytesPerPack, NoPacking, NumPacks, PackingRule, SmallGroups, Spec

# The fixtures set a stage that is the same for every example.
same_stage = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

DTYPES = [torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.complex64]
SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN
# Rounding of the sum of up to nine numbers, and of the result, in units of the largest term.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-14,
    torch.bfloat16: 2**-7,
    torch.complex64: 1e-5,
    torch.int32: 0,
}

shapes = st.lists(st.integers(0, 5), max_size=4).filter(lambda shape: product(shape) <= 50)
specs = st.builds(Spec, shapes.map(torch.Size), st.sampled_from(DTYPES))
rules = st.one_of(
    st.builds(NumPacks, st.integers(1, 9)),
    st.just(NoPacking()),
    st.builds(SmallGroups, st.integers(1, 80), st.integers(1, 4)),
)


class Batch(NamedTuple):
    """One tensor per replica for each item; `are_whole` if all are small whole numbers."""

    items: list[list[Tensor]]
    are_whole: bool


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_replicas = draw(st.integers(1, 9))
    drawn = draw(st.lists(specs, max_size=5))
    are_whole = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return Batch(
        [[filled(spec, generator, are_whole) for _ in range(num_replicas)] for spec in drawn],
        are_whole,
    )


@st.composite
def all_ops(draw: st.DrawFn) -> uo.CrossDeviceOps:
    make = draw(st.sampled_from([uo.HierarchicalCopyAllReduce, uo.NcclAllReduce]))
    packed = make(draw(rules))
    return draw(st.sampled_from([packed, uo.ReductionToOneDevice()]))


options = st.builds(CommunicationOptions, bytes_per_pack=st.integers(0, 200))


def any_batch(further: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Calls a test with batches, operations, and `further` values, on stages of all kinds."""
    on_all_stages = pytest.mark.usefixtures("path", "memories")
    examples = given(batches(), all_ops(), st.sampled_from([SUM, MEAN]), further)
    return lambda test: on_all_stages(same_stage(examples(test)))


@any_batch(options)
def test_a_result_has_the_bits_of_the_tree_on_every_replica(
    batch: Batch, ops: uo.CrossDeviceOps, op: uo.ReduceOp, options: CommunicationOptions
) -> None:
    results = all_reduced(batch, ops, op, options)

    for item, result in zip(batch.items, results, strict=True):
        expected = tree_reduce(op, item)
        assert len(result) == len(item)
        for part in result:
            assert_same_bits(part, expected)


@any_batch(options)
def test_a_result_is_that_of_double_precision(
    batch: Batch, ops: uo.CrossDeviceOps, op: uo.ReduceOp, options: CommunicationOptions
) -> None:
    results = all_reduced(batch, ops, op, options)

    for item, result in zip(batch.items, results, strict=True):
        reference = torch.stack([tensor.to(torch.complex128) for tensor in item]).sum(0)
        if op is MEAN:
            reference /= len(item)
        is_exact = op is SUM and (batch.are_whole or item[0].dtype == torch.int32)
        largest = max(
            (tensor.abs().double().max().item() for tensor in item if tensor.numel()), default=0
        )
        allowed = 0 if is_exact else (TOLERANCE[item[0].dtype] + 1e-15) * largest * len(item)
        error = (result[-1].to(torch.complex128) - reference).abs()
        assert error.numel() == 0 or error.max().item() <= allowed


@any_batch(options)
def test_what_is_given_is_left_alone_and_results_share_no_memory(
    batch: Batch, ops: uo.CrossDeviceOps, op: uo.ReduceOp, options: CommunicationOptions
) -> None:
    before = [[tensor.clone() for tensor in item] for item in batch.items]

    results = all_reduced(batch, ops, op, options)
    for result in results:
        for part in result:
            part.fill_(77)

    for item, copies in zip(batch.items, before, strict=True):
        for tensor, copy in zip(item, copies, strict=True):
            assert_same_bits(tensor, copy)
    held = [tensor for tensors in (*results, *batch.items) for tensor in tensors]
    memories = [tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()]
    assert len(set(memories)) == len(memories)


@any_batch(st.randoms(use_true_random=False))
def test_destinations_of_any_kind_get_the_same_bits(
    batch: Batch, ops: uo.CrossDeviceOps, op: uo.ReduceOp, random: Any
) -> None:
    for item in batch.items:
        slots = random.sample(range(12), random.randint(2, 9))
        where = uo.Mirrored([0] * len(slots), devices=[f"/cpu:{slot}" for slot in slots])

        result: Any = ops.reduce(op, uo.PerReplica(item), where)

        assert [device.index for device in result.devices] == slots
        for part in result.values:
            assert_same_bits(part, tree_reduce(op, item))


@pytest.mark.usefixtures("path")
@same_stage
@given(
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.sampled_from([SUM, MEAN, uo.ReduceOp.PROD]),
    st.randoms(use_true_random=False),
)
def test_any_groups_on_any_memories_have_the_bits_of_the_tree(
    num_replicas: int, dtype: torch.dtype, op: uo.ReduceOp, random: Any
) -> None:
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    spec = Spec(torch.Size((7,)), dtype)
    tensors = [filled(spec, generator, are_whole=False) for _ in range(num_replicas)]
    everywhere = tuple(range(num_replicas))
    memories = tuple(random.randrange(num_replicas) for _ in everywhere)
    groups: dict[int, list[int]] = {}
    for place in random.sample(everywhere, num_replicas):
        groups.setdefault(random.randrange(num_replicas), []).append(place)

    for schedule in (
        two_level(list(groups.values()), turn=random.randrange(9)),
        one_device(num_replicas, root=random.choice(everywhere), destinations=everywhere),
    ):
        plan = make_plan(schedule, num_replicas, memories, everywhere)
        (held,) = run(plan, op, [tensors], [torch.device("cpu")] * num_replicas)
        for part in held:
            assert_same_bits(part, tree_reduce(op, tensors))


@same_stage
@given(st.lists(specs, min_size=1, max_size=8), rules | st.builds(BytesPerPack, st.integers(0, 99)))
def test_what_is_packed_is_unpacked(drawn: list[Spec], rule: PackingRule) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [filled(spec, generator, are_whole=False) for spec in drawn]
    layout = rule.layout(drawn)

    unpacked = layout.unpack(layout.pack(tensors))

    for found, tensor in zip(unpacked, tensors, strict=True):
        assert_same_bits(found, tensor)


def product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def filled(spec: Spec, generator: torch.Generator, are_whole: bool) -> Tensor:
    """Small whole numbers, or numbers of very different size."""
    shape = (*spec.shape, 2)
    whole = torch.randint(-10, 11, shape, generator=generator).double()
    if not are_whole:
        scale = 10.0 ** torch.randint(-3, 4, shape, generator=generator)
        whole = torch.randn(shape, dtype=torch.float64, generator=generator) * scale
    if spec.dtype.is_complex:
        return torch.view_as_complex(whole).to(spec.dtype)
    return whole[..., 0].to(spec.dtype)


def all_reduced(
    batch: Batch, ops: uo.CrossDeviceOps, op: uo.ReduceOp, options: CommunicationOptions
) -> list[tuple[Tensor, ...]]:
    values = [uo.PerReplica(item) for item in batch.items]
    results = ops.batch_reduce(op, [(value, value) for value in values], options)
    return [r.values if isinstance(r, uo.Mirrored) else (r,) for r in results]


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert as_bytes(found).equal(as_bytes(expected))


def as_bytes(tensor: Tensor) -> Tensor:
    # A clone, because a tensor of one element may count as contiguous with any stride.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
