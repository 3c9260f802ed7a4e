"""Parameters that a step uses without their module, such as a variable of a closure.

In a replica's thread, a module is the replica's clone, and its parameters are the replica's leaves.
A parameter that the step kept from before the run is the primary itself. While replicas run,
primaries therefore have a subclass of their class, whose functions use the leaf instead. Leaves
have torch's own class, so nothing is slower where a step uses a module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import optimizer

from unisono.contexts import current_replica
from unisono.torch_private import no_torch_function_of_subclasses
from unisono.variables.front import set_classes
from unisono.variables.leaves import Leaves


class Captured(nn.Parameter):
    """The class of primary parameters while replicas run."""

    __slots__ = ()

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Makes a plain parameter, because a copy is not a primary."""
        return nn.Parameter(data, requires_grad)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class that it has outside a run."""
        return nn.Parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function with the leaves of the replica; outside a replica, as it is."""
        kwargs = kwargs or {}
        context = current_replica()
        if context is not None:
            own = context.replicas.mirrors.stand_ins[context.local_id]
            try:
                args, kwargs = _with_leaves((args, kwargs), own)
            except KeyError:
                # A parameter of another strategy has no leaf here.
                pass
            else:
                return func(*args, **kwargs)
        with no_torch_function_of_subclasses():
            return func(*args, **kwargs)


def _with_leaves(value: Any, own: dict[int, nn.Parameter]) -> Any:
    kind = type(value)
    if kind is Captured:
        return own[id(value)]
    if kind is tuple or kind is list:
        return kind(_with_leaves(one, own) for one in value)
    if kind is dict:
        return {name: _with_leaves(one, own) for name, one in value.items()}
    return value


# Optimizers update many parameters at once only if they know their class.
optimizer._foreach_supported_types.append(Captured)


class CapturedParameters:
    """The primaries of one strategy that have another class while its replicas run."""

    def __init__(self) -> None:
        self._present: list[nn.Parameter] = []
        self.is_up = False

    def put_up(self, leaves: Iterable[Leaves]) -> None:
        """Before a run, and for new parameters: sets the class."""
        self.is_up = True
        # The primary of a variable is itself the leaf of the first replica.
        new = [
            one.primary
            for one in leaves
            if type(one.primary) is nn.Parameter and one.leaves[0] is not one.primary
        ]
        self._present += new
        set_classes(new, itertools.repeat(Captured))

    def take_down(self) -> None:
        """After a run: restores the classes. Calling it again does nothing."""
        if self.is_up:
            set_classes(self._present, itertools.repeat(nn.Parameter))
            self._present = []
            self.is_up = False
