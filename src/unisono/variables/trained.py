"""Variables that are trained: their gradients are reduced, and optimizers take them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from unisono.errors import UnsupportedError
from unisono.sharing import computed_once
from unisono.variables.leaves import Leaves
from unisono.variables.policy import HasPolicy

if TYPE_CHECKING:
    from unisono.variables.variable import Variable

_variables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember(variable: Variable) -> None:
    """Registers the components of a variable."""
    for component in variable.values:
        _variables[component] = weakref.ref(variable)


def variable_of(component: object) -> Variable | None:
    """Returns the variable of this component, if there is one."""
    if not isinstance(component, Tensor) or component not in _variables:
        return None
    variable: Variable | None = _variables[component]()
    return variable


class VariableLeaves(Leaves):
    """The components of a variable, which are leaves already; the first is the primary."""

    __slots__ = ("_variable",)

    is_watched = False

    def __init__(
        self, variable: object, components: Sequence[nn.Parameter], owner_of: tuple[int, ...]
    ) -> None:
        super().__init__(components[0], components, owner_of)
        self._variable = weakref.ref(variable)

    def is_current(self) -> bool:
        """Whether there still is the variable."""
        return self._variable() is not None

    def watched(self) -> list[Tensor]:
        """Returns nothing: replicas write to variables by `assign`, which says what that means."""
        return []

    def is_behind(self) -> bool:
        """Returns False: components may differ until the next update."""
        return False

    def take_over(self) -> None:
        """Takes over nothing; see `is_behind`."""


@computed_once
def let_optimizers_take_variables() -> None:
    """Makes optimizers take a variable wherever they take a parameter."""
    add_param_group = Optimizer.add_param_group

    @functools.wraps(add_param_group)
    def wrapped(self: Optimizer, param_group: dict[str, Any]) -> None:
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is not None and not isinstance(params, (Tensor, set)):
            given = [params] if isinstance(params, HasPolicy) else params
            param_group["params"] = [_parameter(one) for one in given]
        add_param_group(self, param_group)

    Optimizer.add_param_group = wrapped  # type: ignore[method-assign]


def _parameter(given: Any) -> Any:
    """Returns what an optimizer works on: of a variable its first component."""
    if isinstance(given, tuple):
        return tuple(map(_parameter, given))
    if not isinstance(given, HasPolicy):
        return given
    variable: Any = given
    if given.is_on_read:
        raise UnsupportedError(
            f"An optimizer makes one update for all replicas, but {variable.name!r} is ON_READ: "
            "each replica writes its own component. Make the variable with ON_WRITE, or assign to "
            "it in the step."
        )
    return variable.values[0]
