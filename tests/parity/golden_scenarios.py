"""The numbered scenarios of the behavior study, one or more cases each, as plain data."""

import itertools
from collections.abc import Iterator
from typing import Any

from golden_cases import (
    DEVICE_ORDER,
    EMPTY_BATCH,
    INTEGER_MEAN,
    ITSELF,
    MIXED_DTYPES,
    NO_BATCH,
    NO_NCCL,
    NUM_PACKS,
    ODD_COUNT,
    ONE_DEVICE,
    OPS,
    RIGHT_IS_REFUSAL,
    UNKNOWN_OP,
    Json,
    at,
    case,
    hierarchical,
    rows,
    scalars,
    value,
)

NCCL: Json = {"class": "NcclAllReduce", "num_packs": 1}


def one(
    scenario: int,
    value_: Json,
    destinations: Json = ITSELF,
    op: str = "SUM",
    made: Json = ONE_DEVICE,
    **more: Any,
) -> Json:
    """A case of `reduce`."""
    arguments: Json = {"method": "reduce", "scenario": scenario, **more}
    return case("", made, op, [(value_, destinations)], **arguments)


def batch(scenario: int, made: Json, op: str, *pairs: tuple[Json, Json], **more: Any) -> Json:
    return case("", made, op, pairs, scenario=scenario, **more)


def scenario_cases() -> Iterator[Json]:
    """All of them, in order, named after their number."""
    parts = [_values(), _refusals(), _dtypes(), _sparse(), _all_reduce(), _batches(), _shortcut()]
    found = sorted(itertools.chain(*parts), key=lambda entry: int(entry["scenario"]))
    for number, group in itertools.groupby(found, key=lambda entry: entry["scenario"]):
        for letter, entry in zip("abcdefghijklmnopqrstuvwxyz", group, strict=False):
            yield entry | {"name": f"{number}{letter}"}


def _values() -> Iterator[Json]:
    pair = scalars(1, 2)
    yield one(1, pair)
    yield one(2, pair, op="MEAN")
    yield one(3, pair, at(0, kind="device"))
    yield one(4, pair, at(2, kind="tensor"))
    yield one(5, pair, at(4, kind="variable"))
    for n, op in itertools.product([2, 3, 5, 9], OPS):
        yield one(6, scalars(*range(n)), op=op)
        yield one(7, scalars(*range(1, n + 1)), op=op)
    wheres = [at(0, 1), at(1), at(0, kind="device")]
    for first, second in itertools.product(wheres, wheres):
        pairs = [(scalars(0, 1), first), (scalars(1, 2), second)]
        yield batch(8, ONE_DEVICE, "MEAN", *pairs)
    for where in [at(0, 1, kind="per_replica"), at(1, kind="device")]:
        yield one(9, scalars(1, kind="tensor"), where, method="broadcast")
    for op in OPS:
        yield one(11, scalars(5, slots=[1], kind="tensor"), at(2, kind="device"), op)
    yield one(12, value([[1, 2]], (2,), kind="list"), at(0, kind="device"))
    yield one(15, scalars(3, 3, kind="mirrored"))
    for op in OPS:
        largest = ONE_DEVICE | {"accumulation_fn": "max"}
        yield one(21, scalars(1, 5, 3), op=op, made=largest)
    yield one(22, pair, at(0, kind="device"), made=ONE_DEVICE | {"reduce_to_device": 5})
    yield one(22, pair, made=ONE_DEVICE | {"reduce_to_device": 5})
    yield one(27, scalars(1, 1, kind="mirrored_variable"), op="MEAN")


