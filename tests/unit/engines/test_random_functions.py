"""Every function of torch that draws random numbers is known, also those of versions to come.

torch says of each of its operators whether it draws. A function that is new makes these tests fail:
add it to `unisono/engines/random_functions.py`, or here with the reason why it need not be there.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional, init
from torch.overrides import get_overridable_functions

from unisono.engines.random_functions import RANDOM

NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": functional,
    "torch._C._nn": torch._C._nn,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}

# Why a function that draws need not be known. Nor need private ones: torch itself calls them, from
# functions that are known.
EXCEPTIONS: dict[str, str] = {
    "torch.random": "a module",
    "torch.miopen_rnn": "of ROCm alone: `torch.lstm` and its like call it",
}
# Operators that draw, though their tag does not say so in every version.
ALSO_RANDOM = {"binomial", "_sample_dirichlet", "random_"}


def random_operators() -> set[str]:
    """The names of all operators of torch with the tag of those that draw."""
    found = set(ALSO_RANDOM)
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "aten":
            continue
        operator, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, operator)
        if torch.Tag.nondeterministic_seeded in getattr(packet, overload or "default").tags:
            found.add(operator)
    return found


OPERATORS = random_operators()


def test_torch_says_which_operators_draw() -> None:
    assert {"rand", "bernoulli_", "dropout", "lstm", "multinomial"} <= OPERATORS


def python_visible() -> Iterator[tuple[str, Callable[..., Any]]]:
    for where, namespace in NAMESPACES.items():
        for name in sorted(OPERATORS):
            function = getattr(namespace, name, None)
            if function is not None:
                yield f"{where}.{name}", function


def test_every_function_that_draws_is_known() -> None:
    unknown = [
        path
        for path, function in python_visible()
        if function not in RANDOM
        and path not in EXCEPTIONS
        and not path.rpartition(".")[2].startswith("_")
    ]

    assert unknown == [], (
        f"torch {torch.__version__} draws random numbers in {unknown}, of which a replica's mode "
        "does not know. All replicas would draw from one generator at the same time. Add them to "
        "`unisono/engines/random_functions.py`."
    )


RANDOM_NAMES = {function.__name__ for function in RANDOM}


def names_in(code: types.CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def draws_by_its_code(function: Any, seen: set[Any]) -> bool:
    """Whether a function of torch that is written in Python names a function that draws."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    if not function.__module__.startswith("torch"):
        return False
    seen.add(function)
    names = names_in(function.__code__)
    if not RANDOM_NAMES.isdisjoint(names):
        return True
    return any(draws_by_its_code(function.__globals__.get(name), seen) for name in names)


def test_every_python_function_that_draws_inside_is_known() -> None:
    """While such a function runs, a replica's mode does not see what it calls."""
    unknown = [
        f"{module.__name__}.{function.__name__}"
        for module, functions in get_overridable_functions().items()
        for function in functions
        if function not in RANDOM and draws_by_its_code(function, set())
    ]

    assert unknown == []


@pytest.mark.parametrize("function", [torch.lobpcg, torch.svd_lowrank, functional.gumbel_softmax])
def test_a_python_function_that_draws_inside_is_found(function: Callable[..., Any]) -> None:
    assert draws_by_its_code(function, set())
    assert not draws_by_its_code(functional.layer_norm, set())


@pytest.mark.parametrize("name", [name for name in dir(init) if name.endswith("_")])
def test_every_initializer_that_draws_is_known(name: str) -> None:
    function = getattr(init, name)
    takes_one = callable(function) and "generator" in inspect.signature(function).parameters

    assert not takes_one or name.startswith("_") or function in RANDOM
