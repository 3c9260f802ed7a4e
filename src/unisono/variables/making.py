"""How variables are made: once for all replicas, and such that optimizers take them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from unisono.contexts import current_replica
from unisono.errors import UnsupportedError
from unisono.sharing import computed_once, in_place_of
from unisono.variables.policy import HasPolicy


class MadeOnce(type):
    """On a replica, making an object is a meeting: replica 0 makes it, and all get that one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        make = super().__call__
        if context is None:
            return make(*args, **kwargs)
        return context.merge_call(lambda _: make(*args, **kwargs))

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of `__init__`, for `help` and editors."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@computed_once
def let_optimizers_take_variables() -> None:
    """Makes optimizers take a variable wherever they take a parameter."""
    add_param_group = Optimizer.add_param_group

    @in_place_of(Optimizer, "add_param_group")
    def wrapped(self: Optimizer, param_group: dict[str, Any]) -> None:
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is not None and not isinstance(params, (Tensor, set)):
            given = [params] if isinstance(params, HasPolicy) else params
            param_group["params"] = [_parameter(one) for one in given]
        add_param_group(self, param_group)


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
