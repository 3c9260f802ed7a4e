"""Checks the wheel that is installed in the environment of the interpreter that runs this.

python -I tests/installed_wheel.py unisono-0.1.0-cp312-abi3-linux_x86_64.whl
"""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

import unisono
from unisono import _native

# Without the interpreter lock there is no stable ABI yet.
IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
STABLE = sys.version_info >= (3, 12) and not IS_FREE_THREADED


def main(wheel: str) -> None:
    """Fails with what is wrong."""
    package = Path(unisono.__file__).parent
    _, version, interpreter, abi, _ = Path(wheel).stem.split("-")

    assert package.is_relative_to(sys.prefix), f"{package} is not that of the wheel"
    assert version == unisono.__version__ == importlib.metadata.version("unisono")
    assert (abi == "abi3") == STABLE, f"{wheel} for Python {sys.version}"
    assert (".abi3." in _native.__file__) == STABLE, f"{_native.__file__} in {wheel}"
    assert STABLE or interpreter == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert abi.endswith("t") == IS_FREE_THREADED, f"{wheel} for Python {sys.version}"
    # A module that does not declare that it needs no lock would have turned the lock on.
    assert getattr(sys, "_is_gil_enabled", lambda: True)() != IS_FREE_THREADED
    tools = package.with_name("unisono_tools")
    mpi_ranks = tools / "benchmarks" / "peers" / "mpi_ranks.py"
    for path in (package / "py.typed", package / "_native.pyi", tools / "py.typed", mpi_ranks):
        assert path.is_file(), f"{path} is not in {wheel}"
    values = unisono.PerReplica([1.0, 2.0])
    total = unisono.ReductionToOneDevice().reduce(unisono.ReduceOp.SUM, values, "cpu:0")
    assert float(total) == 3.0


main(sys.argv[1])
