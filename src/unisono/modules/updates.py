"""What replicas see of an optimizer, what its update depends on, and how they share its work.

Every replica has a copy of `param_groups`, so that `group["lr"] *= 0.5` on each of them halves the
learning rate once: where the replicas meet, what all of them have set to the same value is taken
over.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim
from torch.optim import optimizer as hooks
from torch.utils.hooks import RemovableHandle

from unisono.contexts import CrossReplicaContext, ReplicaContext, entered
from unisono.errors import ContextError, ReplicaMismatchError
from unisono.modules.attributes import Contents, are_same
from unisono.modules.front import plain_class
from unisono.modules.leaves import Leaves, with_own_gradients
from unisono.modules.owners import Groups, groups_of, state_of, tables_in, tensors_in
from unisono.torch_private import no_torch_function

if TYPE_CHECKING:
    from unisono.reductions import Workers


class UpdatesAtOnce:
    """The updates of a strategy, none of which waits. In an elastic job they are `Postponed`."""

    # Whether an update may wait, which an elastic job decides.
    is_on = False

    def __enter__(self) -> None:
        """A run begins."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """The run ends."""

    def can_wait(self) -> bool:
        """Whether an update that is due now may wait."""
        return False

    def put_off(self, update: Callable[[], None], addresses: list[int]) -> None:
        """Lets an update wait until the run is complete, or something could notice."""
        raise NotImplementedError

    def make(self) -> None:
        """Makes the update, if one waits."""


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


def update_plainly(optimizer: Any, cls: Any, context: ReplicaContext, num_bytes: int) -> None:
    """Makes an update that `is_plain`, without what replicas see of the optimizer.

    Every replica, all of which wait, makes its share if that is worth it. `num_bytes` is the size
    of all parameters.
    """
    are_few = num_bytes < _LEAST_BYTES or context.num_local_replicas == 1
    shares = None if are_few else _shares(optimizer, context.num_local_replicas)
    if shares is None:
        same: Any = object.__new__(cls)
        same.__dict__ = vars(optimizer)
        cls.step(same)
        return

    def update(groups: Groups, _: object = None) -> None:
        part: Any = object.__new__(cls)
        # The same state, of which each replica touches that of its own parameters only.
        part.__dict__.update(optimizer.__dict__, param_groups=groups)
        with entered(CrossReplicaContext(context.replicas)), no_torch_function():
            cls.step(part)

    calls = [functools.partial(update, own) for own in shares]
    recorder = context.meeting.recorder
    if recorder is not None and recorder.call_each is not None:
        recorder.call_each(calls)
    else:
        context.meeting.call_waiting(calls)


def _shares(optimizer: Any, num_replicas: int) -> list[Groups] | None:
    """Divides the parameters so that all replicas write about the same number of bytes."""
    sizes: list[tuple[int, Tensor, int]] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                num_bytes = grad._values().nbytes if grad.is_sparse else grad.nbytes
                sizes.append((number, parameter, num_bytes))
    if sum([num_bytes for _, _, num_bytes in sizes]) < _LEAST_BYTES:
        return None
    loads = [0] * num_replicas
    dealt: list[list[list[Any]]] = [[[] for _ in optimizer.param_groups] for _ in loads]
    for number, parameter, num_bytes in sizes:
        replica_id = loads.index(min(loads))
        dealt[replica_id][number].append(parameter)
        loads[replica_id] += num_bytes
    # The longest share decides when all are done.
    if 4 * max(loads) > 3 * sum(loads):
        return None
    pairs = (zip(optimizer.param_groups, own, strict=True) for own in dealt)
    return [[{**group, "params": params} for group, params in own] for own in pairs]


def watch_updates(
    hook: Callable[..., None],
    register: Callable[..., RemovableHandle] = hooks.register_optimizer_step_pre_hook,
) -> RemovableHandle:
    """Calls a hook of our own before, or after, every update of any optimizer."""
    _ours.add(hook)
    return register(hook)


def is_plain(optimizer: Any, cls: type) -> bool:
    """Whether an update is one of torch's own, without hooks, and each parameter for itself."""
    is_differentiable = optimizer.defaults.get("differentiable", False)
    return cls in _INDEPENDENT and not is_differentiable and not has_hooks(optimizer)


