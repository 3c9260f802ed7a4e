"""The cores that replicas may run on."""

from __future__ import annotations

import ctypes
import os


def openmp_cores() -> set[int]:
    """Returns the cores of OpenMP's places; empty if OpenMP binds no threads.

    OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY bind the main thread to one place as soon as
    torch is imported, and every thread that it starts inherits that. The places are made of the
    cores that the process had before.
    """
    try:
        openmp = ctypes.CDLL(None)
        places = range(openmp.omp_get_num_places())
        return {core for place in places for core in _cores_of(openmp, place)}
    except (OSError, AttributeError):
        # The OpenMP runtime, if there is one, cannot be asked.
        return set()


def process_cores() -> set[int]:
    """Returns the cores of this process; empty where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    return os.sched_getaffinity(0) | openmp_cores()


def use_all_cores() -> None:
    """Lets the current thread use all cores of the process if OpenMP has bound its creator."""
    if hasattr(os, "sched_setaffinity") and (cores := openmp_cores()):
        os.sched_setaffinity(0, cores | os.sched_getaffinity(0))


def _cores_of(openmp: ctypes.CDLL, place: int) -> list[int]:
    cores = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
    openmp.omp_get_place_proc_ids(place, cores)
    return list(cores)
