"""Several steps in one call, as `experimental_run_steps_on_iterator` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unisono.arguments import check_optional
from unisono.contexts import get_replica_context, get_strategy, in_cross_replica_context
from unisono.errors import UnsupportedError
from unisono.options import ReduceOp

if TYPE_CHECKING:
    from unisono.strategies.strategy import Strategy


class MultiStepContext:
    """Takes what the steps of one call give, and shows what the last of them gave.

    Args:
        initial_values: What there is to show if there is no step.

    Attributes:
        last_step_outputs: What the last step gave, by name.
        non_tensor_outputs: What else the last step gave, by name.
    """

    def __init__(self, initial_values: Mapping[str, Any] | None = None) -> None:
        check_optional("initial_loop_values", initial_values, Mapping, "a dict")
        self.last_step_outputs: dict[str, Any] = dict(initial_values or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Gives `output`, which replaces what an earlier step gave under this name.

        Args:
            name: What it is called.
            output: A tensor, a distributed value, or a nested structure of them.
            reduce_op: How it is reduced over the replicas, as by `Strategy.reduce`. On a replica,
                where this is a `merge_call`, there must be one.
        """
        if in_cross_replica_context():
            self._set_output(get_strategy(), name, output, reduce_op)
            return
        if reduce_op is None:
            raise UnsupportedError(
                f"Each replica has its own {name!r}, so `reduce_op` must say how to combine them. "
                "Pass a `ReduceOp`, or return the value from the step."
            )
        context = get_replica_context()
        assert context is not None
        context.merge_call(self._set_output, (name, output, reduce_op))

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Gives anything else. On a replica this is a `merge_call`, and all outputs are kept."""
        context = get_replica_context()
        if context is None:
            self.non_tensor_outputs[name] = output
        else:
            context.merge_call(self._set_local_results, (name, output))

    def _set_output(self, strategy: Strategy, name: str, output: Any, reduce_op: Any) -> None:
        reduced = output if reduce_op is None else strategy.reduce(reduce_op, output)
        self.last_step_outputs[name] = reduced

    def _set_local_results(self, strategy: Strategy, name: str, output: Any) -> None:
        self.non_tensor_outputs[name] = strategy.experimental_local_results(output)
