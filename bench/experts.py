"""A GPT with experts: minidl against torch eager, both with one thread, steps interleaved.

    python bench/experts.py [--seconds 20] [--tasks 10] [--out FILE.json]                      needs the extra `parity`

`moe_gpt` small (4 layers, 128 wide, 8 experts of 512, of which a token uses 2) on 8 rows of 128 tokens of 256 kinds;
AdamW, with the balance loss, without dropout. Torch runs one expert after the other, from the same weights.
"""

from __future__ import annotations

from against_torch import Case, main
from language import BATCH, sides

CASES = {"moe_gpt": Case("moe_gpt", {"dropout": 0.0}, BATCH, 0.7, False, "small")}

if __name__ == "__main__":
    raise SystemExit(main(__doc__, "experts", CASES, sides))
