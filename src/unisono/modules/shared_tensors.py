"""What is new on all workers begins with the values of the chief."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.modules.attributes import raw
from unisono.reductions import Workers


class SharedTensors:
    """Gives all workers the parameters and buffers that the chief has, each once."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        # What every worker has of the chief already.
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Of these, what came last.
        self._latest: list[Tensor] = []
        # Whether all that is new gets its values in another way. Set by an elastic job.
        self.is_silent = False
        # Does it again if a worker is lost meanwhile. Set by an elastic job.
        self.transact: Callable[[Callable[[], None], Callable[[], None]], None] | None = None

    def note(self) -> None:
        """All that is known now stays known, also if what comes next is undone."""
        self._latest = []

    def forget_latest(self) -> None:
        """Forgets what was shared since `note`: not all workers may have it."""
        for tensor in self._latest:
            self._known.pop(tensor, None)
        self._latest = []

    def share(self, modules: Sequence[nn.Module]) -> None:
        """Gives every worker what the chief has of what is new in some modules.

        Workers that join an elastic job later get it with the state, so a worker that is alone in
        such a job notes it, too.
        """
        if self.transact is None or self.is_silent:
            self._share(modules)
        else:
            self.transact(functools.partial(self._share, modules), self.forget_latest)

    def _share(self, modules: Sequence[nn.Module]) -> None:
        if not self._workers.are_many and self.transact is None:
            return
        held = (
            tensor
            for module in modules
            for tensor in (*raw(module)["_parameters"].values(), *raw(module)["_buffers"].values())
        )
        new = [
            tensor
            for tensor in held
            if tensor is not None and not nn.parameter.is_lazy(tensor) and tensor not in self._known
        ]
        self._latest += new
        if not self.is_silent:
            self._workers.share(new)
        for tensor in new:
            self._known[tensor] = True
