#!/usr/bin/env bash
# jax and jaxlib 0.10.2, jax.profiler.trace, which writes NAME.trace.json.gz beside NAME.xplane.pb.
# One would guess that both hold what ran, since a profile of a few seconds of Python fits in a few megabytes.
# The JSON ends after 1,000,000 events: it has the first ones, and nothing in the file or on the terminal says that the
# rest is missing, not even a long call at the end. The names of the late calls are in the protobuf.
# It matters because every call of Python counts: a second of tracing hides the steps of training that came after it,
# and time that a tool adds up from the JSON (makespan, busy time of a device) is too short.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax==0.10.2" "jaxlib==0.10.2"
cat > "$folder/seen.py" <<'EOF'
import glob
import gzip
import json
import sys
import time

import jax


def call():
    pass


def late_and_long():
    time.sleep(0.05)


folder = sys.argv[1]
with jax.profiler.trace(folder):
    for _ in range(1_200_000):
        call()
    late_and_long()

(path,) = glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz")
trace = json.load(gzip.open(path))
names = [e["name"].split()[-1] for e in trace["traceEvents"] if e.get("ph") == "X"]
(other,) = glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")
whole = b"late_and_long" in open(other, "rb").read()
print("jax", jax.__version__, "keys of the JSON:", sorted(trace))
print(f"1,200,000 calls: {names.count('call'):,} in the JSON, of {len(names):,} events in all")
print("late_and_long in the JSON:", "late_and_long" in names, "; in the protobuf:", whole)
sys.exit(not (len(names) == 1_000_000 and "late_and_long" not in names and whole))
EOF
if ! "$folder/venv/bin/python" "$folder/seen.py" "$folder/trace" 2> "$folder/err"; then
    echo "changed: JAX's JSON no longer ends after 1,000,000 events, or failed: $(tail -n 1 "$folder/err")" >&2
    exit 1
fi
if grep -qiE "drop|truncat|limit|missing" "$folder/err"; then
    echo "changed: JAX now says that events are missing" >&2
    exit 1
fi
