"""Private names of torch that several packages use.

Every other private name is in the one module that needs it. `tests/test_torch_private.py` checks
both, and that torch still has all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

pytree = _pytree
without_dispatch_modes = _disable_current_modes

# What C++ gives to Python.
bindings: Any = torch._C
# `tensor.data`, which also sets it.
data_of_tensors: Any = torch._C.TensorBase.data
no_torch_function = torch._C.DisableTorchFunction
no_torch_function_of_subclasses = torch._C.DisableTorchFunctionSubclass
num_dispatch_modes = torch._C._len_torch_dispatch_stack
num_function_modes = torch._C._len_torch_function_stack
set_grad_enabled = torch._C._set_grad_enabled
with_dispatch_keys: Any = torch._C._ForceDispatchKeyGuard
without_dispatch_keys: Any = torch._C._ExcludeDispatchKeyGuard
dispatch_key: Any = torch._C._parse_dispatch_key
# Whether an operator has its own kernel for a dispatch key.
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
copy_each: Any = torch._foreach_copy_
# Puts tensors of one dtype end to end, and the views of the result that have their shapes.
flatten_each: Any = torch._C._nn.flatten_dense_tensors
views_like: Any = torch._C._nn.unflatten_dense_tensors


def dispatch_keys() -> tuple[Any, Any]:
    """Returns what this thread adds to and takes from the keys by which torch finds a kernel."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def key_set(first: str, *others: str) -> Any:
    """Returns a set of dispatch keys."""
    keys: Any = torch._C.DispatchKeySet(dispatch_key(first))
    for name in others:
        keys = keys.add(dispatch_key(name))
    return keys


def raw_stream(gpu: int) -> int:
    """Returns the address of the current stream of a GPU."""
    return torch._C._cuda_getCurrentRawStream(gpu)  # a build for CPUs lacks it
