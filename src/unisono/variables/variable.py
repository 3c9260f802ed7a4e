"""`Variable`: a tensor that all replicas of a strategy share, or add up when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.arguments import check_bool, check_optional
from unisono.contexts import (
    ReplicaContext,
    Replicas,
    current_context,
    current_replica,
    get_replica_context,
    has_strategy,
    is_default,
    other_strategy,
)
from unisono.devices import this_machine
from unisono.errors import ContextError, UnequalCallsError, UnsupportedError
from unisono.kernels import check_layout
from unisono.modules.leaves import VariableLeaves, remember
from unisono.options import ReduceOp, VariableAggregation
from unisono.reductions import Destinations, destinations_of
from unisono.values import DistributedValues, Mirrored, PerReplica, TensorLike, components_of
from unisono.variables.making import MadeOnce, let_optimizers_take_variables
from unisono.variables.policy import (
    HasPolicy,
    VariableSynchronization,
    check_shape,
    checked_policy,
    refuse_arguments,
)
from unisono.variables.writes import (
    NUMBERS,
    Assignable,
    Component,
    Write,
    apart_from,
    cast,
    change_of_rows,
    check_value,
    combine_factors,
)

if TYPE_CHECKING:
    from unisono.strategies import Strategy


class Variable(HasPolicy, Assignable, TensorLike, DistributedValues, metaclass=MadeOnce):
    """A tensor with a component on every replica of the strategy that it is made under.

    It can be used wherever torch takes a tensor: a replica's code sees its own component, other
    code the first one, or for `ON_READ` the components combined. `ON_WRITE` components of replicas
    that share a memory share one storage, unless the aggregation is `NONE`.

    A trainable `ON_WRITE` variable is trained as a parameter is: gradients are reduced over the
    replicas, and an optimizer that is given the variable makes one update for all of them.

    Args:
        initial_value: The value to start from, or a function that returns it and is called once.
            On a replica, that of replica 0 counts.
        trainable: Whether components collect gradients. None means unless `ON_READ`.
        validate_shape: Must be True: the shape of a variable does not change.
        caching_device: Must be None: every replica reads its own component.
        name: What messages call it.
        variable_def: Must be None: there are no graphs to load a variable from.
        dtype: The dtype; that of the value if None.
        import_scope: Must be None, as `variable_def`.
        constraint: Must be None: optimizers of torch project no variables.
        synchronization: Whether replicas' values are combined when written or when read.
        aggregation: How they are combined.
        shape: The shape that the value must have; None means any.
    """

    __slots__ = ("__weakref__", "_name", "_number", "_owner_of", "_policy", "_replicas", "_what")

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,  # noqa: FBT001 - the signature of tf.Variable
        validate_shape: bool = True,  # noqa: FBT001, FBT002
        caching_device: None = None,
        name: str | None = None,
        variable_def: None = None,
        dtype: torch.dtype | None = None,
        import_scope: None = None,
        constraint: None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> None:
        refuse_arguments(
            validate_shape=validate_shape,
            caching_device=caching_device,
            variable_def=variable_def,
            import_scope=import_scope,
            constraint=constraint,
        )
        self._replicas: Replicas = current_context().replicas
        check_optional("name", name, str, "a text or None")
        check_optional("dtype", dtype, torch.dtype, "a `torch.dtype` or None")
        check_optional("trainable", trainable, bool, "True, False or None")
        self._name = name or "Variable"
        self._what = f"Variable {self._name!r}"
        given = initial_value() if callable(initial_value) else initial_value
        own = cast(self._given(given), dtype)
        check_layout(own, self._what)
        value = self._of_chief(own)
        check_shape(self._what, value.shape, shape)
        self._policy = checked_policy(
            synchronization, aggregation, value.dtype, trainable=trainable
        )
        devices = self._replicas.worker_devices
        if not has_strategy():
            devices = destinations_of(value).devices
        self._owner_of = self._owners(devices)
        places = [this_machine().torch_device(device) for device in devices]
        storages = {owner: value.to(places[owner], copy=True) for owner in self.owners}
        super().__init__(self._aliases(storages), devices)
        self._begin()

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._name

    @property
    def strategy(self) -> Strategy:
        """The strategy that it was made under."""
        return self._replicas.strategy

    distribute_strategy = strategy

    @property
    def is_mirrored(self) -> bool:
        """Whether all components always have the same value."""
        return not self._is_local

    @property
    def shape(self) -> torch.Size:
        """The shape of every component."""
        return torch.Size(self._values[0].shape)

    @property
    def owners(self) -> tuple[int, ...]:
        """The replicas whose components have their own storage: writing to these is enough."""
        return tuple(dict.fromkeys(self._owner_of))

    def components(self) -> list[Component]:
        """Returns what has a storage, of each of the `owners`, to be written to."""
        return [Component.of(self._values[owner]) for owner in self.owners]

    def select(self, replica_id: int) -> Variable:
        """Returns the variable itself: code on a replica sees its own component of it."""
        super().select(replica_id)
        return self

    def seen(self) -> Tensor:
        """Returns the component that the running code sees itself, or a new tensor if reduced."""
        replica = self._replica()
        component: Tensor = self._values[replica.local_id if replica else 0]
        if replica is not None or not self.is_on_read:
            return component
        self._check_read()
        op, job = self.aggregation.reduce_op, self._replicas.elastic
        known: tuple[Tensor, ...] | None = None if job is None else job.variables.known(self)
        if op is None and known is not None:
            return known[0].to(component.device, copy=True)
        if op is None:
            return self._of_chief(component)
        parts = PerReplica.placed(self._values, self.devices)
        if known is not None:
            parts.note_origin(job.generation, known)
        reduced: Tensor = self._replicas.reduce_to(op, parts, self.devices[0])
        return reduced

    def value(self) -> Tensor:
        """Returns what the running code sees, as it is now: a later write does not change it.

        Gradients flow through it to the component.
        """
        return apart_from(self._values, self.seen())

    read_value = value

    def apart(self, result: Any) -> Any:
        """Copies what a torch function returns if it is a view of a component."""
        if isinstance(result, Tensor):
            return apart_from(self._values, result)
        if type(result) in (list, tuple):
            return type(result)(map(self.apart, result))
        return result

    def state(self) -> Tensor:
        """Returns a copy of the one value that a checkpoint keeps."""
        self._check_place("state()", is_for_all=True)
        return self.value().detach()

    def load(self, value: Any) -> None:
        """Sets the variable to `value`, which `state` returned; a sum is spread without loss."""
        self._check_place("load()", is_for_all=True)
        self._write_all(Write.ASSIGN, value, is_rest_allowed=True)

    def _replica(self) -> ReplicaContext | None:
        """Returns the replica of the variable's own strategy that the running code is on."""
        context = get_replica_context()
        return context if context is not None and context.replicas is self._replicas else None

    def _check_place(self, what: str, *, is_for_all: bool = False) -> None:
        other = other_strategy(self.strategy)
        # A variable that was made outside every scope has one component, and is written once.
        is_plain = is_default(self.strategy) and current_replica() is None
        if other is not None and not is_plain:
            raise ContextError(
                f"`{what}`: {self._what} was made under {self.strategy!r}, not under {other!r}. "
                "Leave that scope, or make the variable in it."
            )
        if is_for_all and current_replica() is not None:
            raise ContextError(
                f"`{what}` of {self._what} was called on a replica, inside `run`. Call it outside "
                "`run`."
            )

    def _write(self, write: Write, given: Any, indices: Any = None, *, is_read: bool) -> Any:
        self._check_place(f"{write.value}()")
        check_bool("read_value", is_read)
        replica = self._replica()
        self._check_write(write, is_on_replica=replica is not None, is_read=is_read)
        if write.is_scatter:
            rows, values = self._given(indices), self._given(given)
            given = change_of_rows(self._what, rows, values, self.shape, self.dtype)
            given = combine_factors(given) if write.multiplies else given
        if replica is None:
            self._write_all(write, given)
        else:
            self._write_on(replica, write, given)
        if not is_read:
            return None
        if replica is not None or self.is_on_read or len(self._values) == 1:
            return self.value()
        return Mirrored.placed(self._values, self.devices)

    def _write_on(self, replica: ReplicaContext, write: Write, given: Any) -> None:
        value = self._given(given)
        check_value(self._what, value, self.shape, self.dtype)
        if self._is_local:
            if replica.counts:
                self._apply(write, {replica.local_id: value})
            return
        # A number does not say whether it is the replica's own, and whether replicas give equal
        # ones may depend on the data: refused always, and not only when they do.
        if isinstance(value, NUMBERS) and self._replicas.layout.are_several:
            self._check_not_sum(self._what, value)
        elif not isinstance(value, Tensor):
            value = cast(value, self.dtype)
        replica.merge_call(Variable._merge, (self, write, value))

    @staticmethod
    def _merge(_: Strategy, variable: Any, write: Any, value: Any) -> None:
        """In a `merge_call`: writes what replicas gave, a `PerReplica` or the same object."""
        if isinstance(variable, PerReplica) or isinstance(write, PerReplica):
            raise UnequalCallsError(
                f"The replicas write different variables or in different ways: {variable} with "
                f"{write}. Make the same writes in the same order on every replica."
            )
        op = variable.aggregation.reduce_op
        workers = variable._replicas.workers
        is_for_all = not isinstance(value, PerReplica)
        if is_for_all and (workers.are_many or len(variable._values) == 1):
            value = PerReplica.placed((value,) * len(variable._values), variable.devices)
        if not isinstance(value, PerReplica):
            variable._check_not_sum(variable._what, value)
            variable._apply(write, dict.fromkeys(variable.owners, value))
        elif op is None:
            first = variable._of_chief(cast(value.values[0], variable.dtype))
            variable._apply(write, dict.fromkeys(variable.owners, first))
        else:
            pairs = zip(value.values, variable.values, strict=True)
            parts = tuple(cast(part, variable.dtype).to(own.device) for part, own in pairs)
            targets = Destinations(tuple(variable.devices[owner] for owner in variable.owners))
            counts = variable._replicas.counting.presence
            given = PerReplica.placed(parts, variable.devices, counts)
            totals = components_of(variable._replicas.reduce_to(op, given, targets))
            if write.multiplies:
                combine = combine_factors if op is ReduceOp.SUM else Tensor.coalesce
                totals = tuple(combine(one) for one in totals)
            variable._apply(write, dict(zip(variable.owners, totals, strict=True)))

    def _write_all(self, write: Write, given: Any, *, is_rest_allowed: bool = False) -> None:
        value = self._given(given)
        check_value(self._what, value, self.shape, self.dtype)
        replicas, num_replicas = self._replicas, self._replicas.num_replicas_in_sync
        whole = cast(value, self.dtype)
        if replicas.workers.are_many:
            whole = self._of_chief(whole)
        every = [whole] * num_replicas
        if write is Write.ASSIGN:
            every = self._shares(whole, num_replicas, is_rest_allowed=is_rest_allowed)
        shares = every[replicas.first_replica_id :]
        self._apply(write, {owner: shares[owner] for owner in self.owners}, every)

    @torch.no_grad()
    def _apply(
        self, write: Write, changes: dict[int, Any], every: Sequence[Any] | None = None
    ) -> None:
        """Writes to components, after a look at all changes: they may come from this variable.

        `changes` is what is written, by replica on this worker, and `every` on all workers, if this
        one knows it.
        """
        ready = {i: apart_from(self._values, cast(c, self.dtype)) for i, c in changes.items()}
        job = self._replicas.elastic
        if job is not None:
            job.variables.before_write(self, list(ready), is_known=every is not None)
        if job is not None and every is not None:
            job.variables.write_all(self, write, every)
        for replica_id, change in ready.items():
            component = self._values[replica_id]
            write.apply(component, change.to(component.device))

    def _given(self, value: Any) -> Any:
        """Returns what the running code means by `value`: its own component, or one for all."""
        if isinstance(value, Variable):
            return value.seen()
        if not isinstance(value, DistributedValues):
            return value
        replica = current_replica()
        if replica is not None:
            return value.select(replica.local_id)
        if isinstance(value, Mirrored):
            return value.select(0)
        raise UnsupportedError(
            f"{self._what} takes one value for all replicas outside `run`, got a "
            f"{type(value).__name__} of {len(value.values)}. Reduce it first, or write each "
            "component on its replica."
        )

    def _aliases(self, storages: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """Returns a component for each replica, which has its own gradient but not its storage."""
        aliases = (storages[owner].detach() for owner in self._owner_of)
        return tuple(map(Parameter, aliases) if self._collects_gradients else aliases)

    def _of_chief(self, value: Tensor) -> Tensor:
        replicas = self._replicas
        found: Tensor = (replicas.elastic or replicas.workers).of_chief(value)
        return found

    def _begin(self, like: Variable | None = None) -> None:
        """Makes the components known: as those of this variable, and as leaves to be trained."""
        remember(self)
        let_optimizers_take_variables()
        self._replicas.mirrors.is_in_use = True
        if self._is_trained:
            self._replicas.adopt(VariableLeaves(self, self._values, self._owner_of))
        if self._replicas.elastic is not None:
            self._number = self._replicas.elastic.variables.add(self, like)

    @property
    def _is_trained(self) -> bool:
        is_trained = self._collects_gradients and not self.is_on_read
        return is_trained and not self._replicas.mirrors.is_single

    def _refuse_operator(self, other: Any) -> Any:
        self._refuse_change("+=")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = _refuse_operator

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "A Variable cannot be pickled, because it belongs to a strategy. Save "
            "`variable.state()`, and read it with `variable.load(state)`."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        duplicate: Variable = object.__new__(type(self))
        for name in ("_devices", "_name", "_owner_of", "_policy", "_replicas", "_what"):
            setattr(duplicate, name, getattr(self, name))
        storages = {owner: self._values[owner].detach().clone() for owner in self.owners}
        duplicate._values = self._aliases(storages)
        duplicate._begin(like=self)
        return duplicate
