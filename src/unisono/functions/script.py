"""A list of operators as one function that runs without Python, and without its lock.

The function is a graph of TorchScript, whose interpreter calls the operators one after another.
This file is all that Unisono uses of TorchScript.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.torch_private import OpOverload, key_set, without_dispatch_keys

# TorchScript knows these by the numbers that they have in C++.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_DTYPES = (*_INTEGERS, *_FLOATS, *_COMPLEX, torch.bool)
_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
_CODES: dict[Any, int] = {
    **{dtype: number for number, dtype in enumerate(_DTYPES)},
    torch.bfloat16: 15,
    **{layout: number for number, layout in enumerate(_FORMATS)},
    torch.strided: 0,
}
_PLAIN = (bool, int, float, complex, str, torch.device)
# A replay works on the data alone: autograd, autocast and counters of writes are not for it.
_KEYS_ABOVE = key_set(
    "ADInplaceOrView", "AutogradCPU", "AutogradOther", "AutogradFunctionality", "AutocastCPU"
)


class UnscriptableError(Exception):
    """TorchScript does not know an operator, or an argument of one."""


class Script:
    """A function that is being written, one operator after another."""

    def __init__(self) -> None:
        self._graph: Any = torch._C.Graph()
        self._constants: dict[Any, Any] = {}
        self._is_grad_enabled: bool | None = None

    def input(self, *, is_generator: bool = False) -> Any:
        """Adds an argument of the function, a tensor or a random generator, and returns it."""
        value = self._graph.addInput()
        kind: Any = torch._C._GeneratorType if is_generator else torch._C.TensorType
        value.setType(kind.get())
        return value

    def call(self, operator: OpOverload, args: Sequence[Any]) -> list[Any]:
        """Adds a call, with a value or a constant for each argument, and returns its results."""
        schema = operator._schema
        pairs = zip(args, schema.arguments, strict=True)
        given = [self._value(value, argument.type) for value, argument in pairs]
        node = self._graph.create(schema.name, given, len(schema.returns))
        results = list(node.outputs())
        for result, returned in zip(results, schema.returns, strict=True):
            result.setType(returned.type)
        # It is found by its name and the kinds of its arguments.
        if node.schema().partition("(")[0] != str(schema).partition("(")[0]:
            raise UnscriptableError(f"TorchScript cannot call `{operator}`")
        self._graph.insertNode(node)
        return results

    def set_grad_enabled(self, is_enabled: bool) -> None:  # noqa: FBT001
        """Lets what is called from here on run in this grad mode."""
        if is_enabled != self._is_grad_enabled:
            self._is_grad_enabled = is_enabled
            args = [self._constant(is_enabled)]
            self._graph.insertNode(self._graph.create("aten::set_grad_enabled", args, 0))

    def unpack(self, values: Any, number: int) -> list[Any]:
        """Returns the tensors of a list that a call has returned."""
        node = self._graph.create("prim::ListUnpack", [values], number)
        self._graph.insertNode(node)
        results = list(node.outputs())
        for result in results:
            result.setType(torch._C.TensorType.get())
        return results

    def finish(self) -> Callable[[Sequence[Any]], None]:
        """Returns the function, which is given all arguments, and returns nothing."""
        self._graph.registerOutput(self._constant(None))
        function: Any = torch._C._create_function_from_graph("step", self._graph)
        # Settings of one thread alone.
        is_optimizing = torch._C._get_graph_executor_optimize
        set_optimizing: Any = torch._C._set_graph_executor_optimize

        def run(arguments: Sequence[Any]) -> None:
            before = is_optimizing()
            set_optimizing(False)
            try:
                with torch.no_grad(), without_dispatch_keys(_KEYS_ABOVE):
                    function(*arguments)
            except RuntimeError as error:
                # What the operator says comes last.
                message = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
                raise RuntimeError(message) from None
            finally:
                set_optimizing(before)

        return run

    def _value(self, value: Any, kind: Any) -> Any:
        if isinstance(value, torch._C.Value):
            return value
        if isinstance(value, (list, tuple)):
            while isinstance(kind, torch._C.OptionalType):
                kind = kind.getElementType()
            inner = kind.getElementType()
            node = self._graph.create(
                "prim::ListConstruct", [self._value(one, inner) for one in value], 1
            )
            node.output().setType(torch._C.ListType(inner))
            self._graph.insertNode(node)
            return node.output()
        return self._constant(value)

    def _constant(self, value: Any) -> Any:
        value = _CODES.get(value, value) if not isinstance(value, _PLAIN) else value
        if value is not None and not isinstance(value, _PLAIN):
            raise UnscriptableError(f"TorchScript knows no constant like {value!r}")
        key = type(value), repr(value)
        if key not in self._constants:
            if value is None:
                node = self._graph.create("prim::Constant", [], 1)
                node.output().setType(torch._C.NoneType.get())
                self._graph.insertNode(node)
                self._constants[key] = node.output()
            else:
                self._constants[key] = self._graph.insertConstant(value)
        return self._constants[key]
