"""Sums over ranks of numbers for which libraries' own sums depend on length, position and call: 1e8, 1 and -1e8 in
every order. In float32 their sum is 0 or 1, by the order of the additions."""

from __future__ import annotations

import hashlib
from itertools import permutations
from typing import Any

import numpy as np

from minidl.core.tasks import Kind
from minidl.runtime.comm import Host

RANKS = 3
#: in one exchange and in two, with a length that is no multiple of the ranks, and beyond libraries' short messages
COUNTS = {"float32": (1, 5000, 20_000, 300_000), "float64": (5000, 20_000)}


def rows(count: int, dtype: str) -> Any:
    """What each rank has: an order of the three numbers at each place, and one NaN and one infinity."""
    large = 1e8 if dtype == "float32" else 1e16
    orders = np.array(list(permutations([large, 1, -large])), dtype)
    found = np.ascontiguousarray(np.resize(orders, (count, RANKS)).T)
    if count > 5:
        found[1, count // 2], found[2, count // 3] = np.nan, np.inf
        found[:, count // 4] = np.nan, 1, 1  # MPICH's MIN gives each rank another value of these
    return found


def check(communicator: Any) -> str:
    """Sums them in all ways; AssertionError if a bit differs from the additions in the order of ranks. Returns a digest
    of all results, which is the same on all ranks of all transports."""
    digest, rank = hashlib.sha256(), communicator.rank
    for dtype, counts in COUNTS.items():
        for count in counts:
            given = rows(count, dtype)
            wanted = (given[0] + given[1] + given[2]) * given.dtype.type(1 / RANKS)
            for kinds in ((Kind.A,), (Kind.AS, Kind.AG)):  # whole, and by way of shards
                for ends in ([], [count // 7, count // 2]):  # one gradient, and three in one transfer
                    mine = np.split(given[rank].copy(), ends)
                    place = Host(communicator, mine)
                    for call in range(2):  # the same transfer, started again
                        for array, values in zip(mine, np.split(given[rank], ends), strict=True):
                            array[...] = values
                        for kind in kinds:
                            for _ in communicator.bind(kind, place, call)():
                                communicator.check()
                        found = np.concatenate(mine)
                        different = np.flatnonzero(found.view(np.uint8) != wanted.view(np.uint8))
                        assert not different.size, f"{dtype} {count} {kinds} {ends} call {call}: byte {different[0]}"
                        digest.update(found.tobytes())
    return digest.hexdigest()


def main() -> None:
    """One rank under mpiexec; rank 0 prints the library and the digest."""
    from minidl.runtime.comm.mpi import MPI

    communicator = MPI()
    assert communicator.size == RANKS
    digests = communicator.gather(check(communicator))
    assert len(set(digests)) == 1
    if communicator.rank == 0:
        print(communicator.library.split(" ")[0], digests[0])
    communicator.close()


if __name__ == "__main__":
    main()
