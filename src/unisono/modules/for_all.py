"""Code that runs once for all replicas while they wait."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from unisono.arguments import check_callable
from unisono.contexts import CrossReplicaContext, ReplicaContext, current_replica, entered
from unisono.modules.front import as_of_program
from unisono.modules.leaves import show_current_gradients
from unisono.modules.statistics import Written
from unisono.modules.updates import Settings, check_same
from unisono.torch_private import no_torch_function, pytree
from unisono.values import select_replica

T = TypeVar("T")


class for_all:
    """Until the block ends, the code runs for all replicas, which wait at a barrier.

    It sees modules and parameters as the program has them. Before, what replicas have written to
    parameters is refused, and what they have set in the groups of optimizers is taken over. After
    it, what the block has written reaches every memory.

    A class and not a generator, for the reason that `entered` gives.
    """

    __slots__ = ("_context", "_entered", "_mirrors")

    def __init__(self, context: ReplicaContext, *, is_once: bool = False) -> None:
        self._context = context
        self._mirrors = context.replicas.mirrors
        generators = getattr(context.generators, "for_all", None)
        inner = CrossReplicaContext(context.replicas, generators=generators, is_once=is_once)
        self._entered = entered(inner)

    def __enter__(self) -> None:
        # The program's own parameters are checked.
        with no_torch_function():
            self._mirrors.postponed.make()
            self._mirrors.watch.check()
            self._mirrors.before_writes()
            recorder = self._context.meeting.recorder
            self._mirrors.groups.settle(self._context.num_local_replicas, recorder)
        self._entered.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._entered.__exit__()
        if kind is None:
            with no_torch_function():
                self._mirrors.watch.settle()
                self._mirrors.groups.renew()


def do_once(
    what: str,
    work: Callable[[], Any],
    settings: Settings | None = None,
    given: tuple[Any, ...] = (),
) -> Any:
    """On a replica, waits for all, does the work once, and gives every replica the result.

    What the replicas have `given` for it must be the same.
    """
    context = current_replica()
    if context is None:
        return work()

    def once(given_by_all: list[Any]) -> list[Any]:
        with for_all(context), no_torch_function():
            if given:
                check_same(what, given_by_all, context.replicas.mirrors.workers)
            return [work()] * context.num_local_replicas

    meet = context.meeting.meet
    return meet(context.local_id, what, given, once, in_python=True, settings=settings)


def once(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls `fn` once for all replicas, and gives every replica its result.

    In a step the replicas wait for each other, and replica 0's `fn` is called, on every worker,
    outside any replica: modules, parameters and optimizers are those of the program, gradients are
    reduced, and what `fn` writes to them counts once and reaches all replicas. It is how a step
    writes weights, adds to a counter, or writes a log.

        def update_average():
            for average, weight in zip(teacher.parameters(), student.parameters()):
                average.data.lerp_(weight.data, 0.01)

        unisono.once(update_average)

    Outside a step, and with one replica, `fn` is just called.

    Args:
        fn: What to call. On many workers all call it, so it must do the same on each.
        args: Its arguments. What is the same object on all replicas arrives as it is. What differs
            arrives as a `PerReplica`. Parts of models arrive as those of the program.
        kwargs: Its keyword arguments, treated as `args` are.

    Returns:
        What `fn` returns; of a `PerReplica` in it, every replica gets its own component.

    Raises:
        UnequalCallsError: If another replica makes another call, or has returned.
    """
    check_callable("fn", fn)
    context = current_replica()
    if context is None:
        return fn(*args, **kwargs)
    mirrors = context.replicas.mirrors
    if mirrors.is_single and context.meeting.recorder is None:
        return fn(*args, **kwargs)

    written: Written | None = None

    def work(given: list[Any]) -> list[Any]:
        nonlocal written
        with no_torch_function():
            # The program's parameters show the gradients of the replicas.
            mirrors.reduce_rest(mirrors.all_leaves)
            show_current_gradients(mirrors.all_leaves)
            if written is None:
                # A replay writes the same again, which torch does not count then.
                recorder = context.meeting.recorder
                written = mirrors.buffers.find_written(recorder)
                if written.others and recorder is not None:
                    recorder.refuse(f"a buffer becomes another before once({name})")
            mirrors.buffers.bring_together(context.replicas.current_weights, written)
        results = _call(context, fn, given, is_once=True)
        with no_torch_function():
            # The replicas get what became of the program's modules.
            for one in mirrors.all_leaves:
                one.take_from_primary()
            generation = mirrors.generation
            mirrors.refresh()
            if mirrors.generation != generation:
                context.replicas.gradients.begin(context.replicas.current_weights)
        return results

    own = pytree.tree_map(mirrors.of_program, (args, kwargs))
    name = getattr(fn, "__qualname__", type(fn).__name__)
    result: T = context.meeting.meet(context.local_id, f"once({name})", own, work, in_python=True)
    return result


def merge(
    context: ReplicaContext, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Does the work of `ReplicaContext.merge_call`."""
    fn = functools.partial(merge_fn, context.strategy)
    work = functools.partial(_call, context, fn)
    given = (args, kwargs)
    return context.meeting.meet(context.local_id, "merge_call()", given, work, in_python=True)


def _call(
    context: ReplicaContext, fn: Callable[..., Any], given: list[Any], *, is_once: bool = False
) -> list[Any]:
    """Calls `fn` with the arguments of all replicas, and splits its result."""
    replicas = context.replicas
    args, kwargs = replicas.counting.regrouped(given, are_arguments=True)
    replicas.mirrors.metrics.end(replicas.current_weights)
    clones = as_of_program(replicas.mirrors.clones_of([0]))
    with for_all(context, is_once=is_once), clones:
        result = fn(*args, **kwargs)
    replicas.mirrors.metrics.begin()
    return [select_replica(i, result) for i in range(len(given))]
