"""Where reverse first-k is faster than priority: simulated, by amount of communication and unevenness of the layers.

    python bench/first_k_map.py [--layers 16] [--out FILE.json]

All layers have the same computation (F = O = W = 1). Total communication is `ratio` times the computation, and falls by
a factor e^unevenness from the first layer to the last (negative: it grows, as in a network that ends in a large
matrix).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import save

import minidl as ml
from minidl import schedulers
from minidl.schedulers.layer_times import layers

RATIOS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
UNEVENNESS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
PARTS = 8


def point(count: int, ratio: float, unevenness: float) -> dict[str, Any]:
    """The periods of both, the bound, and k."""
    ones = [1.0] * count
    weight = np.exp(-unevenness * np.linspace(0, 1, count))
    comm = ratio * (3 * count - 1) * weight / weight.sum()
    found = {}
    for name in ("barrier", "priority", "reverse_first_k"):
        graph, cost = layers(ones, ones, ones, parts=PARTS)
        machine = ml.Machine(2, collective=lambda sizes: sum(comm[u] * n / PARTS for u, n in sizes.items()))
        found[name] = ml.plan(graph, name, cost, machine, **schedulers.find(name).known(part_bytes=1))
    return {"ratio": ratio, "unevenness": unevenness, "k": found["reverse_first_k"].notes["k"],
            "bound": found["priority"].notes["lower_bound"], **{name: p.period for name, p in found.items()},
            "gain": found["priority"].period / found["reverse_first_k"].period,
            "gain_over_barrier": found["barrier"].period / found["reverse_first_k"].period}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    points = [point(arguments.layers, r, u) for u in UNEVENNESS for r in RATIOS]
    print("gain over priority (over barrier), k\n" + " " * 11 + "".join(f"{r:>18g}" for r in RATIOS))
    for i, u in enumerate(UNEVENNESS):
        row = points[i * len(RATIOS) : (i + 1) * len(RATIOS)]
        print(f"{u:>10g} " + "".join(f"{p['gain']:7.2f} ({p['gain_over_barrier']:.2f}) {p['k']:3}" for p in row))
    save("first_k_map",
         {"what": "simulated", "layers": arguments.layers, "parts": PARTS, "points": points}, arguments.out)


if __name__ == "__main__":
    main()
