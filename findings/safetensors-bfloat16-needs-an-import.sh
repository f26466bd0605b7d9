#!/usr/bin/env bash
# safetensors 0.8.0 with numpy 2.4.6 and ml_dtypes 0.6.0.
# One would guess: whether safetensors.numpy.load_file reads a file depends on the file and on what is installed.
# What happens: of a valid file with a BF16 tensor it raises "TypeError: data type 'bfloat16' not understood", although
# ml_dtypes is installed; the same call in the same process works once anything has imported ml_dtypes.
# Why it matters: transformers writes BF16 by default. A reader passes its tests, where some other library imports
# ml_dtypes (JAX does), and fails at its users. Widen the 16 bits yourself, or import ml_dtypes where you read.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0
cat > seen.py <<'PY'
import json
import sys

from safetensors.numpy import load_file

header = json.dumps({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
with open("x.safetensors", "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header + bytes([0x80, 0x3F, 0x00, 0x40]))  # 1 and 2
assert "ml_dtypes" not in sys.modules, "safetensors has imported ml_dtypes itself"
try:
    before = str(load_file("x.safetensors"))
except TypeError as error:
    before = f"TypeError: {error}"
print("before:", before)
import ml_dtypes  # noqa: E402, F401

after = load_file("x.safetensors")["x"]
print("after: ", after, after.dtype)
sys.exit(0 if "not understood" in before and after.tolist() == [1, 2] else "this has changed")
PY
env/bin/python seen.py
