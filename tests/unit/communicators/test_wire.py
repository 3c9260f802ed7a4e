"""What workers can send to each other, and that nothing they receive runs code."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import math
import random
import re
import subprocess
from collections import OrderedDict, UserDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from thread_ranks import make_threads
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import unisono
from unisono.communicators.wire import read, share_state, write
from unisono.errors import CommunicationError, UnsupportedError
from unisono.input.source.random_state import random_state, set_random_state


class Named(NamedTuple):
    x: Any
    y: Any = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any

    def __post_init__(self) -> None:
        raise AssertionError("only the program that made it runs this")


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: int


class Listed(list[Any]):
    pass


class Mapped(UserDict[str, Any]):
    pass


class Color(enum.Enum):
    RED = 1


class Evil:
    def __reduce__(self) -> Any:
        return subprocess.run, (["true"],)


class Noisy(dict[str, Any]):
    def __del__(self) -> None:
        pass


def sent(thing: Any) -> Any:
    """What arrives elsewhere."""
    return read(*write(thing))


def frozen(x: Any) -> Frozen:
    made = object.__new__(Frozen)
    object.__setattr__(made, "x", x)
    return made


@pytest.mark.parametrize(
    "thing",
    [
        None,
        True,
        -(2**200),
        1.5e-300,
        math.inf,
        "é\0",
        b"\0\xff",
        1 + 2j,
        [1, (2, [3]), {"a": {4: None}}],
        {(1, "a"): {2, 3}, frozenset([1]): deque([1, 2])},
        torch.Size([2, 3]),
        OrderedDict(b=1, a=2),
        defaultdict(list, a=[1]),
        Named([1], "y"),
        frozen({"a": 1}),
        Slotted(3),
        Listed([1, 2]),
        Mapped(a=1),
        Color.RED,
        int,
        np.float32(1.5),
        np.int64(-3),
    ],
    ids=repr,
)
def test_values_arrive_as_they_were_sent(thing: Any) -> None:
    found = sent(thing)
    assert type(found) is type(thing)
    assert found == thing
    if isinstance(thing, defaultdict):
        assert found.default_factory is list


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint16).reshape(2, 3).T,
        np.array(2.5),
        np.zeros((0, 3), np.complex64),
        np.array([["a", "bc"]]),
        np.array([1, "a", None], dtype=object),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_arrive_as_they_were_sent(array: np.ndarray[Any, Any]) -> None:
    found = sent({"x": array})["x"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


def test_tensors_arrive_where_they_were() -> None:
    tensors = [torch.ones(2, dtype=torch.bfloat16), torch.tensor(3), torch.eye(2).to_sparse()]
    first, second, third = sent(Named(tuple(tensors))).x
    assert torch.equal(first, tensors[0])
    assert torch.equal(second, tensors[1])
    assert torch.equal(third.to_dense(), torch.eye(2))


def test_a_packed_sequence_arrives() -> None:
    packed = pack_sequence([torch.ones(3), torch.zeros(2)])
    found = sent(packed)
    assert isinstance(found, PackedSequence)
    for one, other in zip(found, packed, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert torch.equal(one, other)
        else:
            assert one is other


def test_a_random_state_arrives() -> None:
    generator = torch.Generator().manual_seed(3)
    before = sent(random_state([generator]))
    expected = (
        torch.rand(2),
        random.random(),
        np.random.rand(),
        torch.rand(1, generator=generator),
    )
    set_random_state(before, [generator])
    again = (torch.rand(2), random.random(), np.random.rand(), torch.rand(1, generator=generator))
    assert [torch.as_tensor(one).tolist() for one in expected] == [
        torch.as_tensor(one).tolist() for one in again
    ]


@pytest.mark.parametrize(
    "thing",
    [Evil(), lambda: 1, io.StringIO(), Noisy(), random, torch.nn.Linear(1, 1)],
    ids=lambda thing: type(thing).__name__,
)
def test_what_could_run_code_is_not_sent(thing: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot be sent to other workers"):
        sent([thing])


@pytest.mark.parametrize(
    "written",
    [
        ["type", "subprocess", "run"],
        ["type", "os", "system"],
        ["type", "no.such.module", "Thing"],
        ["record", "subprocess", "Popen", ["list", []], ["dict", [["args", "true"]]]],
        ["record", "tempfile", "_TemporaryFileCloser", ["list", []], ["dict", []]],
        ["record", __name__, "Noisy", ["list", []], ["dict", []]],
        ["_init__", []],
        ["_class", "subprocess", "run"],
        ["read_dict", []],
    ],
)
def test_what_a_stranger_writes_runs_nothing(written: Any) -> None:
    with pytest.raises((UnsupportedError, KeyError)):
        read(json.dumps([written, []]), torch.empty(0))


def test_nothing_in_the_package_reads_pickles() -> None:
    wanted = re.compile(
        r"import pickle|pickle\.load|torch\.load\(\w+\)|(gather|broadcast)_object\b"
    )
    root = Path(unisono.__file__).parent
    found = [path for path in root.rglob("*.py") if wanted.search(path.read_text())]
    assert found == []


def shared(states: list[Any], root: int) -> list[Any]:
    def share(communicator: Any) -> Any:
        try:
            return share_state(communicator, states[communicator.rank], root)
        except (UnsupportedError, CommunicationError) as error:
            return type(error), str(error)

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(share, make_threads(len(states))))


def test_state_arrives_with_the_same_bits() -> None:
    values = torch.tensor([0.1, math.nan, -0.0, math.inf])
    state = {
        "model": {"w": values, "half": values.to(torch.bfloat16), "mask": values > 0},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 1e-3}]},
        "empty": torch.empty(0, 3),
        "other": (1, -0.0, math.inf, None, True, "é", b"\0\xff", [], {(1, "a"): ()}),
        "view": torch.arange(6).view(2, 3).t(),
    }
    root, one, other = shared([None, state, 5], root=1)[1], *shared([None, state, 5], 1)[::2]
    assert root is state
    for copy in (one, other):
        assert copy["other"] == state["other"]
        assert math.copysign(1, copy["other"][1]) == -1
        assert copy["optimizer"]["groups"] == [{"lr": 1e-3}]
        assert copy["optimizer"]["state"][0]["step"].shape == ()
        assert torch.equal(copy["view"], state["view"])
        assert copy["empty"].shape == (0, 3)
        for name, tensor in state["model"].items():
            found = copy["model"][name]
            assert found.dtype == tensor.dtype
            assert bytes(found.view(torch.uint8).tolist()) == bytes(
                tensor.view(torch.uint8).tolist()
            )


@pytest.mark.parametrize("wrong", [{"a": [object()]}, {"a": [torch.eye(2, device="meta")]}])
def test_what_cannot_be_sent_is_named_on_all_ranks(wrong: Any) -> None:
    first, second = shared([wrong, None], root=0)
    assert first[0] is UnsupportedError
    assert second[0] is CommunicationError
    assert "state['a'][0]" in first[1]
    assert "state['a'][0]" in second[1]
