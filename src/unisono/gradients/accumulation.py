"""What happens where autograd adds a gradient to a leaf: weights, user hooks, earlier gradients."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.contexts import ReplicaContext
from unisono.errors import ContextError
from unisono.modules import Leaves, Mark
from unisono.modules.for_all import for_all
from unisono.options import ReduceOp
from unisono.sharing import computed_once, in_place_of
from unisono.values import weighed_tensor


def before_accumulation(leaf: nn.Parameter, hook: Callable[[Any], Any]) -> Callable[[], None]:
    """Lets `hook` see and change each gradient that is added to a leaf; returns what removes it.

    The hook is called after the hooks of the tensor, whenever these were registered, and only in a
    backward pass: `torch.autograd.grad` does not get that far. The node of autograd, which nobody
    else keeps alive between passes, lives as long as what is returned. A frozen leaf has one, too,
    for when a step unfreezes it.
    """
    with torch.inference_mode(mode=False):
        is_trained = leaf.requires_grad
        node: Any = torch.autograd.graph.get_gradient_edge(leaf.requires_grad_()).node
        leaf.requires_grad_(is_trained)
    handle = node.register_prehook(hook)

    def remove(_: Any = node) -> None:
        handle.remove()

    return remove


def can_be_trained(leaf: nn.Parameter) -> bool:
    """Whether torch could compute gradients of a leaf, also if it is frozen now."""
    return (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_inference()


class Weighting:
    """Multiplies the gradients of each replica by what the replica counts for.

    Only backward passes do. What `torch.autograd.grad` returns is the gradient as it is.
    """

    def __init__(self, op: ReduceOp) -> None:
        self._op = op
        self.weights: Sequence[float] = ()
        self.removals: list[Callable[[], None]] = []
        # Of leaves that were added to without a reduction: their gradient, which has its weight.
        self._alone: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def begin(
        self,
        weights: Sequence[float],
        owners: Iterable[Leaves],
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        """Before a run: hooks the leaves of replicas that do not count as one."""
        if not (self.removals or self._alone) and set(weights) == {1.0}:
            self.weights = weights
            return
        for remove in self.removals:
            remove()
        self.removals.clear()
        self.weights = weights
        for leaf in [leaf for leaf, mark in self._alone.items() if not _fits(mark, leaf.grad)]:
            del self._alone[leaf]
        for replica_id, weight in enumerate(weights):
            if weight != 1.0:
                hook = functools.partial(self.weigh, weight)
                leaves = filter(can_be_trained, [one.leaves[replica_id] for one in owners])
                with torch.cuda.stream(streams[replica_id]) if streams else nullcontext():
                    self.removals += [before_accumulation(leaf, hook) for leaf in leaves]

    def weigh(self, weight: float, grads: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Returns gradients times what their replica counts for."""
        return tuple(weighed_tensor(self._op, grad, weight) for grad in grads)

    def note(self, leaf: nn.Parameter) -> None:
        """A weighted gradient was added to a leaf, and stays the replica's own for now."""
        self._alone[leaf] = Mark.of(leaf.grad)

    def forget(self, leaf: nn.Parameter) -> None:
        """What a leaf has is reduced."""
        self._alone.pop(leaf, None)

    def is_applied(self, leaf: nn.Parameter) -> bool:
        """Whether the gradient of a leaf is made of backward passes alone."""
        return _fits(self._alone.get(leaf), leaf.grad)

    def is_mixed(self, leaf: nn.Parameter) -> bool:
        """Whether backward passes were weighted that may be a part of another gradient now."""
        return leaf in self._alone and not self.is_applied(leaf)


def _fits(mark: Mark | None, grad: Tensor | None) -> bool:
    return mark is not None and grad is not None and mark.fits(grad)


class SealedHooks(OrderedDict[int, Callable[[Tensor], None]]):
    """The post-accumulate hooks of a leaf: the reducer's own, and no other."""

    @classmethod
    def on(cls, leaf: nn.Parameter, hook: Callable[[Tensor], None]) -> SealedHooks:
        """Makes `hook` the only hook of `leaf`."""
        hooks = leaf._post_accumulate_grad_hooks
        if not isinstance(hooks, SealedHooks):
            # torch keeps the first dictionary that it was given, also if it is given another.
            hooks = leaf._post_accumulate_grad_hooks = cls()
        hooks[0] = hook
        return hooks


