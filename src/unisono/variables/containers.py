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
    """Lets the components of a variable be asked whose they are."""
    for component in variable.values:
        _variables[component] = weakref.ref(variable)


def variable_of(component: object) -> Variable | None:
    """Returns the variable that has this component, if one has."""
    if not isinstance(component, Tensor) or component not in _variables:
        return None
    variable: Variable | None = _variables[component]()
    return variable
