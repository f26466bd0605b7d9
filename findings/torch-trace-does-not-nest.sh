#!/usr/bin/env bash
# torch 2.13.0, torch.profiler on the CPU with with_stack=True, export_chrome_trace.
# One would guess that the complete events ("X") of one thread nest, each within another or beside it, as the Trace Event
# format asks: a stack that is popped when a call ends then gives each call its parent, and self times add up.
# They cross: the range of Optimizer.step begins within the Python call that opens it (_record_function_enter_), and ends
# after it; at its end it crosses __exit__ in the same way. So do zero_grad and every record_function.
# It matters because a parser that trusts the format takes the optimizer's operations for children of a call that had
# ended before them, and counts negative self time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0"
cat > "$folder/seen.py" <<'EOF'
import json
import sys
from collections import Counter, defaultdict
from decimal import Decimal

import torch
from torch.profiler import ProfilerActivity, profile

net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
crossed = {}
for with_stack in (False, True):
    with profile(activities=[ProfilerActivity.CPU], with_stack=with_stack) as found:
        optimizer.zero_grad()
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    found.export_chrome_trace(sys.argv[1])
    threads = defaultdict(list)
    for e in json.load(open(sys.argv[1]), parse_float=Decimal)["traceEvents"]:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], -e["ts"] - e["dur"], e["name"]))
    pairs = Counter()
    for events in threads.values():
        around = []
        for begin, end, name in sorted(events):
            around = [(until, outer) for until, outer in around if until > begin]
            pairs.update((outer.split(":")[-1], name.split(":")[-1]) for until, outer in around if until < -end)
            around.append((-end, name))
    crossed[with_stack] = pairs
    print(f"torch {torch.__version__}, with_stack={with_stack}: {pairs.total()} pairs of calls cross on one thread")
    for (outer, name), number in pairs.most_common(6):
        print(f"    {number} x {outer[:50]!r} ends within {name[:50]!r}")
optimizer_ranges = [pair for pair in crossed[True] if any("Optimizer.step" in name for name in pair)]
sys.exit(not (len(optimizer_ranges) >= 2 and not crossed[False]))
EOF
if ! "$folder/venv/bin/python" "$folder/seen.py" "$folder/trace.json" 2> "$folder/err"; then
    echo "changed: calls nest now, or cross without stacks too, or it failed: $(tail -n 1 "$folder/err")" >&2
    exit 1
fi
