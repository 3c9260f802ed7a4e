"""`function`: marks a step that may be captured."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, Generic, TypeVar, cast, overload

from typing_extensions import ParamSpec

from unisono.arguments import check_bool, check_callable
from unisono.contexts import running_replica
from unisono.functions.captures import Captures
from unisono.strategies.runner import Capturable, Runner
from unisono.strategies.worker import WorkerReplicas

_logger = logging.getLogger("unisono")

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")


class Function(Capturable, Generic[P, T]):
    """A step that `Strategy.run` may capture and replay. Called directly, it is the step itself."""

    def __init__(self, fn: Callable[P, T], *, strict: bool = False) -> None:
        check_callable("fn", fn)
        check_bool("strict", strict)
        self.fn: Callable[P, T] = fn.fn if isinstance(fn, Function) else fn
        self.strict = strict
        self._has_told = False
        functools.update_wrapper(self, self.fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the step. Outside `run`, it says once that nothing is captured."""
        if not self._has_told and running_replica() is None:
            self._has_told = True
            _logger.warning(
                "%r was called outside `run`, where it is never captured. Pass it to "
                "`strategy.run(step, args=...)`; if it calls `run` itself, mark the step instead.",
                self,
            )
        return self.fn(*args, **kwargs)

    def captures(self, replicas: WorkerReplicas, runner: Runner) -> Captures:
        return Captures(replicas, runner)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Function[P, T]: ...

    @overload
    def __get__(
        self: Function[Concatenate[Any, Q], T], instance: object, owner: type | None = None
    ) -> Function[Q, T]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Returns this, or for an object the step of this object, as a method is."""
        bind = getattr(self.fn, "__get__", None)
        if instance is None or bind is None:
            return self
        return Function(bind(instance, owner), strict=self.strict)

    def __repr__(self) -> str:
        return f"function({getattr(self.fn, '__qualname__', self.fn)!s})"


@overload
def function(fn: Callable[P, T], *, strict: bool = False) -> Function[P, T]: ...


@overload
def function(*, strict: bool = False) -> Callable[[Callable[P, T]], Function[P, T]]: ...


def function(fn: Callable[..., Any] | None = None, *, strict: bool = False) -> Any:
    """Lets `strategy.run` capture a step and replay it without Python, as `tf.function` does.

    The first two calls with arguments of one signature run eagerly. The third is captured, and all
    later calls replay what was captured: the same kernels, without the time that Python takes to
    start them for each replica. On a GPU, CUDA graphs are captured. On CPUs, the operators of each
    replica become one function that runs without the interpreter lock. The signature is the
    structure, shapes, dtypes and devices of the arguments, the values of Python numbers and strings
    among them, the attributes of the modules (such as `training`), the variables and attributes
    outside the step that its code names, grad mode and autocast.

    Replicas on several GPUs have their own graphs and stream on each GPU. What passes between GPUs,
    or between replicas on CPUs, happens between two graphs: the reduction of gradients, and the
    update.

    What must happen in Python, once for all replicas, still happens at every call: `once`,
    `merge_call`, `GradScaler`, and the steps of optimizers and schedulers. An optimizer that leaves
    no work to the host (such as `SGD`) is captured, too, while its hyperparameters stay the same.
    All other Python code of the step, such as `print`, runs only in the first three calls, as in
    TensorFlow.

    A step that cannot be captured, for example because it reads a value with `.item()`, stays
    eager. One log line names the reason, and the line of the program.

    It can be used as a decorator, with or without arguments.

        @unisono.function
        def step(images, labels):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        for images, labels in batches:
            loss = strategy.run(step, args=(images, labels))

    Args:
        fn: The step.
        strict: Raise a `CaptureError` instead of staying eager.

    Returns:
        The step, for `strategy.run`.
    """
    if fn is None:
        return cast(Any, functools.partial(Function, strict=strict))
    return Function(fn, strict=strict)
