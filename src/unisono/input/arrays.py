"""NumPy arrays as a dataset of their rows."""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

from unisono.errors import UnsupportedError
from unisono.input.splits.layout import is_column
from unisono.kernels import check_layout
from unisono.values import as_tensor, take_apart


class ArrayDataset(TensorDataset):
    """The rows of a nested structure of arrays. The arrays are shared, not copied."""

    def __init__(self, arrays: Any) -> None:
        self._tree, leaves = take_apart(arrays, is_column)
        tensors = [as_tensor(leaf) for leaf in leaves]
        for tensor in tensors:
            check_layout(tensor, "An array of a dataset")
        sizes = {
            path or "the array": len(tensor) if tensor.dim() else "no rows"
            for path, tensor in zip(self._tree.paths, tensors, strict=True)
        }
        if len(set(sizes.values())) != 1 or "no rows" in sizes.values():
            listed = ", ".join(f"{path} has {size}" for path, size in sizes.items()) or "nothing"
            raise UnsupportedError(
                f"All arrays of a dataset must have the same number of rows, got: {listed}. Cut or "
                "pad them."
            )
        super().__init__(*tensors)

    def __getitem__(self, index: Any) -> Any:
        return self._tree.build([tensor[index] for tensor in self.tensors])


def numpy_dataset(arrays: Any) -> ArrayDataset:
    """Makes a dataset of the rows of an array, or of a tuple, list or dict of arrays.

    >>> numpy_dataset({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})[1]
    {'x': tensor([3., 4.]), 'y': tensor(1)}
    """
    return ArrayDataset(arrays)
