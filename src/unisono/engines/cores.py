"""The cores that replicas may run on."""

from __future__ import annotations

import ctypes

from unisono.sharing import computed_once
from unisono.system import cores, use_cores


def openmp_cores() -> set[int]:
    """Returns the cores of OpenMP's places; empty if OpenMP binds no threads.

    OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY bind the main thread to one place as soon as
    torch is imported, and every thread that it starts inherits that. The places are made of the
    cores that the process had before.
    """
    try:
        openmp = _loaded_libraries()
        places = range(openmp.omp_get_num_places())
        return {core for place in places for core in _cores_of(openmp, place)}
    except (OSError, AttributeError, TypeError):
        # The OpenMP runtime, if there is one, cannot be asked. Windows wants a name.
        return set()


def process_cores() -> set[int]:
    """Returns the cores of this process; empty where the system does not say."""
    return own | openmp_cores() if (own := cores()) else own


def use_all_cores() -> None:
    """Lets the current thread use all cores of the process if OpenMP has bound its creator."""
    if places := openmp_cores():
        use_cores(places | cores())


@computed_once
def _loaded_libraries() -> ctypes.CDLL:
    """Returns all libraries of the process, as one.

    `ctypes` makes classes for a library, and free-threaded Python 3.13 never frees a class.
    """
    return ctypes.CDLL(None)


def _cores_of(openmp: ctypes.CDLL, place: int) -> list[int]:
    numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
    openmp.omp_get_place_proc_ids(place, numbers)
    return list(numbers)
