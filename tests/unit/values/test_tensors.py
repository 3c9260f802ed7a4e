import warnings
from typing import Any

import numpy as np
import pytest
import torch

from unisono.errors import ReplicaMismatchError
from unisono.values import as_tensor


class WithDlpack:
    """An array of another library, which speaks DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class WithArray:
    """An array of another library, which speaks NumPy and nothing else."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array([1.0, 10.0, 100.0], dtype=dtype)


def test_a_tensor_is_itself() -> None:
    tensor = torch.ones(2, requires_grad=True)

    assert as_tensor(tensor) is tensor


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int64", "uint16", "complex64"])
def test_an_array_is_shared(dtype: str) -> None:
    array = np.zeros(3, dtype)

    tensor = as_tensor(array)
    array[:] = [1, 10, 100]

    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.tolist() == [1, 10, 100]


def test_a_strided_array_is_shared() -> None:
    array = np.zeros((2, 4))

    tensor = as_tensor(array[:, ::2])
    array[1, 2] = 7

    assert tensor.tolist() == [[0, 0], [0, 7]]


def test_a_read_only_array_is_copied_without_a_warning() -> None:
    array = np.zeros(3)
    view = array[:]
    view.flags.writeable = False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = as_tensor(view)
    tensor[:] = 7

    assert array.tolist() == [0, 0, 0]


def test_what_speaks_dlpack_is_shared() -> None:
    owner = torch.zeros(3)

    tensor = as_tensor(WithDlpack(owner))
    owner.fill_(7)

    assert tensor.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(WithArray(), id="__array__"),
        pytest.param(np.array([100.0, 10.0, 1.0])[::-1], id="negative stride"),
        pytest.param(np.array([1.0, 10.0, 100.0], ">f8"), id="other byte order"),
        pytest.param(
            np.array([(0, 1), (0, 10), (0, 100)], [("a", "i1"), ("b", "f8")])["b"],
            id="field of a record",
        ),
    ],
)
def test_an_array_that_torch_cannot_view_is_copied(array: Any) -> None:
    assert as_tensor(array).tolist() == [1, 10, 100]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3, torch.int64),
        (3.0, torch.float32),
        (3j, torch.complex64),
        ([3.0], torch.float32),
        (((3,), (4,)), torch.int64),
        (np.float64(3), torch.float64),
        (np.array(3, "int16"), torch.int16),
    ],
    ids=repr,
)
def test_numbers_and_lists_of_numbers_are_read(value: Any, dtype: torch.dtype) -> None:
    tensor = as_tensor(value)

    assert tensor.dtype == dtype
    assert tensor.tolist() == torch.tensor(value).tolist()


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (2, 0, 3)], ids=str)
def test_an_array_of_any_shape_is_read(shape: tuple[int, ...]) -> None:
    assert as_tensor(np.zeros(shape)).shape == shape


@pytest.mark.parametrize(
    "wrong", [None, "3", [[1, 2], [3]], {1: 2}, object(), 2**70, np.array(["a"])], ids=type
)
def test_what_is_no_tensor_is_refused_and_shown(wrong: Any) -> None:
    with pytest.raises(ReplicaMismatchError, match=f"of type {type(wrong).__name__} as a tensor"):
        as_tensor(wrong)
