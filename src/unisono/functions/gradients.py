"""The gradients at certain points of a captured step: where Python sees them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from unisono.errors import CaptureError
from unisono.modules import Leaves, Mark, Mirrors
from unisono.modules.leaves import catch_up, gradient_of
from unisono.torch_private import copy_each, no_torch_function_of_subclasses
from unisono.values import is_sparse

_version = operator.attrgetter("_version")
_marks = operator.attrgetter("reduced")
_is_shown = operator.attrgetter("is_shown")


def trained_by(mirrors: Mirrors) -> list[Tensor]:
    """Returns all that has gradients: parameters, then what replicas have of them."""
    leaves = mirrors.all_leaves
    tables = [] if leaves else [module._parameters.values() for module in mirrors.modules()]
    return [
        *(one.primary for one in leaves),
        *(parameter for parameter in chain.from_iterable(tables) if parameter is not None),
        *chain.from_iterable(zip(*(one.leaves for one in leaves), strict=True)),
    ]


class Gradients:
    """The gradients that parameters have at one point of a step."""

    def __init__(self, mirrors: Mirrors, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        # While replicas run, a parameter would give each replica its own gradients.
        with no_torch_function_of_subclasses():
            self._grads = list(map(gradient_of, tensors))
        self._leaves: list[Leaves] = mirrors.all_leaves
        # Replicas change their gradients together, so it is enough to look at the first's.
        self._seen = tensors[: 2 * len(self._leaves) or len(tensors)]
        self._reduced = [list(one.reduced) for one in self._leaves]
        self._are_shown = [one.is_shown for one in self._leaves]
        # The copies of these marks that the parameters have been given.
        self._copies: list[list[Mark | None]] = []
        # Which of them say that a gradient is still as it was when it was reduced.
        self._are_reduced = [
            [
                mark is not None and leaf.grad is not None and mark.fits(leaf.grad)
                for leaf, mark in zip(one.leaves, one.reduced, strict=True)
            ]
            for one in self._leaves
        ]
        own = self._grads[: len(self._leaves) or None]
        self._counted = [grad for grad in own if grad is not None]
        self._versions = self._current_versions()

    def has(self, number: int, grad: Tensor) -> bool:
        """Whether a parameter has this gradient."""
        return self._grads[number] is grad

    def are_shown(self) -> bool:
        """Whether the parameters have these gradients."""
        return all(map(operator.is_, map(gradient_of, self._seen), self._grads))

    def restore(self, *, are_shown: bool = False) -> None:
        """Gives the parameters these gradients again, unless it is known that they have them."""
        if not (are_shown or self.are_shown()):
            for tensor, grad in zip(self._tensors, self._grads, strict=True):
                tensor.grad = grad
        if (versions := self._current_versions()) != self._versions:
            # The capture of another signature has written there, and torch has counted that.
            self._versions = versions
            self._mark_again()
        # A copy each: when a replica clears its gradient, its mark goes with it.
        if self._copies != self._reduced or not self._are_marked():
            self._copies = [reduced.copy() for reduced in self._reduced]
            for one, reduced, is_shown in zip(
                self._leaves, self._copies, self._are_shown, strict=True
            ):
                one.reduced, one.is_shown = reduced, is_shown

    def _are_marked(self) -> bool:
        """Whether the parameters have still the marks that they were given."""
        own = map(_marks, self._leaves)
        return all(map(operator.is_, own, self._copies)) and (
            list(map(_is_shown, self._leaves)) == self._are_shown
        )

    def _current_versions(self) -> list[int]:
        return list(map(_version, self._counted))

    def _mark_again(self) -> None:
        for reduced, are_reduced in zip(self._reduced, self._are_reduced, strict=True):
            for i, mark in enumerate(reduced):
                if mark is not None and are_reduced[i]:
                    reduced[i] = Mark.of(mark.grad())

    def take(self, what: str) -> None:
        """After Python has made a call again: brings the gradients of now to where these are."""
        if all(map(operator.is_, map(gradient_of, self._tensors), self._grads)):
            return
        found: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, grad in zip(self._tensors, self._grads, strict=True):
            now = tensor.grad
            if now is grad:
                continue
            if now is None or grad is None or now.shape != grad.shape:
                raise CaptureError(
                    f"{what} left other gradients than when the step was captured: a parameter of "
                    f"shape {tuple(tensor.shape)} {'had' if now is None else 'did not have'} one. "
                    "Give the same parameters a gradient in every step, on all workers, or run the "
                    "step without `unisono.function`."
                )
            tensor.grad = grad
            if is_sparse(grad):
                grad.copy_(now)
                continue
            into, from_ = found.setdefault(grad.device, ([], []))
            into.append(grad)
            from_.append(now)
        for into, from_ in found.values():
            copy_each(into, from_)


class StartingGradients:
    """The gradients to which a captured step adds, or which it clears in place."""

    def __init__(self, mirrors: Mirrors, tensors: Sequence[Tensor]) -> None:
        self._mirrors = mirrors
        self._all = Gradients(mirrors, tensors)
        with no_torch_function_of_subclasses():
            self._had = list(zip(tensors, map(gradient_of, tensors), strict=True))
        self._used: list[tuple[Tensor, Tensor]] = []

    def find_used(self, points: Sequence[Gradients]) -> None:
        """After the capture: keeps those that the step had at some of its points."""
        self._used = [
            (one, grad)
            for i, (one, grad) in enumerate(self._had)
            if grad is not None and (grad is one.grad or any(at.has(i, grad) for at in points))
        ]
        self._had = []

    def restore(self) -> None:
        """After a capture that failed: gives the parameters what they had."""
        self._all.restore()

    def fill(self) -> bool:
        """Before a replay: copies the gradients of now to where the graphs read them.

        Returns whether there may be other gradients now.
        """
        if self._used:
            catch_up(self._mirrors.all_leaves)
        for tensor, grad in self._used:
            if tensor.grad is not grad:
                assert tensor.grad is not None
                grad.copy_(tensor.grad)
                tensor.grad = grad
        return bool(self._used)
