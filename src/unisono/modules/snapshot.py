"""What a run may change, as it was before the run, so that it can be undone or made again."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.modules.attributes import raw
from unisono.modules.leaves import Leaves, VariableLeaves, fit_for_training
from unisono.modules.metric_notes import is_clone, is_metric
from unisono.modules.mirrors import Mirrors
from unisono.modules.optimizer_tables import groups_of, tensors_in
from unisono.torch_private import copy_each

_CONTAINERS = (list, dict, set)
_SEQUENCES = (list, tuple, set, deque)
_NOT_STEPPED = (nn.Module, Optimizer)


class Copies:
    """Copies of tensors, in memory that is used again for the next ones like them."""

    def __init__(self) -> None:
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []

    def take(self, originals: list[Tensor]) -> None:
        """Copies some tensors."""
        self._originals = originals
        if len(originals) != len(self._copies) or not all(map(_are_alike, originals, self._copies)):
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
        self._restorations: list[Callable[[], None]] = []
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
            self._keep_random_state()
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
            entries = table.copy()
            for name, value in table.items():
                if isinstance(value, Tensor):
                    tensors.append(value)
                elif isinstance(value, _CONTAINERS):
                    entries[name] = _kept(value)
            self._restorations.append(functools.partial(_restore, table, entries))
        return tensors

    def _keep_state(self, optimizer: Any) -> list[Tensor]:
        """Keeps the state of an optimizer, and returns the tensors in it."""
        state = vars(optimizer)["state"]
        kept = {key: _kept(own) for key, own in state.items()}

        def restore() -> None:
            # In the run it may have become another object.
            now = vars(optimizer)["state"]
            dict.clear(now)
            dict.update(now, {key: _kept(own) for key, own in kept.items()})

        self._restorations.append(restore)
        return list(tensors_in(state))

    def _keep_random_state(self) -> None:
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            places = {place for place in self._mirrors.places if place.type == "cuda"}
            generators += [torch.cuda.default_generators[place.index] for place in places]
        states = [generator.get_state() for generator in generators]

        def restore() -> None:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

        self._restorations.append(restore)

    def _keep_gradients(self, *, keep_gradients: bool) -> None:
        # By parameter: leaves are made again when a worker gets other replicas.
        shown = [(one.primary, one.primary.grad, one.is_shown) for one in self._mirrors.all_leaves]
        if keep_gradients:
            grads = (grad for _, grad, _ in shown)
            self._gradients.take([one for one in grads if one is not None and not one.is_sparse])
        else:
            self._gradients.take([])

        def restore() -> None:
            self._gradients.put_back()
            for primary, grad, is_shown in shown:
                primary.grad = grad
                leaves = self._mirrors.leaves_of(primary)
                if leaves is not None:
                    leaves.is_shown = is_shown

        self._restorations.append(restore)


def _restore(table: dict[str, Any], entries: dict[str, Any]) -> None:
    dict.clear(table)
    dict.update(table, {name: _kept(value) for name, value in entries.items()})


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _kept(value: Any) -> Any:
    """Returns a copy of containers, also inside one another; other objects stay what they are."""
    if not isinstance(value, _CONTAINERS):
        return value
    copied: Any = copy.copy(value)
    if isinstance(value, dict):
        for key, one in value.items():
            if isinstance(one, _CONTAINERS):
                dict.__setitem__(copied, key, _kept(one))
    elif isinstance(value, list):
        list.__setitem__(copied, slice(None), [_kept(one) for one in value])
    return copied


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


def _restorations(value: Any, shared: set[int]) -> list[Callable[[], None]]:
    """Returns what makes a value, and all that it holds but for `shared`, what they are now."""
    if id(value) in shared or isinstance(value, nn.Parameter):
        return []
    if isinstance(value, Tensor):
        return [functools.partial(_write_back, value, value.detach().clone())]
    if not isinstance(value, (dict, *_SEQUENCES)):
        return []
    found: list[Callable[[], None]] = []
    if not isinstance(value, tuple):
        fill = value.extend if isinstance(value, (list, deque)) else value.update
        items = dict(value) if isinstance(value, dict) else list(value)
        found.append(functools.partial(_fill_back, value, fill, items))
    for item in value.values() if isinstance(value, dict) else value:
        found += _restorations(item, shared)
    return found


def _fill_back(container: Any, fill: Callable[[Any], None], items: Any) -> None:
    container.clear()
    fill(items)


def _write_back(tensor: Tensor, before: Tensor) -> None:
    # Only a leaf can have been written to in place without being part of a graph.
    if tensor.is_leaf and tensor.shape == before.shape:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.detach().copy_(before)
