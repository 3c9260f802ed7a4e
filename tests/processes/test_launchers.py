"""The recipes of docs/launchers.md, run as they are written, on this host."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes.ports import free_port
from processes.programs import clean_environment, run, run_together
from unisono_tools.namespaces import is_open_mpi

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text()
FOLDERS = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
# Open MPI refuses otherwise to start for root, or more processes than there are cores.
WISHES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def recipe(title: str) -> str:
    """The first commands of a section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return str(re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the program of the page is."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:1]
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "python").symlink_to(sys.executable)
    return tmp_path


def bash(folder: Path, script: str) -> list[str | Path]:
    return ["bash", "-c", f"cd {folder} && {script}"]


def environment(**variables: str) -> dict[str, str]:
    return clean_environment(PATH=FOLDERS, OMP_NUM_THREADS="1", **variables)


def test_torchrun_on_two_nodes(folder: Path) -> None:
    torchrun = f"{sys.executable} -m torch.distributed.run"
    script = recipe("torchrun").replace("=...", "=secret").replace("torchrun ", f"{torchrun} ")
    script = script.replace("node0:29400", f"127.0.0.1:{free_port()}")
    script = script.replace("--nproc-per-node=4", "--nproc-per-node=1")

    ended = run_together(bash(folder, script), [environment()] * 2)

    for status, output, errors in ended:
        assert status == 0, errors
        assert "2 replicas" in output


@pytest.mark.parametrize("name", ["mpirun", "mpiexec"])
def test_mpi(folder: Path, name: str) -> None:
    launcher = shutil.which(name, path=FOLDERS)
    if launcher is None or is_open_mpi([launcher]) is not (name == "mpirun"):
        pytest.skip(f"there is no {name} of {'Open MPI' if name == 'mpirun' else 'MPICH'}")
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    lines = recipe("MPI").splitlines()
    script = "\n".join(one for one in lines if one.startswith(("export", f"{name} ")))
    script = script.replace(" -n 8 ", " -n 2 ").replace("node0:2222", f"127.0.0.1:{free_port()}")

    status, output, errors = run(bash(folder, script), environment(**WISHES))

    assert status == 0, errors
    assert output.count("2 replicas") == 2


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("ray", "pandas", "pyarrow")), reason="needs Ray Train"
)
def test_ray_train(folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")

    # Ray writes a token into the home folder.
    status, _, errors = run(
        bash(folder, recipe("Ray Train")), environment(HOME=str(folder)), timeout_seconds=250
    )

    assert status == 0, errors
