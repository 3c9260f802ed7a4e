"""The native core: fused reductions of tensors in host memory."""

from collections.abc import Sequence

from torch import Tensor

def instruction_set() -> str:
    """The instruction set that was chosen for this processor: avx2 or baseline."""

def memory_use() -> tuple[int, int]:
    """The bytes in use by results, and the bytes kept for later ones."""

def trim() -> None:
    """Gives memory kept for later results back to the system."""

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

    def wait_after(self, other: Bell, seen: int, timeout_s: float) -> bool:
        """Rings another bell, once it has let go of the interpreter, and waits."""
