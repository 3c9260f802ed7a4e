"""The start of a worker process: it will end with the launcher, and becomes the script.

Runs as a file and imports nothing of Unisono, so that a worker starts without delay.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

PLAN = "UNISONO_LAUNCH_PLAN"
_PR_SET_PDEATHSIG = 1
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_R")


def main() -> None:
    """Becomes the command of the plan that the launcher has put in the environment."""
    plan = json.loads(os.environ.pop(PLAN))
    die_with(plan["launcher"])
    if plan["tf_configs"]:
        become_task(plan["tf_configs"][int(os.environ["LOCAL_RANK"])])
    os.execv(plan["command"][0], plan["command"])


def die_with(launcher: int) -> None:
    """Lets the kernel end this process when the launcher ends, however that happens."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl cannot tie the worker to its launcher")
    if os.getppid() != launcher:
        sys.exit("The launcher has ended before its worker began.")


def become_task(tf_config: str) -> None:
    """Changes the environment to that of a task started by hand, in its own shell."""
    for name in [name for name in os.environ if name.startswith(_TORCHRUN)]:
        del os.environ[name]
    os.environ["TF_CONFIG"] = tf_config


if __name__ == "__main__":
    main()
