"""The native core: fused reductions of tensors in host memory, and collectives through it."""

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from torch import Tensor

def instruction_set() -> str:
    """The instruction set that was chosen for this processor: avx2 or baseline."""

def memory_use() -> tuple[int, int]:
    """The bytes in use by results, and the bytes kept for later ones."""

def trim() -> None:
    """Gives memory kept for later results back to the system."""

def hold_same(containers: list[Iterable[object]], lengths: bytes, held: bytes) -> bool:
    """Whether containers hold objects with the addresses `held`, one after another; of dicts,
    each key and then its value.
    """

class HostKernel:
    """Reduces contiguous CPU tensors in one pass over memory."""

    def __init__(self, tensor_type: type) -> None: ...
    def reduce(
        self,
        op: str,
        batch: Sequence[Sequence[Tensor]],
        copies: Sequence[int],
        mean: bool,
        threads: int,
    ) -> list[tuple[Tensor, ...] | None]:
        """Reduces each item of `batch` into `copies` new tensors; None for items not taken."""

    def reduce_into(
        self,
        op: str,
        batch: Sequence[Sequence[Tensor]],
        outputs: Sequence[Sequence[Tensor]],
        mean: bool,
        threads: int,
    ) -> None:
        """Reduces each item of `batch` into its `outputs`, which may be its inputs."""

class GpuReader:
    """Reads where tensors are in GPU memory."""

    def __init__(self, tensor_type: type) -> None: ...
    def tables(
        self,
        op: str,
        batch: Sequence[Sequence[Tensor]],
        outputs: Sequence[Sequence[Tensor]],
        mean: bool,
        block: int,
    ) -> list[tuple[str, int, int, int, int, int, bool, bytes]] | None:
        """Returns the tables of a batch; None if an item is not taken."""

class Bell:
    """A bell that threads wait for."""

    def __init__(self, looks: int) -> None: ...
    @property
    def count(self) -> int:
        """How often it has rung."""

    def ring(self) -> None:
        """Wakes all who wait."""

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Waits until it has rung more often than `seen`; False if it has not in time."""

    def ring_and_wait(self, other: Bell, seen: int, timeout_s: float) -> bool:
        """Rings, and waits until another bell has rung more often than `seen`."""

class SharedGroup:
    """Collectives of CPU tensors between the processes of a host. On Linux only.

    Methods that take tensors return a text that says what is wrong with them, before anything is
    sent, where the tensors are not taken as they are.
    """

    def __init__(
        self,
        tensor_type: type,
        ops: tuple[object, ...],
        raise_failure: Callable[[str, str, list[int]], NoReturn],
        fd: int,
        rank: int,
        size: int,
        timeout_seconds: float,
    ) -> None: ...
    @staticmethod
    def segment_bytes(size: int) -> int:
        """How large the memory that is shared must be at first."""

    @property
    def is_crowded(self) -> bool:
        """Whether there are more ranks than cores for them."""

    def join(self, keeps_segment: bool) -> None:
        """Meets all other ranks for the first time. Memory that is not kept cannot grow."""

    def all_reduce(self, op: object, terms: Sequence[Tensor], count: int | None) -> str | None:
        """Combines the terms in place, or returns why they are not taken."""

    def reduce_scatter(
        self, op: object, terms: Sequence[Tensor], count: int | None
    ) -> Tensor | str:
        """Returns the part of this rank, or why the terms are not taken."""

    def reduce_parts(self, op: object, terms: Sequence[Tensor]) -> str | None:
        """Combines the part of this rank in place, or returns why the terms are not taken."""

    def gather(self, tensor: Tensor, root: int | None) -> list[Tensor] | str | None:
        """Returns the tensors of all ranks where they are wanted, or why it is not taken."""

    def lead(
        self,
        greeting: bytes,
        terms: Sequence[Tensor],
        work: Callable[[list[Tensor]], None] | None,
    ) -> list[bytes] | str | None:
        """Gives `work` on rank 0 the terms of all ranks, and its first term then to all.

        Without `work`, ranks only greet each other. Returns the greetings if ranks have different
        ones, and why if the terms are not taken.
        """

    def share_parts(self, tensor: Tensor) -> str | None:
        """Overwrites the part of every rank in place, or returns why it is not taken."""

    def broadcast(self, tensor: Tensor, root: int) -> str | None:
        """Overwrites the tensor in place, or returns why it is not taken."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns bytes of the arena."""

    def set_timeout(self, seconds: float) -> None:
        """Says how long collectives may wait for other ranks."""

    def check_health(self) -> None:
        """Raises if a rank is lost."""

    def close(self) -> None:
        """Leaves the group."""

    def fail(self, kind: str, text: str, ranks: Sequence[int]) -> NoReturn:
        """Ends the group on all ranks, and raises."""
