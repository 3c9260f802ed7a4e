"""How a run is undone: by what there was before it, and by an update that can wait for its end.

The workers of an elastic job tell each other at the end of a run that they have come there. If one
is lost before that, all undo the run. They need no copy of what an update writes if the update is
only made afterwards. The rest of the step must not notice: whatever could see the parameters, the
gradients or the optimizer as they are makes the update first.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from unisono.errors import CommunicationError
from unisono.modules.attributes import parts_of, raw, refill
from unisono.modules.leaves import Leaves, VariableLeaves, fit_for_training
from unisono.modules.metric_notes import is_clone, is_metric
from unisono.modules.owners import groups_of, tensors_in
from unisono.modules.updates import UpdatesAtOnce
from unisono.torch_private import (
    TorchDispatchMode,
    copy_each,
    dispatch_keys,
    num_dispatch_modes,
    num_function_modes,
    pytree,
    with_dispatch_keys,
)

if TYPE_CHECKING:
    from unisono.modules.mirrors import Mirrors

_SEQUENCES = (list, tuple, set, deque)
_NOT_STEPPED = (nn.Module, Optimizer)
_kind_of = operator.attrgetter("shape", "dtype", "device")


class Copies:
    """Copies of tensors, in memory that is used again for the next ones like them."""

    def __init__(self) -> None:
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []

    def take(self, originals: list[Tensor]) -> None:
        """Copies some tensors."""
        self._originals = originals
        if list(map(_kind_of, originals)) != list(map(_kind_of, self._copies)):
            self._copies = [torch.empty_like(one, requires_grad=False) for one in originals]
        if originals:
            copy_each(self._copies, [one.detach() for one in originals])

    def put_back(self) -> None:
        """Gives the tensors the values that they had."""
        for original, kept in zip(self._originals, self._copies, strict=True):
            with torch.inference_mode(mode=original.is_inference()):
                original.detach().copy_(kept)


class Snapshot:
    """The state of one strategy before a run.

    Buffers, random generators, metrics and gradients are small, or are copied only where a step
    reads what earlier runs left. Parameters and the state of optimizers are copied when something
    is about to be written for all replicas, which a run that only evaluates never does.
    """

    def __init__(self, mirrors: Mirrors) -> None:
        self._mirrors = mirrors
        self._small, self._large, self._gradients = Copies(), Copies(), Copies()
        self._restorations: list[Callable[[], object]] = []
        self._has_copied = True
        mirrors.before_writes = self._copy

    def begin(self, *, keep_gradients: bool) -> None:
        """Before a run.

        Args:
            keep_gradients: Whether the run may add to gradients that there are.
        """
        mirrors = self._mirrors
        mirrors.shared.note()
        self._restorations = [mirrors.shared.forget_latest]
        self._has_copied = False
        with fit_for_training():
            generators = [torch.default_generator]
            if torch.cuda.is_initialized():
                places = {place for place in mirrors.places if place.type == "cuda"}
                generators += [torch.cuda.default_generators[place.index] for place in places]
            for one in generators:
                self._restorations.append(functools.partial(one.set_state, one.get_state()))
            tables = []
            for module in mirrors.primaries():
                own = raw(module)
                if own["_buffers"]:
                    tables.append(own["_buffers"])
                if "_defaults" in own and is_metric(own):
                    tables.append(own)
            for optimizer in mirrors.fronts.of_kind(Optimizer):
                tables += groups_of(optimizer)
            self._small.take(self._keep_tables(tables))
            self._restorations.append(self._small.put_back)
            self._keep_gradients(keep_gradients=keep_gradients)

    def end(self) -> None:
        """After a run that stays made."""
        self._restorations = []
        self._has_copied = True

    def restore(self) -> None:
        """Makes everything what it was before the run, which may then be made and undone again."""
        with fit_for_training():
            for one in self._mirrors.all_leaves:
                for leaf in one.leaves:
                    leaf.grad = None
                one.mark_reduced()
                one.primary.grad, one.is_shown = None, False
            for restoration in self._restorations:
                restoration()

    def gradients(self) -> list[Tensor | None]:
        """Returns the gradient of each parameter, of which all replicas have copies."""
        return [one.grad for one in self._own_parameters()]

    def take_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Takes over what `gradients` has returned on another worker."""
        for one, grad in zip(self._own_parameters(), grads, strict=True):
            one.grad = None if grad is None else grad.to(one.device)
            leaves = self._mirrors.leaves_of(one)
            if leaves is None:
                self._mirrors.showing.add(id(one))
            else:
                leaves.give_gradient()

    def _of_variables(self) -> list[Leaves]:
        return [one for one in self._mirrors.all_leaves if isinstance(one, VariableLeaves)]

    def _own_parameters(self) -> list[Tensor]:
        modules = self._mirrors.primaries()
        held = [one for module in modules for one in raw(module)["_parameters"].values()]
        held += [one.primary for one in self._of_variables()]
        return list({id(one): one for one in held if one is not None}.values())

    def _copy(self) -> None:
        """Something is about to be written for all replicas."""
        if self._has_copied:
            return
        self._has_copied = True
        with fit_for_training():
            held = self._own_parameters()
            held += [own for one in self._of_variables() for own in one.others]
            for optimizer in self._mirrors.fronts.of_kind(Optimizer):
                held += self._keep_state(optimizer)
            # Schedulers and scalers.
            others = self._mirrors.fronts.of_kind(object)
            tables = [vars(one) for one in others if not isinstance(one, _NOT_STEPPED)]
            held += self._keep_tables(tables)
            self._large.take(held)
            self._restorations.append(self._large.put_back)

    def _keep_tables(self, tables: Iterable[dict[str, Any]]) -> list[Tensor]:
        """Keeps the entries of some tables, and returns the tensors in them."""
        tensors: list[Tensor] = []
        for table in tables:
            tensors += (value for value in table.values() if isinstance(value, Tensor))
            self._restorations += _restorations(table, set(), with_tensors=False)
        return tensors

    def _keep_state(self, optimizer: Any) -> list[Tensor]:
        """Keeps the state of an optimizer, and returns the tensors in it."""
        state = vars(optimizer)["state"]
        kept = parts_of(state)
        # In the run it may become another object.
        self._restorations.append(lambda: refill(vars(optimizer)["state"], kept))
        for own in kept:
            self._restorations += _restorations(own, set(), with_tensors=False)
        return list(tensors_in(state))

    def _keep_gradients(self, *, keep_gradients: bool) -> None:
        # By parameter: leaves are made again when a worker gets other replicas.
        shown = [(one.primary, one.primary.grad, one.is_shown) for one in self._mirrors.all_leaves]
        grads = (grad for _, grad, _ in shown if keep_gradients)
        self._gradients.take([one for one in grads if one is not None and not one.is_sparse])

        def restore() -> None:
            self._gradients.put_back()
            for primary, grad, is_shown in shown:
                primary.grad = grad
                leaves = self._mirrors.leaves_of(primary)
                if leaves is not None:
                    leaves.is_shown = is_shown

        self._restorations.append(restore)


