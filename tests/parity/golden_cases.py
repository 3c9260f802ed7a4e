"""The questions put to TensorFlow, as plain data: one list of cases for each golden file."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Json = dict[str, Any]

SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (0,)]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
DTYPES = [*FLOATS, *INTEGERS, "complex64"]
NUM_PACKS = [0, 1, 2, 3, 8, 100]
OPS = ["SUM", "MEAN"]
NUM_SLOTS = 9

ITSELF: Json = {"kind": "itself"}
ONE_DEVICE: Json = {"class": "ReductionToOneDevice"}

# What TensorFlow gets wrong. A case with a fault also says what is right: an outcome, or
# "one_device", the answer of TensorFlow's own reduction to one device.
ODD_COUNT = "hierarchical copy drops the last replica of an odd number"
INTEGER_MEAN = "the mean of one replica of integers stays an integer"
EMPTY_BATCH = "an empty batch is an index error"
NO_BATCH = "what is no batch is a TypeError, where the page of batch_reduce says ValueError"
MIXED_DTYPES = "dtypes cannot share a batch once it is packed"
DEVICE_ORDER = "a value with the devices of the first in another order trips an assertion"
UNKNOWN_OP = "an unknown op is accepted"
NO_NCCL = "without NCCL kernels a batch fails, though a single value falls back"
RIGHT_IS_REFUSAL: Json = {"error": "ValueError"}


def hierarchical(num_packs: int) -> Json:
    return {"class": "HierarchicalCopyAllReduce", "num_packs": num_packs}


def at(*slots: int, kind: str = "mirrored") -> Json:
    return {"kind": kind, "slots": list(slots)}


def element(replica: int, position: int, dtype: str) -> Any:
    """A number that is exact in `dtype`, as are the sums: powers of two say which replica it is."""
    if dtype == "complex64":
        return [2**replica, position - replica]
    return 2**replica + (position / 2 if dtype in FLOATS else position)


def value(
    replicas: Sequence[Any],
    shape: Sequence[int] = (),
    *,
    dtype: str = "float32",
    slots: Sequence[int] | None = None,
    kind: str = "per_replica",
) -> Json:
    slots = range(len(replicas)) if slots is None else slots
    return {
        "kind": kind,
        "dtype": dtype,
        "shape": list(shape),
        "slots": list(slots),
        "replicas": list(replicas),
    }


def scalars(*numbers: Any, **options: Any) -> Json:
    return value([[number] for number in numbers], **options)


def dense(num_replicas: int, shape: Sequence[int], dtype: str = "float32") -> Json:
    positions = range(math.prod(shape))
    replicas = [[element(r, p, dtype) for p in positions] for r in range(num_replicas)]
    return value(replicas, shape, dtype=dtype)


def rows(indices: Sequence[int], *numbers: float) -> Json:
    """One replica's part of a sparse value: some rows of it."""
    return {"indices": list(indices), "values": list(numbers)}


def sparse(num_replicas: int, dtype: str = "float32") -> Json:
    """Replica r holds r rows of 5, some of which other replicas hold too; replica 0 holds none."""
    replicas = []
    for r in range(num_replicas):
        numbers = [element(r, position, dtype) for position in range(2 * r)]
        replicas.append(rows([(2 * r + i) % 5 for i in range(r)], *numbers))
    return value(replicas, (5, 2), dtype=dtype)


def case(
    name: str,
    implementation: Json,
    reduce_op: str,
    pairs: Sequence[tuple[Json, Json]],
    *,
    method: str = "batch_reduce",
    **more: Any,
) -> Json:
    listed = [{"value": v, "destinations": d} for v, d in pairs]
    question = {"name": name, "implementation": implementation, "method": method}
    return question | {"reduce_op": reduce_op, "pairs": listed} | more


def destinations(num_replicas: int) -> Iterator[tuple[str, Json]]:
    yield "all", ITSELF
    yield "one", at(num_replicas - 1, kind="device")
    yield "others", at(8, 7)


def integer_mean_of_one(reduce_op: str, dtype: str, num_replicas: int, into: str) -> Json:
    """The fault of the shortcut for a value that is already where it is wanted."""
    if reduce_op != "MEAN" or dtype not in INTEGERS or num_replicas > 1 or into == "others":
        return {}
    return {"fault": INTEGER_MEAN, "right": "one_device_elsewhere"}


def odd_or_exact(dtype: str) -> int:
    """A third of a complex number is not rounded alike everywhere; a half is exact."""
    return 2 if dtype == "complex64" else 3


def one_device_cases() -> Iterator[Json]:
    counted = [("float32", n) for n in range(1, NUM_SLOTS + 1)]
    typed = [(dtype, n) for dtype in DTYPES if dtype != "float32" for n in (1, odd_or_exact(dtype))]
    for (dtype, n), op in itertools.product([*counted, *typed], OPS):
        shapes = SHAPES if dtype == "float32" else [(2, 3), (0,)]
        for into, where in destinations(n):
            pairs = [(dense(n, shape, dtype), where) for shape in shapes]
            fault = integer_mean_of_one(op, dtype, n, into)
            yield case(f"{dtype}-{n}-{op}-{into}", ONE_DEVICE, op, pairs, **fault)


def hierarchical_cases() -> Iterator[Json]:
    yield from _hierarchical_counts()
    yield from _hierarchical_dtypes()
    for packs, op in itertools.product(NUM_PACKS, OPS):
        for into, where in list(destinations(4))[1:]:
            pairs = [(dense(4, shape), where) for shape in SHAPES]
            yield case(f"{into}-{op}-packs{packs}", hierarchical(packs), op, pairs)
    for n, op in itertools.product(range(1, NUM_SLOTS + 1), OPS):
        pairs = [(dense(n, (3,)), ITSELF)]
        yield case(f"single-{n}-{op}", hierarchical(1), op, pairs, method="reduce")