def has_hooks(optimizer: Any) -> bool:
    """Whether the program has a hook that is called in every step of an optimizer."""
    return any(hook not in _ours for own in _tables_of_hooks(optimizer) for hook in own.values())


def _tables_of_hooks(optimizer: Any) -> Sequence[dict[int, Callable[..., Any]]]:
    # One that wraps another may have none.
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return (
        *(vars(optimizer).get(name, {}) for name in own),
        hooks._global_optimizer_pre_hooks,
        hooks._global_optimizer_post_hooks,
    )


class Settings:
    """The hyperparameters of an optimizer, and the tensors that it works on, as they are now."""

    def __init__(self, optimizer: Any, owners: Sequence[Leaves] = ()) -> None:
        self.optimizer = optimizer
        self._owners = owners
        self._constants, self._tensors = _read(optimizer)
        self._has_hooks = has_hooks(optimizer)
        self._contents = Contents()
        self._note()

    @property
    def can_be_captured(self) -> bool:
        """Whether all that an update does is done by operators, as far as can be seen.

        Before it, gradients that replicas have written themselves are compared and exchanged.
        """
        if with_own_gradients(self._owners) or self._has_hooks:
            return False
        cls = plain_class(type(self.optimizer))
        kinds = {tensor.device.type for tensor in self._tensors}
        if kinds == {"cpu"}:
            # If one reads a value, such as the number of steps, this shows when it is captured.
            return cls in _INDEPENDENT
        groups = groups_of(self.optimizer)
        is_without_host = cls is optim.SGD or all(group.get("capturable") for group in groups)
        return kinds == {"cuda"} and is_without_host

    def changed(self) -> str:
        """Returns the name of a hyperparameter that is another now; empty if none is."""
        now = _read(self.optimizer)[0]
        pairs = zip(self._constants, now, strict=False)
        return next((one[0] for one, other in pairs if one != other), "")

    def are_current(self) -> bool:
        """Whether they are still the same."""
        tables = groups_of(self.optimizer), state_of(self.optimizer)
        if are_same(tables, self._held) and self._contents.are_same():
            # The very same objects, which is quickly seen.
            return True
        constants, tensors = _read(self.optimizer)
        is_same = (
            constants == self._constants
            and are_same(tensors, self._tensors)
            and has_hooks(self.optimizer) is self._has_hooks
        )
        if is_same:
            self._note()
        return is_same

    def _note(self) -> None:
        self._held = groups, state = groups_of(self.optimizer), state_of(self.optimizer)
        lists = (group["params"] for group in groups)
        hooks = _tables_of_hooks(self.optimizer)
        self._contents.note([groups, *lists, *groups, state, *tables_in(state), *hooks])


def _read(optimizer: Any) -> tuple[list[Any], list[Tensor]]:
    constants: list[Any] = []
    tensors: list[Tensor] = []
    for group in groups_of(optimizer):
        tensors += group["params"]
        for name, value in group.items():
            if isinstance(value, Tensor):
                tensors.append(value)
            elif name != "params":
                constants.append((name, value))
    return constants, [*tensors, *tensors_in(state_of(optimizer))]


