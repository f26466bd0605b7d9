#!/usr/bin/env bash
# torch 2.13.0, torch.profiler on the CPU, export_chrome_trace.
# One would guess that a JSON writer escapes names, since a range that a user names with record_function may hold any text.
# The writer changes names in place of escaping them: a backslash comes back as a slash, a newline is left out, and a name
# with a tab is "unknown". A double quote is written as it is, so the whole file is no JSON, and no reader opens it. The
# profiler says nothing.
# It matters because names are often made from data, such as a dictionary's key with its quotes: hours of tracing end in
# a file that every tool calls damaged. Replace quotes in names before record_function.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0"
cat > "$folder/seen.py" <<'EOF'
import json
import sys

import torch
from torch.profiler import ProfilerActivity, profile, record_function


def written(name: str) -> str:
    with profile(activities=[ProfilerActivity.CPU]) as found, record_function(name):
        torch.ones(4).sum()
    found.export_chrome_trace(sys.argv[1])
    try:
        (own,) = [e["name"] for e in json.load(open(sys.argv[1]))["traceEvents"] if e.get("cat") == "user_annotation"]
        return own
    except json.JSONDecodeError:
        return "(the file is no JSON)"


expected = {"plain": "plain", "back\\slash": "back/slash", "two\nlines": "twolines", "a\ttab": "unknown",
            'state["weight"]': "(the file is no JSON)"}
seen = {name: written(name) for name in expected}
for name, found in seen.items():
    print(f"torch {torch.__version__}, record_function({name!r}): {found}")
if seen != expected:
    sys.exit("names come back otherwise")
EOF
if ! "$folder/venv/bin/python" "$folder/seen.py" "$folder/trace.json" 2> "$folder/err"; then
    echo "changed: quotes are escaped now, or other characters otherwise, or it failed: $(tail -n 1 "$folder/err")" >&2
    exit 1
fi
