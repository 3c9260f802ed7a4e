"""Training steps as objects, and what runs them until the input ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim import Optimizer

from unisono.arguments import check_callable, check_instance, check_int, in_words
from unisono.errors import EndOfInputError, UnsupportedError
from unisono.strategies import Strategy
from unisono.strategies.steps import MultiStepContext


class DistributeConfig(NamedTuple):
    """The strategies of a program, in one record.

    Attributes:
        train_distribute: The strategy for training.
        eval_distribute: The strategy for evaluation.
        remote_cluster: The cluster that both run in.
    """

    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    remote_cluster: Any = None


class Step:
    """One step of training. A subclass overrides `__call__`.

    Args:
        distribution: The strategy that runs it.
    """

    def __init__(self, distribution: Strategy) -> None:
        check_instance("distribution", distribution, Strategy, "a strategy")
        self._distribution = distribution

    @property
    def distribution(self) -> Strategy:
        """The strategy that runs the step."""
        return self._distribution

    def initialize(self) -> None:
        """Restarts the input; without input there is nothing to do."""

    def __call__(self) -> Any:
        """Makes one step."""
        raise NotImplementedError(f"{type(self).__name__} must override `__call__()`.")


class StandardInputStep(Step):
    """A step that has input.

    Args:
        dataset_fn: Called without arguments. Returns a `DataLoader` or an iterable of batches, each
            of the size of one replica's batch.
        distribution: The strategy that runs it.
    """

    def __init__(self, dataset_fn: Callable[[], Any], distribution: Strategy) -> None:
        super().__init__(distribution)
        check_callable("dataset_fn", dataset_fn)
        self._iterator = distribution.make_input_fn_iterator(lambda _: dataset_fn())

    def initialize(self) -> None:
        """Restarts the input."""
        self._iterator.initialize()


class StandardSingleLossStep(StandardInputStep):
    """A step that trains with one loss: forward, backward, one update.

    The gradients of the replicas are aggregated as the strategy's `reduce_gradients` says.

    Args:
        dataset_fn: See `StandardInputStep`.
        loss_fn: Called as `loss_fn(context, inputs)` on each replica; returns the loss. The context
            takes what is to be returned from the step, with `set_last_step_output`.
        optimizer: Made in the scope of the strategy.
        distribution: The strategy that runs it.
        iterations_per_step: The number of batches, and updates, of one call.
    """

    def __init__(
        self,
        dataset_fn: Callable[[], Any],
        loss_fn: Callable[[MultiStepContext, Any], Any],
        optimizer: Optimizer,
        distribution: Strategy,
        iterations_per_step: int = 1,
    ) -> None:
        check_callable("loss_fn", loss_fn)
        check_instance("optimizer", optimizer, Optimizer, "a `torch.optim.Optimizer`")
        check_int("iterations_per_step", iterations_per_step, least=0)
        super().__init__(dataset_fn, distribution)
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._iterations_per_step = iterations_per_step

    def __call__(self) -> MultiStepContext:
        """Makes the updates, and returns the context with the outputs of the last one.

        Raises:
            EndOfInputError: If the input has ended.
        """
        strategy = self.distribution
        with strategy.scope():
            return strategy.extended.experimental_run_steps_on_iterator(
                lambda context, inputs: strategy.run(self._train, (context, inputs)),
                self._iterator,
                self._iterations_per_step,
            )

    def _train(self, context: MultiStepContext, inputs: Any) -> None:
        self._optimizer.zero_grad()
        self._loss_fn(context, inputs).backward()
        self._optimizer.step()


class Monitor:
    """Runs steps until the input ends.

    Args:
        step_callable: A `Step`, or a function that makes one step and raises `EndOfInputError`
            when there is no input left.
        session: Must be None: there are no sessions.
    """

    def __init__(self, step_callable: Callable[[], Any], session: object = None) -> None:
        if session is not None:
            raise UnsupportedError(
                f"Unisono has no sessions, got `session={in_words(session)}`. Leave it out."
            )
        check_callable("step_callable", step_callable)
        self._run_step = step_callable

    def run_steps(self, num_steps: int | None = None) -> None:
        """Runs steps.

        Args:
            num_steps: How many; None means until the input ends. It may end before.
        """
        if num_steps is not None:
            check_int("num_steps", num_steps, least=0)
        step = 0
        while num_steps is None or step < num_steps:
            try:
                self._run_step()
            except EndOfInputError:
                break
            step += 1