class GroupCopies:
    """The copies that the replicas of one run have of the groups of their optimizers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        # By identity, optimizers and the copies that each replica has.
        self._copies: dict[int, tuple[Any, dict[int, Groups]]] = {}

    def seen(self, optimizer: Any, groups: Groups, context: ReplicaContext) -> Groups:
        """Returns what a replica sees of the groups of an optimizer."""
        _, copies = self._copies.setdefault(id(optimizer), (optimizer, {}))
        if context.local_id not in copies:
            copies[context.local_id] = [_copied(group) for group in groups]
        return copies[context.local_id]

    def settle(self, num_replicas: int, recorder: Any = None) -> None:
        """Where replicas meet: takes over what all of them have changed."""
        for optimizer, copies in list(self._copies.values()):
            groups: Groups = vars(optimizer)["param_groups"]
            changes = [_changes(optimizer, groups, copies.get(i)) for i in range(num_replicas)]
            if any(changes):
                for number, key in dict.fromkeys(place for own in changes for place in own):
                    values = [own.get((number, key), "as it was") for own in changes]
                    if listed := _differing(values, self._workers):
                        raise ReplicaMismatchError(
                            f"The replicas set `param_groups[{number}][{key!r}]` of "
                            f"{type(optimizer).__name__} to different values: {listed}. Set the "
                            "same value on all replicas, or set it once with `unisono.once(fn)`."
                        )
                if recorder is not None:
                    recorder.refuse(sets_groups(optimizer, next(iter(changes[0]))[1]))
                for (number, key), value in changes[0].items():
                    kept = groups[number][key]
                    are_tensors = isinstance(kept, Tensor) and isinstance(value, Tensor)
                    if are_tensors and kept.shape == value.shape:
                        # A tensor may be known elsewhere, to a captured graph for example.
                        kept.detach().copy_(value)
                    else:
                        groups[number][key] = value

    def renew(self) -> None:
        """After something was done for all replicas: they see what has become of the groups."""
        for optimizer, copies in list(self._copies.values()):
            groups: Groups = vars(optimizer)["param_groups"]
            for own in copies.values():
                own[len(groups) :] = []
                for copy, group in zip(own, groups, strict=False):
                    copy.clear()
                    copy.update(_copied(group))
                own += [_copied(group) for group in groups[len(own) :]]

    def forget(self) -> None:
        """When the run has ended."""
        self._copies.clear()


def sets_groups(optimizer: Any, key: str) -> str:
    """Says why a step that sets a hyperparameter cannot be captured."""
    return (
        f"it sets {key!r} in `param_groups` of {type(optimizer).__name__}, which no replay would "
        "do; use a scheduler, or `unisono.once(fn)`"
    )


def check_same(what: str, given: Sequence[Sequence[Any]], workers: Workers) -> None:
    """Raises if replicas, of this worker or of others, have given different arguments."""
    for values in map(list, zip(*given, strict=True)):
        if listed := _differing(values, workers):
            raise ReplicaMismatchError(
                f"{what} happens once for all replicas, but they gave it different values: "
                f"{listed}. Reduce the value first: with `context = unisono.get_replica_context()`,"
                ' a mean is `context.all_reduce("MEAN", value * context.weight)`. Or make the call '
                "outside `run`."
            )


def _differing(values: list[Any], workers: Workers) -> str:
    """Lists what the replicas of this worker have, or all workers; nothing if it is the same."""
    if workers.are_many and isinstance(values[0], (int, float, Tensor)):
        own = torch.as_tensor(values[0], dtype=torch.float64, device="cpu").detach().reshape(-1)
        gathered = workers.gather(own)
        if not all(_is_same(one, own) for one in gathered):
            values = [*values, *(one.tolist() for one in gathered)]
    if all(_is_same(value, values[0]) for value in values[1:]):
        return ""
    return ", ".join(str(one.tolist() if isinstance(one, Tensor) else one) for one in values)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
    }


def _changes(optimizer: Any, groups: Groups, copies: Groups | None) -> dict[tuple[int, str], Any]:
    """Returns what one replica has changed, by the number of the group and the key."""
    if copies is None:
        return {}
    if len(copies) != len(groups) or any(
        own.keys() != group.keys() or own["params"] is not group["params"]
        for own, group in zip(copies, groups, strict=False)
    ):
        raise ContextError(
            f"The parameter groups of {type(optimizer).__name__} were changed on a replica. Change "
            "them outside `run`, or once for all replicas with `unisono.once(fn)`."
        )
    return {
        (number, key): own[key]
        for number, (own, group) in enumerate(zip(copies, groups, strict=True))
        for key, value in group.items()
        if own[key] is not value and not _is_same(own[key], value)
    }


def _is_same(one: Any, other: Any) -> bool:
    # NaN is the same here, although it equals nothing.
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return False
        other = other.to(one.device)
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
