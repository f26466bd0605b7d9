#!/usr/bin/env bash
# OR-Tools 9.15.6755, CP-SAT.
# One would guess: an interval of size 0 takes no time, so it may lie anywhere; and a machine that does one thing at a
# time is add_no_overlap, or add_cumulative with a capacity of 1, which mean the same.
# What happens: add_no_overlap forbids an empty interval strictly inside another one, and allows it at both ends;
# add_cumulative allows it everywhere.
# Why it matters: a schedule with tasks that take no time (a barrier, a message within a device, a time rounded to 0) is
# said to be infeasible, or an "optimum" is proved that is longer than what a list scheduler finds.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q ortools==9.15.6755
cat > seen.py <<'PY'
import sys

from ortools.sat.python import cp_model

seen = {}
for kind in ("no_overlap", "cumulative"):
    for start in range(3):
        model = cp_model.CpModel()
        task = model.new_fixed_size_interval_var(0, 2, "task")
        empty = model.new_fixed_size_interval_var(start, 0, "empty")
        if kind == "no_overlap":
            model.add_no_overlap([task, empty])
        else:
            model.add_cumulative([task, empty], [1, 1], 1)
        solver = cp_model.CpSolver()
        seen[kind, start] = solver.status_name(solver.solve(model))
        print(f"{kind}, a task from 0 to 2 and an empty one at {start}: {seen[kind, start]}")
wanted = {key: "INFEASIBLE" if key == ("no_overlap", 1) else "OPTIMAL" for key in seen}
sys.exit(0 if seen == wanted else "this has changed")
PY
env/bin/python seen.py