@contextmanager
def undone(mirrors: Mirrors, replica_ids: Sequence[int]) -> Iterator[None]:
    """After the block, the modules of some replicas have the attributes of before it.

    What all replicas share is left alone. So are buffers and metrics: those of a replica without
    samples do not count where they are brought together.
    """
    restores: list[Callable[[], None]] = []
    for module, clone in mirrors.clones_of(replica_ids):
        if not is_clone(raw(clone)):
            shared = [*raw(module).values(), raw(clone)["_buffers"]]
            restores += _restorations(raw(clone), set(_identities(shared)))
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _identities(value: Any) -> Iterator[int]:
    """Yields the identity of a value, and of all that it holds."""
    yield id(value)
    if isinstance(value, (dict, *_SEQUENCES)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _identities(item)


def _restorations(
    value: Any, shared: set[int], *, with_tensors: bool = True
) -> list[Callable[[], None]]:
    """Returns what makes a value, and all that it holds but for `shared`, what they are now."""
    if id(value) in shared or isinstance(value, nn.Parameter):
        return []
    if isinstance(value, Tensor) and with_tensors:
        return [functools.partial(_write_back, value, value.detach().clone())]
    if not isinstance(value, (dict, *_SEQUENCES)):
        return []
    found: list[Callable[[], None]] = []
    if not isinstance(value, tuple):
        found.append(functools.partial(refill, value, parts_of(value)))
    for item in value.values() if isinstance(value, dict) else value:
        found += _restorations(item, shared, with_tensors=with_tensors)
    return found


def _write_back(tensor: Tensor, before: Tensor) -> None:
    # Only a leaf can have been written to in place without being part of a graph.
    if tensor.is_leaf and tensor.shape == before.shape:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.detach().copy_(before)


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
        has_no_modes = num_function_modes() == self._num_modes and num_dispatch_modes() == 0
        return self.is_on and not self._is_looking and has_no_modes

    def put_off(self, update: Callable[[], None], addresses: list[int]) -> None:
        """Lets an update wait until the run is complete, or something could notice."""
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
            try:
                storage = value.untyped_storage()
                start = storage.data_ptr()
            except (RuntimeError, NotImplementedError):
                # It has no memory. Operators see the tensors that it consists of.
                return False
            stop = start + storage.nbytes()
            return any(start <= address < stop for address in self._addresses)
        kind = type(value)
        if kind in _PLAIN:
            return False
        if kind is tuple or kind is list:
            return any(map(self._is_seen_in, value))
        tensors = (one for one in pytree.tree_leaves(value) if isinstance(one, Tensor))
        return any(map(self._is_seen_in, tensors))

    def make(self) -> None:
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
        self._postponed.look_at((args, kwargs or None))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Sees operators that no call of torch in Python has started."""

    def __init__(self, postponed: Postponed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._postponed = postponed

    __torch_dispatch__ = _Calls.__torch_function__
