"""Draws orders.svg: one training step on four ranks under three orders, which appears as time passes and then stays.

    python docs/pictures/orders.py [FILE.svg]

Where the reader prefers no motion, the picture stands still.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import minidl as ml
from minidl.core.draw import timeline_svg

RANKS, MICRO_BATCHES = 4, 8
ORDERS = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "zb_h1": "ZB-H1, weight gradients out of order"}
SECONDS = 12  #: of a round; in the last third of it the whole picture is seen
STYLE = f"""<style>.cover{{display:none}}
@media(prefers-reduced-motion:no-preference){{.cover{{display:inline;animation:pass {SECONDS}s linear infinite}}}}
@keyframes pass{{from{{transform:translateX(0)}}66%,to{{transform:translateX(100%)}}}}</style>"""


def moving(svg: str) -> str:
    """The picture under covers that move to the right, each with a line at the present."""
    tracks = [[float(v) for v in m] for m in re.findall(
        r'class="track" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', svg)]
    covers = []
    for first in range(0, len(tracks), RANKS):  # one for each order, so that the titles stay in sight
        (left, top, width, _), (_, last, _, tall) = tracks[first], tracks[first + RANKS - 1]
        covers.append(f'<svg x="{left}" y="{top}" width="{width + 2}" height="{last + tall - top}">'
                      f'<g class="cover"><rect class="card" width="{width + 2}" height="500" opacity="0.9"/>'
                      f'<rect class="ink" width="1.5" height="500"/></g></svg>')
    return svg.replace("</svg>", f"{STYLE}{''.join(covers)}</svg>")


def picture() -> str:
    plans = [ml.plan(ml.Pipeline(MICRO_BATCHES), name, machine=ml.Machine(RANKS)) for name in ORDERS]
    return moving(timeline_svg(*(plan.timeline for plan in plans), titles=[*ORDERS.values()]))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    target.write_text(picture())
