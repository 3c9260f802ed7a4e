"""Which variable a component belongs to."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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
