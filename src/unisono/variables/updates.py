"""The update of an optimizer: what it depends on, and how replicas of one memory share its work."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, optim
from torch.optim import optimizer as hooks
from torch.utils.hooks import RemovableHandle

from unisono.contexts import CrossReplicaContext, ReplicaContext, entered
from unisono.torch_private import no_torch_function
from unisono.variables.attributes import Contents, are_same
from unisono.variables.front import plain_class
from unisono.variables.leaves import Leaves

# What these do to a parameter depends on its own gradient and state alone.
_INDEPENDENT = frozenset(
    getattr(optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
    if hasattr(optim, name)
)
_ours: weakref.WeakSet[Callable[..., None]] = weakref.WeakSet()
# For less, replicas wait longer for each other, and for Python, than one needs for it all.
_LEAST_BYTES = 2 << 20


def update_in_shares(optimizer: Any, cls: type, context: ReplicaContext) -> bool:
    """Lets every replica, all of which wait, update its share of the parameters."""
    if not is_plain(optimizer, cls):
        return False
    if sum(p.nbytes for group in optimizer.param_groups for p in group["params"]) < _LEAST_BYTES:
        return False
    shares = _shares(optimizer, context.num_local_replicas)
    if shares is None:
        return False

    def update(groups: list[dict[str, Any]], _: object) -> None:
        part: Any = object.__new__(cls)
        # The same state, of which each replica touches that of its own parameters only.
        part.__dict__.update(optimizer.__dict__, param_groups=groups)
        with entered(CrossReplicaContext(context.replicas)), no_torch_function():
            cls.step(part)  # type: ignore[attr-defined]

    context.meeting.call_waiting([functools.partial(update, own) for own in shares])
    return True


def _shares(optimizer: Any, num_replicas: int) -> list[list[dict[str, Any]]] | None:
    """Divides the parameters so that all replicas write about the same number of bytes."""
    loads = [0] * num_replicas
    dealt: list[list[list[Any]]] = [[[] for _ in optimizer.param_groups] for _ in loads]
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            replica_id = loads.index(min(loads))
            dealt[replica_id][number].append(parameter)
            num_bytes = grad._values().nbytes if grad.is_sparse else grad.nbytes
            loads[replica_id] += num_bytes
    # The longest share decides when all are done.
    if sum(loads) < _LEAST_BYTES or 4 * max(loads) > 3 * sum(loads):
        return None
    return [
        [
            {**group, "params": params}
            for group, params in zip(optimizer.param_groups, own, strict=True)
        ]
        for own in dealt
    ]


def watch_updates(hook: Callable[..., None]) -> RemovableHandle:
    """Calls a hook of our own before every update of any optimizer."""
    _ours.add(hook)
    return hooks.register_optimizer_step_pre_hook(hook)


def is_plain(optimizer: Any, cls: type) -> bool:
    """Whether an update is one of torch's own, without hooks, and each parameter for itself."""
    is_differentiable = optimizer.defaults.get("differentiable", False)
    return cls in _INDEPENDENT and not is_differentiable and not has_hooks(optimizer)


def has_hooks(optimizer: Any) -> bool:
    """Whether the program has a hook that is called in every step of an optimizer."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    others = any(hook not in _ours for hook in hooks._global_optimizer_pre_hooks.values())
    return any(own) or others or bool(hooks._global_optimizer_post_hooks)


class Settings:
    """The hyperparameters of an optimizer, and the tensors that it works on, as they are now."""

    def __init__(self, optimizer: Any, owners: Sequence[Leaves] = ()) -> None:
        self.optimizer = optimizer
        self._owners = owners
        self._constants, self._tensors = _read(optimizer)
        self._contents = Contents()
        self._note()

    @property
    def can_be_captured(self) -> bool:
        """Whether all that an update does is done by GPUs.

        Before it, gradients that replicas have written themselves are compared and exchanged.
        """
        if any(one.has_own_gradients() for one in self._owners):
            return False
        groups = vars(self.optimizer)["param_groups"]
        is_on_gpus = all(tensor.is_cuda for tensor in self._tensors)
        is_without_host = plain_class(type(self.optimizer)) is optim.SGD or all(
            group.get("capturable") for group in groups
        )
        return is_on_gpus and is_without_host and not has_hooks(self.optimizer)

    def are_current(self) -> bool:
        """Whether they are still the same."""
        if are_same(_tables(self.optimizer), self._held) and self._contents.are_same():
            # The very same objects, which is quickly seen.
            return True
        constants, tensors = _read(self.optimizer)
        is_same = constants == self._constants and are_same(tensors, self._tensors)
        if is_same:
            self._note()
        return is_same

    def _note(self) -> None:
        self._held = groups, state = _tables(self.optimizer)
        self._contents.note(
            [
                groups,
                *(group["params"] for group in groups),
                *groups,
                state,
                *state.values(),
            ]
        )


def _tables(optimizer: Any) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
    attributes = vars(optimizer)
    return attributes["param_groups"], attributes["state"]


def _read(optimizer: Any) -> tuple[list[Any], list[Tensor]]:
    constants: list[Any] = []
    tensors: list[Tensor] = []
    for group in vars(optimizer)["param_groups"]:
        tensors += group["params"]
        for name, value in group.items():
            if isinstance(value, Tensor):
                tensors.append(value)
            elif name != "params":
                constants.append((name, value))
    for state in vars(optimizer)["state"].values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return constants, tensors
