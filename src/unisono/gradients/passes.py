"""One backward pass: what a replica brings, what all of them have brought, and who sends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from unisono.contexts import ReplicaContext, current_replica
from unisono.devices import Trail
from unisono.errors import ContextError, UnsupportedError
from unisono.modules import check_backward
from unisono.sharing import computed_once, in_place_of
from unisono.torch_private import bindings


class Pass:
    """One backward pass of all replicas of this worker."""

    def __init__(self, num_packs: int, num_replicas: int) -> None:
        self.lock = threading.Lock()
        # By pack, how many replicas have not filled it.
        self.missing = [num_replicas] * num_packs
        self.full: set[int] = set()
        # Held while a pack is reduced before the pass ends.
        self.reducing = threading.Lock()
        self.has_failed = False
        self.sent: list[Future[None]] = []
        self.trail = Trail()


class OwnPass:
    """What the leaves of one replica had before its backward pass, so that what is new is seen.

    Autograd either gives a leaf another gradient or adds to the one that it has, and then torch
    counts a write to it. So nothing has to be told when each gradient comes.
    """

    __slots__ = ("_before", "_filled", "_versions", "leaves", "of_all")

    def __init__(self, leaves: Sequence[nn.Parameter], of_all: Pass) -> None:
        self.of_all = of_all
        self.leaves = leaves
        self._before: list[Tensor | None] = [leaf.grad for leaf in leaves]
        self._versions = [0 if grad is None else grad._version for grad in self._before]
        self._filled: set[int] = set()

    @property
    def adds(self) -> bool:
        """Whether a leaf had a gradient before."""
        return self._before.count(None) < len(self._before)

    def new(self) -> list[int]:
        """Returns the numbers of the leaves that have a new gradient."""
        found = [leaf.grad for leaf in self.leaves]
        return [
            i
            for i, (now, before) in enumerate(zip(found, self._before, strict=True))
            if now is not None and (now is not before or now._version != self._versions[i])
        ]

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Returns which of some leaves have no new gradient yet."""
        return [
            i
            for i in numbers
            if (now := self.leaves[i].grad) is None
            or (now is self._before[i] and now._version == self._versions[i])
        ]

    def fills(self, pack: int) -> bool:
        """Notes that the replica has filled a pack, and returns whether it is the last one."""
        if pack in self._filled:
            return False
        self._filled.add(pack)
        with self.of_all.lock:
            self.of_all.missing[pack] -= 1
            return self.of_all.missing[pack] == 0


@computed_once
def watch_backward_passes() -> None:
    """Lets the gradient reducer of a strategy make every backward pass of its replicas.

    `Tensor.backward`, `torch.autograd.backward` and checkpoints all call this function of torch,
    and so does `torch.autograd.grad`, which adds to no leaf.
    """
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    @in_place_of(torch.autograd, "_engine_run_backward")
    def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        if context is None or context.replicas.mirrors.is_single:
            return run(roots, *args, **kwargs)
        # After an update, autograd refuses a graph of what was before.
        context.replicas.mirrors.postponed.make()
        if not kwargs.get("accumulate_grad"):
            return run(roots, *args, **kwargs)
        if context.notes.current_pass is None:
            check_backward(context, roots)
        reducer = context.replicas.gradients

        def run_own() -> Any:
            result = run(roots, *args, **kwargs)
            # Of the arguments, this one is whether the gradients get a graph.
            if True in args[2:3]:
                _refuse_graphs(context)
            return result

        return reducer.make_pass(context, run_own)

    will_run: Any = torch._C._will_engine_execute_node

    @in_place_of(bindings, "_will_engine_execute_node")
    def will_execute_node(node: Any) -> Any:
        context = current_replica()
        if context is not None:
            _refuse_primary(context, getattr(node, "variable", None))
        return will_run(node)


def _refuse_graphs(context: ReplicaContext) -> None:
    """Refuses gradients of parameters that can be differentiated: a graph is not exchanged."""
    mirrors = context.replicas.mirrors
    found = []
    for one in mirrors.all_leaves:
        leaf = one.leaves[context.local_id]
        if leaf.grad is not None and leaf.grad.requires_grad:
            found.append(one.primary)
            # Or the parameter and the graph would keep each other alive.
            leaf.grad = leaf.grad.detach()
    if found:
        raise UnsupportedError(
            f"`backward(create_graph=True)` gave {mirrors.name_of(found[0])} a gradient that "
            "can be differentiated, but gradients are reduced over the replicas without their "
            "graph. Use `torch.autograd.grad(loss, parameters, create_graph=True)`, which returns "
            "the gradients of this replica's part of the batch."
        )


def _refuse_primary(context: ReplicaContext, variable: Tensor | None) -> None:
    """Refuses a hook of several parameters that waits for gradients that no replica computes."""
    mirrors = context.replicas.mirrors
    owner = mirrors.owners.get(id(variable))
    if owner is not None and owner.leaves[context.local_id] is not variable:
        raise ContextError(
            f"A hook of `register_multi_grad_hook()` waits for the gradient of "
            f"{mirrors.name_of(owner.primary)} and was registered outside `run`, where it gets no "
            "gradients of a replica. Register it in the step, and remove it there, or register a "
            "hook for each parameter with `register_post_accumulate_grad_hook()`."
        )


class Sender:
    """Exchanges packs one after another."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._threads: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None

    def send(self, exchange: Callable[[], None], sent: list[Future[None]]) -> None:
        """Exchanges a pack after those that were `sent`, and adds it to them."""
        before = sent[-1:]

        def send() -> None:
            # An error holds the frames that it passes, so no frame holds the future of the error.
            if before:
                before.pop().result()
            exchange()

        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="unisono-exchange")
        sent.append(self._threads.submit(send))

    def send_early(
        self, exchange: Callable[[], None], current: Pass, place: torch.device | None
    ) -> None:
        """Exchanges a pack while its backward pass goes on, beside it in the graph of a GPU."""
        if place is None:
            self.send(exchange, current.sent)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(place)
        self._stream.wait_stream(torch.cuda.current_stream(place))
        with torch.cuda.stream(self._stream):
            exchange()
            current.trail.note(place)
        done: Future[None] = Future()
        done.set_result(None)
        current.sent.append(done)

    def settle(self, sent: Sequence[Future[None]]) -> None:
        """Waits until packs are exchanged, or have failed."""
        try:
            wait(sent)
        except KeyboardInterrupt:
            # Or the thread that sends would wait on, and the process could not end without it.
            self._interrupt()
            raise

    def finish(self, sent: list[Future[None]]) -> None:
        """Waits until packs are exchanged, and forgets them; raises if one has failed."""
        self.settle(sent)
        # The last one has failed if any has.
        del sent[:-1]
        sent.pop().result()

    def close(self) -> None:
        """Ends the thread."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
