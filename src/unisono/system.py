"""What only some systems have.

Everything here is on Linux. macOS and Windows train through torch, and lack shared memory between
processes; Windows also lacks `poll`, and with it connections between workers. No other module of
the core names a function that a system may lack, but those that only Linux gets to.
"""

from __future__ import annotations

import ctypes
import errno
import getpass
import os
import platform
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.errors import TuningError, UnsupportedError
from unisono.sharing import computed_once

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# Names the tuning file.
TUNING = "UNISONO_TUNING"
_GET_ADDRESS = 0x8915
_NAME_BYTES = 15


def cores() -> set[int]:
    """Returns the cores that the current thread may use; empty where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def give_way() -> None:
    """Lets others have the core that the current thread runs on, if they need it."""
    os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)


def openmp_cores() -> set[int]:
    """Returns the cores of OpenMP's places; empty if OpenMP binds no threads.

    OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY bind the main thread to one place as soon as
    torch is imported, and every thread that it starts inherits that. The places are made of the
    cores that the process had before.
    """
    try:
        openmp = _loaded_libraries()
        places = range(openmp.omp_get_num_places())
        found: set[int] = set()
        for place in places:
            numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
            openmp.omp_get_place_proc_ids(place, numbers)
            found.update(numbers)
        return found
    except (OSError, AttributeError, TypeError):
        # The OpenMP runtime, if there is one, cannot be asked. Windows wants a name.
        return set()


def process_cores() -> set[int]:
    """Returns the cores of this process; empty where the system does not say."""
    return own | openmp_cores() if (own := cores()) else own


def use_all_cores() -> None:
    """Lets the current thread use all cores of the process if OpenMP has bound its creator."""
    if (places := openmp_cores()) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, places | cores())


@computed_once
def _loaded_libraries() -> ctypes.CDLL:
    """Returns all libraries of the process, as one.

    `ctypes` makes classes for a library, and free-threaded Python 3.13 never frees a class.
    """
    return ctypes.CDLL(None)


def after_fork_in_child(call: Callable[[], object]) -> None:
    """Calls `call` in every process that is forked from this one, where processes can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def lock_across_forks() -> Any:
    """Returns a reentrant lock, which another thread may hold when the process is forked."""
    lock: Any = threading.RLock()
    # Where no process can be forked, it has no such method.
    after_fork_in_child(lambda: lock._at_fork_reinit())
    return lock


def user() -> str:
    """Returns who runs this process: a number, or a name on Windows."""
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


def is_local(connected: socket.socket) -> bool:
    """Returns whether a socket connects processes of one host, without a network."""
    return connected.family == getattr(socket, "AF_UNIX", None)


def boot_id() -> str | None:
    """Returns what Linux calls its last start; None elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def namespace(kind: str) -> str:
    """Returns the namespace of that kind, such as "net", that this process is in; "" if unknown."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def sees_own_processes() -> bool:
    """Whether /proc shows processes under the numbers that they have for this process.

    It does not in a container that numbers its processes itself, and has the /proc of its host.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def process_start(process_id: int) -> str | None:
    """Returns when a process of this machine has started, in Linux's own count.

    None means that it has ended, though its parent may not know yet, or that nothing is known of it
    because this is not Linux.
    """
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # Nothing else counts, such as too many open files here.
        return None
    # The name of the program stands in brackets and may hold brackets itself.
    state, *numbers = status.rpartition(")")[2].split()
    return None if state in "ZX" else numbers[18]


def processor() -> str:
    """Returns the name of the processor, as precisely as the system knows it."""
    try:
        # Python's own answer is empty on most Linux systems.
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def interface_address(name: str) -> str:
    """Returns the IPv4 address of a network interface, such as eth0."""
    if fcntl is None or platform.system() != "Linux":
        raise OSError(errno.ENOTSUP, "only Linux can be asked for it")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:_NAME_BYTES])
        return socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24])


def create_segment(num_bytes: int) -> int:
    """Returns a descriptor of new memory that can grow, of which pages are used when touched."""
    if fcntl is None or not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOTSUP, "memory without a name takes Linux")
    fd = os.memfd_create("unisono", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    # A process that shrank it would end the others with SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def check_connections() -> None:
    """Raises unless this system can watch many connections at a time."""
    if not hasattr(select, "poll"):
        raise UnsupportedError(
            f"Several workers need `poll`, which {platform.system()} lacks. Use MirroredStrategy, "
            "which trains in one process, or run the workers on Linux or macOS."
        )


def tuning_path() -> Path:
    """Returns the path of the file: UNISONO_TUNING, or a file in the user's cache."""
    named = os.environ.get(TUNING)
    if named and named != "off":
        return Path(named)
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise TuningError(
            f"There is no home folder for the tuning file: {error} Set {TUNING} to a path, or set "
            f"{TUNING}=off."
        ) from error
    return Path(cache) / "unisono" / "tuning.json"


def is_tuned() -> bool:
    """Whether a tuning file is to be read."""
    named = os.environ.get(TUNING)
    if named:
        return named != "off"
    try:
        # Unlike `Path.exists`, also False if a parent folder cannot be read.
        return os.path.exists(tuning_path())
    except TuningError:
        # The caller reads it, and gets this error.
        return True
