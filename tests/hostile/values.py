"""Values that nobody should give to a function, and values that fit a parameter by its name."""

from __future__ import annotations

import decimal
import enum
import fractions
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

import unisono as uo


class HostileError(Exception):
    """What hostile objects raise: an error of the caller, which may come through."""


class RaisesWhenUsed:
    """Raises whenever Python looks at it, except to print it."""

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise HostileError("a hostile object was used")

    __eq__ = __bool__ = __iter__ = __len__ = __hash__ = __call__ = __getitem__ = _raise
    __float__ = __int__ = __index__ = __lt__ = __gt__ = __add__ = __contains__ = _raise


class RaisesWhenArray:
    """Says that it can be read as an array, and cannot."""

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise HostileError("a hostile array was read")


class Color(enum.Enum):
    RED = "sum"


class WholeNumber(int):
    """A subclass of int."""


def deep(depth: int) -> list[Any]:
    """Lists within lists."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def endless() -> list[Any]:
    """A list that holds itself."""
    inner: list[Any] = []
    inner.append(inner)
    return inner


def silently(make: Callable[[], Any]) -> Callable[[], Any]:
    """Makes something of which torch warns that it may change."""

    def made() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def fine(*args: Any, **kwargs: Any) -> None:
    """A function that takes anything."""


def failing(*args: Any, **kwargs: Any) -> NoReturn:
    raise HostileError("a hostile function was called")


_ROWS = [torch.ones(2), torch.ones(3)]

# Made for each call, because some are used up or changed.
HOSTILE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "3": lambda: 3,
    "10**30": lambda: 10**30,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-0.5": lambda: -0.5,
    "1j": lambda: 1j,
    "decimal": lambda: decimal.Decimal("1.5"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "subclass of int": lambda: WholeNumber(2),
    "empty text": lambda: "",
    "text": lambda: "x",
    "text with NUL": lambda: "cpu:\0",
    "long text": lambda: "cpu" * 10000,
    "bytes": lambda: b"x",
    "empty list": list,
    "empty tuple": lambda: (),
    "empty dict": dict,
    "list of None": lambda: [None],
    "list of texts": lambda: ["a", "b"],
    "pairs": lambda: [(1, 2), (3,)],
    "dict of numbers": lambda: {1: 2},
    "dict of None": lambda: {"worker": None},
    "set": lambda: {1, "a"},
    "deep list": lambda: deep(3000),
    "list that holds itself": endless,
    "generator": lambda: (i for i in range(3)),
    "object": object,
    "raises when used": RaisesWhenUsed,
    "raises when read as an array": RaisesWhenArray,
    "list of hostile objects": lambda: [RaisesWhenUsed()],
    "function": lambda: fine,
    "failing function": lambda: failing,
    "function without arguments": lambda: lambda: None,
    "type": lambda: int,
    "class of ours": lambda: uo.PerReplica,
    "enum of another kind": lambda: Color.RED,
    "exception": lambda: ValueError("no"),
    "path": lambda: pathlib.Path("/nowhere/\0"),
    "module": lambda: torch,
    "device that is not here": lambda: torch.device("cuda", 77),
    "device without memory": lambda: torch.device("meta"),
    "dtype": lambda: torch.float32,
    "scalar": lambda: torch.tensor(1.5),
    "empty tensor": lambda: torch.empty(0),
    "tensor of nan": lambda: torch.full((2,), float("nan")),
    "integers": lambda: torch.tensor([-5, 10**9]),
    "bools": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "float8": lambda: torch.ones(2).to(torch.float8_e5m2),
    "expanded": lambda: torch.ones(1).expand(4, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "with a gradient": lambda: torch.ones(2, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "without memory": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": silently(lambda: torch.eye(3).to_sparse_csr()),
    "nested": silently(lambda: torch.nested.nested_tensor(_ROWS)),
    "jagged": silently(lambda: torch.nested.nested_tensor(_ROWS, layout=torch.jagged)),
    "quantized": silently(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    "array of objects": lambda: np.array([None, "x"], dtype=object),
    "array of texts": lambda: np.array(["a", "b"]),
    "array of times": lambda: np.array(["2026-11-16"], dtype="datetime64[D]"),
    "array with a step": lambda: np.arange(6)[::-2],
    "no values": lambda: uo.PerReplica([]),
    "one value": lambda: uo.PerReplica([torch.ones(2)]),
    "three values": lambda: uo.PerReplica([torch.ones(2)] * 3),
    "different shapes": lambda: uo.PerReplica([torch.ones(2), torch.ones(3)]),
    "different dtypes": lambda: uo.PerReplica([torch.ones(2), torch.ones(2, dtype=torch.int32)]),
    "values of None": lambda: uo.PerReplica([None, None]),
    "values in values": lambda: uo.PerReplica([uo.PerReplica([1, 2]), uo.PerReplica([3, 4])]),
    "values in a list": lambda: [uo.PerReplica([1.0, 2.0]), {"a": uo.PerReplica([1, 2])}],
    "nested values": silently(lambda: uo.PerReplica([torch.nested.nested_tensor(_ROWS)] * 2)),
    "csr values": silently(lambda: uo.PerReplica([torch.eye(2).to_sparse_csr()] * 2)),
    "sparse values": lambda: uo.PerReplica([torch.eye(2).to_sparse()] * 2),
    "mirrored": lambda: uo.Mirrored([torch.ones(2), torch.ones(2)]),
    "mirrored without values": lambda: uo.Mirrored([]),
    "model": lambda: torch.nn.Linear(1, 1),
}


def _losses() -> uo.PerReplica:
    return uo.PerReplica([torch.ones(2, 3), torch.ones(2, 3)])


# What fits a parameter of this name, so that a call gets past the checks of its other arguments.
FITTING: dict[str, Callable[[], Any]] = {
    "aggregation": lambda: uo.VariableAggregation.SUM,
    "args": lambda: (),
    "axis": lambda: 0,
    "cluster": lambda: {"worker": ["localhost:1234"]},
    "cluster_spec": dict,
    "colocate_with": lambda: uo.MirroredStrategy(["cpu:0", "cpu:1"]).extended.worker_devices,
    "context": lambda: uo.InputContext(),
    "dataset": lambda: [torch.ones(4, 2), torch.ones(3, 2)],
    "dataset_fn": lambda: lambda *_: [torch.ones(4, 2)],
    "cross_device_ops": lambda: uo.ReductionToOneDevice(),
    "destinations": lambda: "cpu:0",
    "device": lambda: "cpu:0",
    "devices": lambda: ["cpu:0", "cpu:1"],
    "distribution": lambda: uo.MirroredStrategy(["cpu:0", "cpu:1"]),
    "environ": dict,
    "fn": lambda: fine,
    "global_batch_size": lambda: 4,
    "hook": lambda: fine,
    "index": lambda: 0,
    "indices": lambda: [0],
    "initial_value": lambda: torch.ones(2, 3),
    "input_fn": lambda: lambda context: [torch.ones(4, 2)],
    "iterator": lambda: iter([]),
    "loss_fn": lambda: fine,
    "optimizer": lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
    "job_name": lambda: "worker",
    "kwargs": dict,
    "merge_fn": lambda: fine,
    "name": lambda: "name",
    "num_replicas_in_sync": lambda: 2,
    "numpy_input": lambda: np.ones((4, 2)),
    "options": lambda: None,
    "per_device_value": _losses,
    "per_replica_value": _losses,
    "reduce_op": lambda: uo.ReduceOp.SUM,
    "replica_id": lambda: 0,
    "source": lambda: [torch.ones(4, 2)],
    "spec": lambda: "cpu:0",
    "state": dict,
    "target": lambda: torch.nn.Linear(1, 1),
    "task_index": lambda: 0,
    "tensor": lambda: torch.ones(2, 3),
    "type": lambda: "cpu",
    "updates": lambda: torch.ones(1, 3),
    "value": _losses,
    "value_destination_pairs": lambda: [(_losses(), "cpu:0")],
    "value_fn": lambda: lambda context: 1.0,
    "values": lambda: [torch.ones(2), torch.ones(2)],
    "var": lambda: uo.Variable(torch.ones(2)),
    "v": lambda: uo.Variable(torch.ones(2)),
    "workers": list,
}
