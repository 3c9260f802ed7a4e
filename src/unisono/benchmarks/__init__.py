"""What `unisono bench` measures: sweeps whose competitors take turns, and their rows."""

from unisono.benchmarks.all_reduce import AllReduceSweep
from unisono.benchmarks.failure import BenchmarkError
from unisono.benchmarks.reduce import ReduceSweep
from unisono.benchmarks.rows import Row, Sweep
from unisono.benchmarks.training_step import StepSweep

__all__ = ["AllReduceSweep", "BenchmarkError", "ReduceSweep", "Row", "StepSweep", "Sweep"]
