"""What functions of torch do in the thread of a replica: normalization, clipping and hooks.

With `synchronize_batch_norm=True`, batch normalization is over the batch of all replicas.

Clones of a module share its tables of hooks. Before a replica registers or removes a hook in a
step, its clone gets copies of these tables. What it registers stays in its copies until it is
removed, as attributes of a clone do. A hook from outside that a replica removes is gone for this
replica at once, and for the program when the run ends.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from unisono.contexts import ReplicaContext, current_replica
from unisono.errors import ContextError, UnsupportedError
from unisono.modules.attributes import raw
from unisono.modules.for_all import do_once
from unisono.modules.leaves import Mark, variable_of
from unisono.options import ReduceOp
from unisono.sharing import computed_once, in_place_of
from unisono.torch_private import no_torch_function

if TYPE_CHECKING:
    from unisono.modules.front import Mirror
    from unisono.modules.mirrors import Mirrors

T = TypeVar("T", bound=Callable[..., Any])

# What clips gradients in torch. Older versions have fewer.
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def watch_calls() -> None:
    """From now on, replicas watch and synchronize batch normalization, clipping and hooks."""
    _watch_batch_norm()
    _watch_embeddings()
    for name in _CLIPPING:
        clip = getattr(torch.nn.utils.clip_grad, name, None)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            if clip is not None and getattr(module, name, None) is clip:
                _wrap_clipping(module, name, clip)
    for name in _REGISTER:
        _wrap_register(name, getattr(nn.Module, name))
    remove = RemovableHandle.remove

    @in_place_of(RemovableHandle, "remove")
    def wrapped(self: RemovableHandle) -> None:
        context = current_replica()
        if context is not None and not context.replicas.mirrors.is_single:
            with no_torch_function():
                if context.replicas.mirrors.hooks.remove(self, context):
                    return
        remove(self)


def _watch_batch_norm() -> None:
    original: Any = functional.batch_norm

    @functools.wraps(original)
    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: FBT001, FBT002 - as in torch
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        given = (input, running_mean, running_var, weight, bias, training, momentum, eps)
        # A compiler traces what torch does.
        if not training or torch.compiler.is_compiling():
            return original(*given)
        context = current_replica()
        if context is None or context.replicas.mirrors.is_single:
            return original(*given)
        if running_mean is not None and is_of_another(running_mean, context):
            raise ContextError(
                f"A batch normalization that belongs to no model of {context.strategy!r} is in "
                "training mode, so all replicas would write to its running statistics at once. "
                "Call `eval()` on its model, or bring the model in with `strategy.mirror(model)`."
            )
        if context.replicas.mirrors.synchronizes:
            return _synchronized(
                context, input, running_mean, running_var, weight, bias, momentum, eps
            )
        return original(*given)

    functional.batch_norm = _as_torchs(batch_norm, original)


def _watch_embeddings() -> None:
    functions: Any = functional
    renormalize = functions._no_grad_embedding_renorm_

    @functools.wraps(renormalize)
    def renormalize_once(weight: Tensor, input: Tensor, max_norm: float, norm_type: float) -> Any:
        context = None if torch.compiler.is_compiling() else current_replica()
        if context is None or id(weight) not in context.replicas.mirrors.owners:
            return renormalize(weight, input, max_norm, norm_type)
        # Of all replicas: they share the rows, and look up some of them together.
        rows = context.all_gather(input.reshape(-1), 0)
        shared = context.replicas.mirrors.of_program(weight)
        work = functools.partial(renormalize, shared, rows, max_norm, norm_type)
        return do_once("an embedding with `max_norm`", work)

    functions._no_grad_embedding_renorm_ = _as_torchs(renormalize_once, renormalize)


def _as_torchs(made: Any, original: Any) -> Any:
    """Lets compilers take a function for the one of torch that it replaces."""
    # `torch.compile` goes by the file of a function: this one is to be traced as torch's own is.
    made.__code__ = made.__code__.replace(co_filename=original.__code__.co_filename)
    # TorchScript compiles the function that these name.
    made.__script_if_tracing_wrapper = True
    made.__original_fn = original
    return made


def is_of_another(tensor: Tensor, context: ReplicaContext) -> bool:
    """Notes that a replica uses a tensor as its own, and returns whether another does, too."""
    claimed = context.replicas.mirrors.claimed
    user, _ = claimed.setdefault(id(tensor), (context.local_id, tensor))
    return user != context.local_id and variable_of(tensor) is None


def check_is_own(parameter: Tensor, context: ReplicaContext) -> None:
    """Raises if a parameter is the copy that another replica has."""
    mirrors = context.replicas.mirrors
    owner = mirrors.owners.get(id(parameter))
    if owner is None:
        return
    if any(one is parameter and i != context.local_id for i, one in enumerate(owner.leaves)):
        raise ContextError(
            f"A replica uses the copy of {mirrors.name_of(owner.primary)} that another replica "
            "has. Parameters and modules that a step takes from a model are those of its replica, "
            "so another replica must not find them in a list or cache of the program. Take them "
            "from the model before `run`, or in every step."
        )


def _synchronized(
    context: ReplicaContext,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Does what `functional.batch_norm` does in training, over the batches of all replicas."""
    context.notes.num_batch_norms += 1
    dims = [dim for dim in range(input.dim()) if dim != 1]
    num_values = input.new_tensor(input.numel() // max(1, input.shape[1]))
    total, count = context.all_reduce(ReduceOp.SUM, [input.sum(dims), num_values])
    mean = total / count
    centered = input - _spread(mean, input)
    squares = context.all_reduce(ReduceOp.SUM, centered.square().sum(dims))
    output = centered * _spread(torch.rsqrt(squares / count + eps), input)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = squares / (count - 1).clamp(min=1)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    if weight is not None:
        output = output * _spread(weight, input)
    return output if bias is None else output + _spread(bias, input)


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    return per_channel.reshape([1, -1] + [1] * (like.dim() - 2))


class SynchronizedBatchNorm:
    """Comes before the class of a batch normalization, whose own `forward` it keeps."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Does what the class does, and makes sure that it was over all replicas."""
        module = cast(_BatchNorm, self)
        context = current_replica()
        uses_batch = module.training or module.running_mean is None
        if context is None or not uses_batch:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        before = context.notes.num_batch_norms
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if context.notes.num_batch_norms == before:
            raise UnsupportedError(
                f"`synchronize_batch_norm=True` cannot synchronize {type(self).__name__}, because "
                "its `forward` calls neither `super().forward` nor "
                "`torch.nn.functional.batch_norm`. Change its `forward`, or make the strategy "
                "without `synchronize_batch_norm`."
            )
        return output


@computed_once
def synchronized(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of clones of `cls` whose batch normalization is over all replicas."""
    if not issubclass(cls, _BatchNorm) or issubclass(cls, nn.SyncBatchNorm):
        return cls
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (SynchronizedBatchNorm, cls), namespace)


def _wrap_clipping(module: Any, name: str, clip: Any) -> None:
    """Makes a reduced gradient count as reduced after torch has clipped it."""

    @in_place_of(module, name)
    def wrapped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        if context is None or context.replicas.mirrors.is_single:
            return clip(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in listed:
            check_is_own(parameter, context)
        replica_id = context.local_id
        known = context.replicas.mirrors.owners
        owners = [known[id(one)] for one in listed if id(one) in known]
        are_reduced = not any(
            one.leaves[replica_id].grad is None or one.is_own(replica_id) for one in owners
        )
        result = clip(listed, *args, **kwargs)
        if are_reduced:
            # The factor is computed from all of them, so it is equal on all replicas.
            for one in owners:
                one.reduced[replica_id] = Mark.of(one.leaves[replica_id].grad)
        return result


_TABLES = [name for name, held in vars(nn.Module()).items() if type(held) is OrderedDict]
_REGISTER = [name for name in vars(nn.Module) if "register_" in name and name.endswith("_hook")]


class HookTables:
    """The hooks of the modules of one strategy that only one replica has."""

    def __init__(self, mirrors: Mirrors) -> None:
        self._mirrors = mirrors
        # By the identity of a clone: the clone, whose it is, and by table the hooks it was given.
        self._parted: dict[int, tuple[nn.Module, Mirror, dict[str, set[int]]]] = {}
        # By identity, modules, their clones and their tables. None where these are others now.
        self.by_identity: dict[int, Mirror] | None = None
        # Tables of the program, and the hooks that replicas have removed from them.
        self._removed: list[tuple[Any, int]] = []

    def part(self, mirror: Mirror, replica_id: int) -> dict[str, Any]:
        """Returns the attributes of a clone, which has its own tables from now on."""
        clone = mirror.replicas[replica_id]
        held = raw(clone)
        if id(clone) not in self._parted:
            given = {name: set(held[name]) for name in _TABLES}
            held.update({name: held[name].copy() for name in _TABLES})
            self._parted[id(clone)] = clone, mirror, given
        return held

    def register(self, module: nn.Module, replica_id: int) -> None:
        """Before a replica registers a hook: parts the tables of a module, unless it is new."""
        mirror = self._known().get(id(module))
        if mirror is not None and module in (mirror.replicas[replica_id], mirror.primary()):
            self.part(mirror, replica_id)

    def remove(self, handle: RemovableHandle, context: ReplicaContext) -> bool:
        """Removes a hook of the program on one replica, for now; False if it is not one."""
        table: Any = handle.hooks_dict_ref()
        mirror = self._known().get(id(table))
        module = None if mirror is None else mirror.primary()
        if mirror is not None and module is not None:
            held = self.part(mirror, context.local_id)
            for name in _TABLES:
                held[name].pop(handle.id, None)
                self._removed.append((raw(module)[name], handle.id))
            return True
        for one in self._mirrors.all_leaves:
            if one.hooks and table is one.primary._backward_hooks:
                own: Any = one.leaves[context.local_id]._backward_hooks
                own.pop(handle.id, None)
                self._removed.append((table, handle.id))
                return True
        return False

    def _known(self) -> dict[int, Mirror]:
        known = self.by_identity
        if known is None:
            known = {}
            for mirror in list(self._mirrors.mirrors.values()):
                module = mirror.primary()
                if module is not None and mirror.replicas:
                    tables = (raw(module)[name] for name in _TABLES)
                    found = map(id, (module, *mirror.replicas, *tables))
                    known |= dict.fromkeys(found, mirror)
            # As a whole, because other replicas may look for theirs.
            self.by_identity = known
        return known

    def settle(self) -> None:
        """After a run: removes what replicas have removed."""
        removed, self._removed = self._removed, []
        for table, number in removed:
            table.pop(number, None)

    def refresh(self) -> None:
        """Before a run: gives clones what was registered or removed outside since the last one."""
        for clone, mirror, given in list(self._parted.values()):
            module, held = mirror.primary(), raw(clone)
            if module is None or all(clone is not one for one in mirror.replicas):
                del self._parted[id(clone)]
                continue
            tables = {name: raw(module)[name] for name in _TABLES}
            # Those of a replica without samples were put back.
            is_back = any(held[name] is table for name, table in tables.items())
            if is_back or all(held[name].keys() <= given[name] for name in _TABLES):
                held.update(tables)
                del self._parted[id(clone)]
                continue
            for name, table in tables.items():
                own = held[name]
                for number in given[name] - table.keys():
                    own.pop(number, None)
                own.update((number, table[number]) for number in table.keys() - own.keys())
                given[name] = set(table)


def _wrap_register(name: str, register: Any) -> None:
    @in_place_of(nn.Module, name)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        if context is not None and not context.replicas.mirrors.is_single:
            context.replicas.mirrors.hooks.register(self, context.local_id)
        return register(self, *args, **kwargs)