def _refusals() -> Iterator[Json]:
    for raw in (["/cpu:0", "/cpu:1"], None, ""):
        yield one(10, scalars(1, 2), {"kind": "raw", "raw": raw})
    yield one(13, scalars(), at(0, kind="device"))
    yield one(14, scalars(1, 2), op="bogus")
    wrong: Json = {"fault": UNKNOWN_OP, "right": RIGHT_IS_REFUSAL}
    yield one(14, scalars(7, slots=[2]), at(2, kind="device"), "bogus", **wrong)
    yield batch(14, hierarchical(1), "bogus", (scalars(1, 2), ITSELF), **wrong)
    yield one(19, scalars(1, 0, dtype="bool"))
    yield one(20, value([[1, 2], [1]]) | {"shapes": [[2], [1]]})
    yield one(20, value([[1], [1]]) | {"shapes": [[], [1]]})
    for made in (hierarchical(-1), NCCL | {"num_packs": -1}):
        yield one(35, scalars(1, 2), made=made)
    yield one(36, scalars(1, 2), made=NCCL)
    missing: Json = {"fault": NO_NCCL, "right": "one_device"}
    yield batch(36, NCCL, "SUM", (scalars(1, 2), ITSELF), **missing)
    for made in (ONE_DEVICE, hierarchical(1)):
        yield batch(38, made, "SUM", fault=EMPTY_BATCH, right={"results": []})
    none: Json = {"form": "none", "fault": NO_BATCH, "right": RIGHT_IS_REFUSAL}
    yield batch(38, ONE_DEVICE, "SUM", **none)
    for form in ("lists", "triples"):
        yield batch(38, ONE_DEVICE, "SUM", (scalars(1, 2), ITSELF), form=form)


def _dtypes() -> Iterator[Json]:
    yield one(16, scalars(1, 2, dtype="int32"), op="MEAN")
    yield one(17, scalars(1, 2, dtype="int8"), op="MEAN")
    yield one(18, scalars([1, 1], [2, 0], dtype="complex64"), op="MEAN")


def _sparse() -> Iterator[Json]:
    first, second = rows([1], 1, 2), rows([1, 3], 3, 4, 5, 6)
    for made in (ONE_DEVICE, hierarchical(1)):
        yield one(23, value([first, second], (5, 2)), made=made)
        yield one(24, value([first, second], (5, 2)), op="MEAN", made=made)
    yield one(25, value([first, [1] * 10], (5, 2)))
    pair, where = scalars(1, 2), ITSELF
    mixed = [(pair, where), (value([first, second], (5, 2)), where), (scalars(3, 4), where)]
    for packs in (0, 1, 2):
        yield batch(33, hierarchical(packs), "SUM", *mixed)


def _all_reduce() -> Iterator[Json]:
    three = [
        scalars(1, 2),
        value([[1, 2, 3], [4, 5, 6]], (3,)),
        value([[1, 1, 2, 2], [3, 3, 4, 4]], (2, 2)),
    ]
    for packs in [*NUM_PACKS, 4]:
        yield batch(28, hierarchical(packs), "SUM", *[(v, ITSELF) for v in three])
    eight = scalars(*[2**i for i in range(8)])
    yield batch(29, hierarchical(0), "SUM", *[(eight, ITSELF)] * 8)
    for n in (4, 6):
        yield batch(30, hierarchical(1), "SUM", (scalars(*[2**i for i in range(n)]), ITSELF))
    odd: Json = {"fault": ODD_COUNT, "right": "one_device"}
    for n in (3, 5, 7):
        powers = scalars(*[2**i for i in range(n)])
        yield batch(31, hierarchical(1), "SUM", (powers, ITSELF), **odd)


def _batches() -> Iterator[Json]:
    pair, double = scalars(1, 2), scalars(1, 2, dtype="float64")
    mixed: Json = {"fault": MIXED_DTYPES, "right": "one_device"}
    yield batch(34, hierarchical(0), "SUM", (pair, ITSELF), (double, ITSELF))
    yield batch(34, hierarchical(1), "SUM", (pair, ITSELF), (double, ITSELF), **mixed)
    for made in (ONE_DEVICE, hierarchical(1)):
        yield batch(37, made, "SUM", (pair, at(3, kind="device")), (scalars(3, 4), at(5, 2)))
        for form in ("generator", "zip"):
            yield batch(39, made, "SUM", (pair, ITSELF), (scalars(3, 4), ITSELF), form=form)
        tensors = [(scalars(number, kind="tensor"), ITSELF) for number in (1, 2)]
        yield batch(40, made, "SUM", *tensors)
    turned = scalars(1, 2, slots=[1, 0])
    order: Json = {"fault": DEVICE_ORDER, "right": "one_device"}
    yield batch(37, hierarchical(1), "SUM", (pair, ITSELF), (turned, ITSELF), **order)


def _shortcut() -> Iterator[Json]:
    single = scalars(3, dtype="int32", slots=[2])
    right: Json = {"fault": INTEGER_MEAN, "right": "one_device_elsewhere"}
    yield one(16, single, op="MEAN", **right)
    yield one(16, single, at(1, kind="device"), "MEAN")
