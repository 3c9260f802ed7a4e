"""What `unisono bench` measures: sweeps whose competitors take turns, and their rows."""

from unisono_tools.benchmarks.all_reduce import AllReduceSweep
from unisono_tools.benchmarks.failure import BenchmarkError
from unisono_tools.benchmarks.reduce import ReduceSweep
from unisono_tools.benchmarks.rows import Row, Sweep
from unisono_tools.benchmarks.training_step import StepSweep

__all__ = ["AllReduceSweep", "BenchmarkError", "ReduceSweep", "Row", "StepSweep", "Sweep"]
