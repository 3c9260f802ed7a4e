"""An update that is made when its run is complete, so that nobody has to undo it.

The workers of an elastic job tell each other at the end of a run that they have come there. If one
is lost before that, all undo the run. They need no copy of what an update writes if the update is
only made afterwards. The rest of the step must not notice: whatever could see the parameters, the
gradients or the optimizer as they are makes the update first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unisono.errors import CommunicationError
from unisono.modules.updates import UpdatesAtOnce
from unisono.torch_private import (
    TorchDispatchMode,
    dispatch_keys,
    num_dispatch_modes,
    num_function_modes,
    pytree,
    with_dispatch_keys,
)

# What is no tensor, and has none.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Postponed(UpdatesAtOnce):
    """The update of one strategy that waits, if there is one. In a run, it is entered."""

    def __init__(self) -> None:
        self._update: Callable[[], None] | None = None
        # Where the memory of what it reads or writes begins.
        self._addresses: list[int] = []
        self._keys: Any = None
        # How many modes there were when the run began, and those that this has added.
        self._num_modes = 0
        self._modes: tuple[Any, Any] = _Calls(self), _Operators(self)
        self._is_looking = False

    def __enter__(self) -> None:
        self._num_modes = num_function_modes()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._is_looking:
            self._is_looking = False
            for mode in reversed(self._modes):
                mode.__exit__(None, None, None)
        if kind is not None and not issubclass(kind, CommunicationError):
            # The step has failed after it.
            self.make()

    def can_wait(self) -> bool:
        """Whether an update that is due now may wait."""
        return (
            self.is_on
            and not self._is_looking
            and num_function_modes() == self._num_modes
            and num_dispatch_modes() == 0
        )

    def put_off(self, update: Callable[[], None], addresses: list[int]) -> None:
        """Lets an update wait until the run is complete, or something could notice.

        Args:
            addresses: Where the memory of the tensors begins that it reads or writes.
        """
        self._addresses = addresses
        self._update = update
        self._keys = dispatch_keys()
        for mode in self._modes:
            mode.__enter__()
        self._is_looking = True

    def look_at(self, structure: Any) -> None:
        """Something is about to be done with some tensors."""
        if self._update is not None and self._is_seen_in(structure):
            self.make()

    def _is_seen_in(self, value: Any) -> bool:
        """Whether a value may show what the update reads or writes."""
        if isinstance(value, Tensor):
            return self._is_seen_by(value)
        kind = type(value)
        if kind in _PLAIN:
            return False
        if kind is tuple or kind is list:
            return any(map(self._is_seen_in, value))
        return any(isinstance(x, Tensor) and self._is_seen_by(x) for x in pytree.tree_leaves(value))

    def _is_seen_by(self, leaf: Tensor) -> bool:
        try:
            storage = leaf.untyped_storage()
            start = storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            # It has no memory. Operators see the tensors that it consists of.
            return False
        stop = start + storage.nbytes()
        return any(start <= address < stop for address in self._addresses)

    def make(self) -> None:
        """Makes the update, if one waits."""
        update, self._update = self._update, None
        if update is not None:
            with with_dispatch_keys(*self._keys):
                update()

    def forget(self) -> None:
        """The run is undone."""
        self._update = None


class _Calls(TorchFunctionMode):
    """Sees the calls of torch before autograd does."""

    def __init__(self, postponed: Postponed) -> None:
        super().__init__()
        self._postponed = postponed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets a call be made that sees what it would see after the update."""
        self._postponed.look_at((args, kwargs or None))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Sees operators that no call of torch in Python has started."""

    def __init__(self, postponed: Postponed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._postponed = postponed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets an operator do what it would do after the update."""
        self._postponed.look_at((args, kwargs or None))
        return func(*args, **(kwargs or {}))