# The leaves of the replicas of all strategies.
_leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()


def seal(leaf: nn.Parameter) -> None:
    """From now on, users register no post-accumulate hooks on a leaf.

    A hook of the user belongs to the parameter: the reducer calls it once, when the gradient of all
    replicas is there.
    """
    _refuse_hooks()
    hooks = leaf._post_accumulate_grad_hooks
    if hooks and not isinstance(hooks, SealedHooks):
        _refuse()
    _leaves[leaf] = True


@computed_once
def _refuse_hooks() -> None:
    register: Any = nn.Parameter.register_post_accumulate_grad_hook

    @in_place_of(nn.Parameter, "register_post_accumulate_grad_hook")
    def checked(self: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
        if self in _leaves:
            _refuse()
        return register(self, hook)


def _refuse() -> None:
    raise ContextError(
        "`register_post_accumulate_grad_hook()` was called on a replica's copy of a parameter, so "
        "the hook would see the gradient of one replica only. Register it on the model's parameter "
        "outside `run`: it is then called once per backward pass, with the reduced gradient."
    )


def refuse_to_wait(name: str) -> None:
    """Raises that a parameter has a hook, whose call cannot wait until gradients are reduced."""
    raise ContextError(
        f"{name} has a hook of `register_post_accumulate_grad_hook()`, which is called with the "
        "reduced gradient after every backward pass, but in `no_sync()` no gradient is reduced. "
        "Leave out `no_sync()`, or do what the hook does before `optimizer.step()`."
    )


def refuse_to_go_on() -> NoReturn:
    """A pass has failed, and its step makes another or an update."""
    raise ContextError(
        "`backward()` has raised an error, and the step went on. Other workers may have exchanged "
        "more gradients of this pass. Let the error end the step."
    )


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has post-accumulate hooks of the user."""
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not isinstance(hooks, SealedHooks)


def call_hooks(context: ReplicaContext, owners: Iterable[Leaves]) -> None:
    """Calls the post-accumulate hooks of parameters, whose gradients are reduced."""
    with for_all(context):
        for one in owners:
            for hook in list((one.primary._post_accumulate_grad_hooks or {}).values()):
                hook(one.primary)
            one.take_from_primary()


class Aside:
    """Keeps reduced gradients apart while new ones come, and adds them to these afterwards.

    A mean of what is reduced already stays what it is, so for a mean it does nothing.
    """

    def __init__(self, op: ReduceOp, *, is_copied: bool) -> None:
        self._is_needed = op is not ReduceOp.MEAN
        self._is_copied = is_copied
        # By the identity of a leaf, a reduced gradient that waits to be added to.
        self.kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def hook(self, one: Leaves) -> list[Callable[[], None]]:
        """Puts aside what the leaves of a parameter have before something is added to it."""
        if not self._is_needed:
            return []
        # Autograd's hooks are invisible to the garbage collector, so they hold weak references.
        aside, owner = weakref.ref(self), weakref.ref(one)

        def before(replica_id: int, _: Any) -> None:
            if (found := aside()) is not None and (leaves := owner()) is not None:
                found._put_leaf(leaves, replica_id)

        return [
            before_accumulation(leaf, functools.partial(before, replica_id))
            for replica_id, leaf in enumerate(one.leaves)
            if can_be_trained(leaf)
        ]

    def put(self, owners: Iterable[Leaves]) -> None:
        """Before a reduction: does the same where a replica has no new gradient."""
        for one in owners if self._is_needed else ():
            for replica_id in range(len(one.leaves)):
                self._put_leaf(one, replica_id)

    def _put_leaf(self, one: Leaves, replica_id: int) -> None:
        leaf, mark = one.leaves[replica_id], one.reduced[replica_id]
        if leaf.grad is not None and mark is not None and mark.grad() is leaf.grad:
            self.kept[leaf] = leaf.grad.clone() if self._is_copied else leaf.grad
            leaf.grad = None

    def bring_back(self, owners: Iterable[Leaves]) -> None:
        """After a reduction: adds what was put aside."""
        for one in owners if self._is_needed else ():
            for replica_id, leaf in enumerate(one.leaves):
                before = self.kept.pop(leaf, None)
                if before is not None:
                    leaf.grad = before if leaf.grad is None else leaf.grad.add_(before)
                    one.reduced[replica_id] = Mark.of(leaf.grad)
