"""What a replica on a CPU does between two meetings, noted to be done again without Python.

The replica really runs, under a mode that notes every operator. Then the operators become one
function, see `script`. It is tried at once, on what the replica began with, and used only if it
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from unisono.engines import identity
from unisono.functions.script import UnscriptableError
from unisono.functions.watching import Line, line_here
from unisono.torch_private import (
    OpOverload,
    TorchDispatchMode,
    dispatch_key,
    dispatch_keys,
    has_kernel,
    with_dispatch_keys,
)
from unisono.values import is_sparse, parts_of, with_parts

_aten = torch.ops.aten
_VIEWS = dispatch_key("ADInplaceOrView")
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = {torch.bool, torch.uint8}
_FRESH = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_MOST_SHOWN = 4
# A sparse tensor is only a name for its indices and values, which are noted.
_NAMING = {
    _aten._sparse_coo_tensor_with_dims_and_tensors.default,
    _aten._indices.default,
    _aten._values.default,
}
# Its result says how a mask is, and torch does not say that this depends on values.
_NOT_TAGGED = {_aten._nested_tensor_from_mask_left_aligned.default}
# The schema does not say that this writes to running statistics.
_WRITES = {_aten.native_batch_norm.default: (3, 4)}


class Made(NamedTuple):
    """Memory that a replica has made: the first value in it, and where in it that lies."""

    storage: StorageWeakRef
    number: int
    dtype: torch.dtype
    layout: tuple[list[int], list[int], int]


class Number(int):
    """The number of a value, among other arguments."""


@dataclass
class Call:
    """A call of an operator, with numbers in the place of tensors."""

    operator: OpOverload
    args: list[Any]
    # The number of each result, or of each tensor in a list that is a result.
    results: Sequence[Any] = ()
    # Grad mode. An LSTM on a CPU, for example, keeps what its backward pass needs only if it is on.
    is_grad_enabled: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def does_more(self) -> bool:
        """Whether it does more than to return its results."""
        tags = self.operator.tags
        is_mutable = self.operator._schema.is_mutable or self.operator in _WRITES
        # What returns nothing, such as `_assert_async`, raises an error for some values.
        is_check = not self.operator._schema.returns
        return is_mutable or is_check or torch.Tag.nondeterministic_seeded in tags


class Tape:
    """The operators that one replica calls, in their order.

    Args:
        generator: What the replica draws from; None for the generators of the program.
        refuse: Takes the reason why the operators cannot be done again.
    """

    def __init__(self, generator: torch.Generator | None, refuse: Callable[[str], None]) -> None:
        self._generator = generator
        self._refuse = refuse
        self.calls: list[Call] = []
        self._num_values = 0
        # Tensors and generators that were there before, by their numbers.
        self.given: dict[int, Any] = {}
        self.numbers: Any = WeakIdKeyDictionary()
        self._generators: dict[int, Number] = {}
        # By the address of a storage, what the replica has made. None was there before.
        self.storages: dict[int, Made | None] = {}
        # What was there before: its bytes, and those that it had when it was first written to.
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        # The generator that is drawn from, and its state before.
        drawn_from = generator or torch.default_generator
        self.state = drawn_from, drawn_from.get_state()
        # Whether the replica has drawn from it, or has set its state.
        self.has_drawn = False
        # Whether a value gets another shape in place.
        self.reshapes = False
        # Each operator with its arguments, and the line of the program that called it.
        self.log: list[tuple[str, Line]] = []

    def run(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls an operator, and notes it."""
        if operator.namespace in ("prim", "profiler") or operator in _NAMING:
            return operator(*args, **kwargs)
        line = line_here()
        try:
            call = self._read(operator, args, kwargs)
        except UnscriptableError as error:
            self._refuse(f"{error} at {line}")
            return operator(*args, **kwargs)
        results = operator(*args, **kwargs)
        each = results if len(call.operator._schema.returns) > 1 else (results,)
        if operator.namespace == "aten" and not all(map(_is_made_of_tensors, each)):
            # It has read shapes or dtypes, which stay the same.
            return results
        try:
            call.results = [self._number_of_result(one) for one in each]
        except UnscriptableError as error:
            self._refuse(f"{error} at {line}")
        self.calls.append(call)
        self.log.append((f"{operator}{tuple(call.args)}{_constants(operator, args)}", line))
        return results

    def _read(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        if not isinstance(operator, OpOverload):
            raise UnscriptableError(f"it calls `{operator}`, which is more than one operator,")
        if _depends_on_values(operator, args):
            raise UnscriptableError("it depends on the values of a tensor")
        if torch.Tag.nondeterministic_seeded in operator.tags:
            operator, kwargs = self._drawing(operator, kwargs)
        noted = []
        for place, argument in enumerate(operator._schema.arguments):
            is_named = argument.kwarg_only or place >= len(args)
            value = kwargs.get(argument.name, argument.default_value) if is_named else args[place]
            is_changed = argument.alias_info is not None and argument.alias_info.is_write
            if is_changed or place in _WRITES.get(operator, ()):
                for one in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(one, Tensor):
                        self._note_write(operator, one)
            noted.append(self._noted(value))
        return _with_numbers(operator, noted)

    def _drawing(self, operator: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Lets an operator that draws random numbers name the generator that it draws from."""
        own, given = self._generator, kwargs.get("generator")
        self.has_drawn = True
        if given is not None and identity(given) != identity(self.state[0]):
            raise UnscriptableError("it draws from a generator of the program")
        overload = None if own is None else _with_generator(operator)
        # Without an overload it may draw from the default generator, as an attention with dropout
        # does. On one of several replicas, a replay then gives other bits, and is not used.
        return (operator, kwargs) if overload is None else (overload, {**kwargs, "generator": own})

    def _note_write(self, operator: Any, tensor: Tensor) -> None:
        _check_kind(tensor)
        storage = tensor.untyped_storage()
        is_made = self.storages.get(storage._cdata) is not None
        if torch.Tag.inplace_view in operator.tags:
            if not is_made:
                raise UnscriptableError("it gives a tensor from outside another shape in place")
            self.reshapes = True
        if not is_made and storage._cdata not in self.written:
            held = bytes_of(storage)
            self.written[storage._cdata] = held, held.clone()

    def _noted(self, value: Any) -> Any:
        """Returns an argument with numbers in the place of tensors and generators."""
        if isinstance(value, Tensor):
            return self.number_of(value)
        if isinstance(value, torch.Generator):
            key = identity(value)
            if key not in self._generators:
                self._generators[key] = self._new_number(value)
            return self._generators[key]
        return [self._noted(one) for one in value] if isinstance(value, (list, tuple)) else value

    def _new_number(self, given: Any = None) -> Number:
        number = Number(self._num_values)
        self._num_values += 1
        if given is not None:
            self.given[number] = given
        return number

    def number_of(self, tensor: Tensor) -> Number:
        """Returns the number of a tensor, which may have been there before."""
        number: Number | None = self.numbers.get(tensor)
        if number is not None:
            return number
        _check_kind(tensor)
        made = self.storages.setdefault(tensor.untyped_storage()._cdata, None)
        # C++ may have made another tensor of the same memory without an operator.
        number = self._new_number(tensor) if made is None else self.seen_as(made, tensor)
        self.numbers[tensor] = number
        return number

    def seen_as(self, made: Made, tensor: Tensor) -> Number:
        """Returns a value that is another tensor of some memory."""
        if made.dtype is not tensor.dtype:
            raise UnscriptableError("it uses the memory of a tensor in another dtype")
        number = self._new_number()
        args = [Number(made.number), *_layout(tensor)]
        self.calls.append(Call(_aten.as_strided.default, args, [number]))
        return number

    def _number_of_result(self, result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return [self._number_of_result(one) for one in result]
        if result is None:
            return None
        if not isinstance(result, Tensor):
            raise UnscriptableError("it gets a value of Python from an operator")
        number: Number | None = self.numbers.get(result)
        if number is None:
            _check_kind(result)
            number = self.numbers[result] = self._new_number()
            storage = result.untyped_storage()
            if storage._cdata not in self.storages:
                reference = StorageWeakRef(storage)
                made = Made(reference, number, result.dtype, _layout(result))
                self.storages[storage._cdata] = made
        return number


class Noting(TorchDispatchMode):
    """On the thread of a replica: shows every operator to the tape, if there is one."""

    tape: Tape | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator."""
        kwargs = kwargs or {}
        # Another replica may end the capture at any moment.
        tape = self.tape
        if tape is None:
            return func(*args, **kwargs)
        if _is_made_of_others(func):
            with _as_without_modes(), self:
                return func.decompose(*args, **kwargs)
        if func is _aten.clone.default and is_sparse(args[0]):
            parts = map(self._cloned, parts_of(args[0]))
            return with_parts(args[0], *parts, is_coalesced=args[0].is_coalesced())
        return tape.run(func, args, kwargs)

    def _cloned(self, part: Tensor) -> Tensor:
        with self:
            return part.clone()


def _as_without_modes() -> AbstractContextManager[None]:
    """Within the block, an operator calls the same others as without a mode.

    In inference mode, torch calls a mode after it has left out the key of views. Views of
    parameters then need no gradient, which changes how a linear layer multiplies, and its bits.
    """
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    included, excluded = dispatch_keys()
    guard: AbstractContextManager[None] = with_dispatch_keys(included, excluded.remove(_VIEWS))
    return guard


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns all of a storage as bytes."""
    with torch.inference_mode(mode=False):
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _layout(tensor: Tensor) -> tuple[list[int], list[int], int]:
    return list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())


def _check_kind(tensor: Tensor) -> None:
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not is_plain or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = type(tensor).__name__ if not is_plain else f"{tensor.layout} tensor"
        raise UnscriptableError(f"it uses a {kind} on {tensor.device}")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnscriptableError("it uses a quantized tensor, or a view of a conjugate")


def _is_made_of_tensors(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return all(map(_is_made_of_tensors, result))
    return result is None or isinstance(result, Tensor)


def _constants(operator: Any, args: Sequence[Any]) -> str:
    """Returns the values of a tensor that Python has just made of numbers."""
    if operator not in _FRESH:
        return ""
    values = args[0].detach().flatten()
    held = values.view(torch.uint8).numpy().tobytes()
    return f" of {values[:_MOST_SHOWN].tolist()}, {hash(held)}"


def _is_made_of_others(operator: Any) -> bool:
    """Whether an operator calls others, which are to be noted instead of it."""
    # The dispatcher does not know those of `prim`, which ask subclasses what they are.
    if not isinstance(operator, OpOverload) or operator.namespace == "prim":
        return False
    name = operator.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def _depends_on_values(operator: Any, args: Sequence[Any]) -> bool:
    """Whether Python may decide by what an operator returns, or by its size."""
    if operator is _aten.index.Tensor:
        # Masks select any number of elements.
        return any(one is not None and one.dtype in _MASKS for one in args[1])
    return operator in _NOT_TAGGED or not _DATA_DEPENDENT.isdisjoint(operator.tags)


def _overloads(operator: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields an operator and its overloads, with their arguments."""
    yield operator, operator._schema.arguments
    packet = operator.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        yield overload, overload._schema.arguments


def _with_generator(operator: Any) -> Any:
    """Returns the overload of an operator that is also given a generator, if there is one."""
    names = {one.name for one in operator._schema.arguments} | {"generator"}
    found = (one for one, given in _overloads(operator) if {x.name for x in given} == names)
    return next(found, None)


def _with_numbers(operator: Any, args: list[Any]) -> Call:
    """Returns a call of the overload that takes numbers where Python has given numbers."""
    names = [one.name for one in operator._schema.arguments]
    for overload, arguments in _overloads(operator):
        if [one.name for one in arguments] == names and not any(
            isinstance(arg, (bool, int, float, complex))
            and not isinstance(arg, Number)
            and isinstance(argument.type, torch.TensorType)
            for arg, argument in zip(args, arguments, strict=True)
        ):
            return Call(overload, args)
    raise UnscriptableError(f"it gives a number to `{operator}`")
