"""An MPI process that reduces through mpi4py on request. Needs mpi4py and numpy, and no torch.

    mpirun -n 2 python mpi_ranks.py SOCKET

The benchmark listens at SOCKET; every process first says which rank it is. While others have their
turn it sleeps there, where MPI itself would spin. Its neighbor in this folder is imported without
the package, which would bring torch along.
"""

import sys
from multiprocessing.connection import Client

import numpy as np
from mpi4py import MPI
from turns import Competitor, serve, sum_factor  # type: ignore[import-not-found]


def main() -> None:
    """Tells the benchmark which rank this is, and answers until the end."""
    world = MPI.COMM_WORLD

    def prepare(num_bytes: int) -> dict[str, Competitor]:
        data = np.zeros(num_bytes // 4, np.float32)
        # In place, as the others do; MPI needs one copy less so.
        call = lambda: world.Allreduce(MPI.IN_PLACE, data)  # noqa: E731
        return {"flat MPI": Competitor(call, data, sum_factor(world.size))}

    with Client(sys.argv[1]) as pipe:
        pipe.send((world.rank, MPI.Get_library_version().split(",")[0].strip()))
        serve(pipe, world.rank, prepare, world.Barrier)


if __name__ == "__main__":
    main()