def _hierarchical_counts() -> Iterator[Json]:
    for n, packs, op in itertools.product(range(1, NUM_SLOTS + 1), NUM_PACKS, OPS):
        fault = {"fault": ODD_COUNT, "right": "one_device"} if n % 2 and n > 1 else {}
        pairs = [(dense(n, shape), ITSELF) for shape in [(3,), (), (0,)]]
        yield case(f"float32-{n}-{op}-packs{packs}", hierarchical(packs), op, pairs, **fault)


def _hierarchical_dtypes() -> Iterator[Json]:
    for dtype, n, packs, op in itertools.product(DTYPES, (1, 4), (0, 3), OPS):
        if dtype == "float32":
            continue
        pairs = [(dense(n, shape, dtype), ITSELF) for shape in [(2, 3), ()]]
        fault = integer_mean_of_one(op, dtype, n, "all")
        yield case(f"{dtype}-{n}-{op}-packs{packs}", hierarchical(packs), op, pairs, **fault)


def sparse_cases() -> Iterator[Json]:
    for n, op, (into, where) in itertools.product(range(1, 6), OPS, destinations(5)):
        pairs = [(sparse(n), where)]
        yield case(f"{n}-{op}-{into}", ONE_DEVICE, op, pairs, method="reduce")
    for dtype, op in itertools.product(["float16", "float64", "int32", "complex64"], OPS):
        part = sparse(odd_or_exact(dtype), dtype)
        yield case(f"{dtype}-{op}", ONE_DEVICE, op, [(part, ITSELF)])
    for packs, op, n in itertools.product([0, 1, 3], OPS, [2, 3, 4]):
        batch = [(sparse(n), ITSELF), (sparse(n), ITSELF)]
        yield case(f"batch-{n}-{op}-packs{packs}", hierarchical(packs), op, batch)
    for packs, op, n in itertools.product(NUM_PACKS, OPS, [2, 4]):
        mixed = [dense(n, (2, 3)), sparse(n), dense(n, ()), sparse(n), dense(n, (0,))]
        pairs = [(part, ITSELF) for part in mixed]
        yield case(f"mixed-{n}-{op}-packs{packs}", hierarchical(packs), op, pairs)
        if packs == 0:
            yield case(f"mixed-{n}-{op}-one_device", ONE_DEVICE, op, pairs)


def broadcast_cases() -> Iterator[Json]:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        tensor = dense(1, shape, dtype) | {"kind": "tensor"}
        name = f"{dtype}-{'x'.join(map(str, shape)) or 'scalar'}"
        yield case(name, ONE_DEVICE, "SUM", [(tensor, at(0, 2, 1))], method="broadcast")
    wheres = [at(*range(n)) for n in range(1, NUM_SLOTS + 1)] + [at(1, kind="device")]
    implementations = [ONE_DEVICE, hierarchical(1)]
    for where, made in itertools.product(wheres, implementations):
        tensor = dense(1, (3,)) | {"kind": "tensor"}
        slots = "_".join(map(str, where["slots"]))
        name = f"{made['class']}-to-{where['kind']}-{slots}"
        yield case(name, made, "SUM", [(tensor, where)], method="broadcast")


def packing_cases() -> Iterator[Json]:
    for elements, packs in itertools.product([0, 1, 7, 8, 10, 64], [1, 2, 3, 5, 8, 9, 20]):
        name = f"split-{elements}-{packs}"
        yield {"name": name, "method": "split", "elements": elements, "num_packs": packs}
    batches = [[128, 32, 800, 4], [8, 8, 8, 8], [400, 4, 4], [4] * 10, [1, 2, 4, 8, 16, 32], [0, 0]]
    for sizes, limit in itertools.product(batches, [0, 1, 4, 7, 8, 9, 16, 200, 10_000]):
        name = f"group-{'_'.join(map(str, sizes))}-by-{limit}"
        yield {"name": name, "method": "group", "sizes": sizes, "bytes_per_pack": limit}


def options_cases() -> Iterator[Json]:
    base = {"bytes_per_pack": 10, "timeout_seconds": 5.0, "implementation": "RING"}
    others: list[Json | None] = [
        None,
        {},
        {"bytes_per_pack": 20},
        {"timeout_seconds": 0.0},
        {"implementation": "AUTO"},
        {"implementation": "NCCL"},
        {"implementation": "nccl"},
        {"bytes_per_pack": 0, "timeout_seconds": 9.5, "implementation": "NCCL"},
    ]
    for first, other in itertools.product([base, {}], others):
        named = f"{'full' if first else 'default'}-{other}"
        yield {"name": named, "scenario": 47, "base": first, "other": other}
    wrong: list[Json] = [{"bytes_per_pack": -1}, {"implementation": "foo"}, {"implementation": 3}]
    for options in wrong:
        yield {"name": f"wrong-{options}", "scenario": 48, "base": options, "other": None}


def in_form(form: str, pairs: list[tuple[Any, Any]]) -> Any:
    """Returns the pairs of a batch in one of the forms that a caller may give."""
    forms: dict[str, Callable[[], Any]] = {
        "list": lambda: pairs,
        "generator": lambda: (pair for pair in pairs),
        "zip": lambda: zip(*zip(*pairs, strict=True), strict=True),
        "none": lambda: None,
        "lists": lambda: [list(pair) for pair in pairs],
        "triples": lambda: [(*pair, None) for pair in pairs],
    }
    return forms[form]()
