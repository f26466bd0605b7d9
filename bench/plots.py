"""Pictures of the records in `bench/results/`, for docs/results.md; needs the extra `plot`.

    python bench/plots.py [NAME ...]        draws bench/results/NAME.svg; without names, all of them

A bar is a median, its line goes from the 10th to the 90th percentile, a cross is a prediction. Colours come from
`minidl.core.draw`; they differ for every kind of colour vision.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

from common import RESULTS
from tradeoff import diverges

BLUE, ORANGE, GREEN, PINK, RED, GREY = "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#9aa1a9"
Record = dict[str, Any]


def grid(panels: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure and its panels; places that are left over stay empty."""
    from matplotlib import pyplot

    rows = -(-panels // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False,
                                   layout="constrained")
    for panel in axes.flat[panels:]:
        panel.remove()
    return figure, list(axes.flat[:panels])


def bars(panel: Any, values: Sequence[dict[str, float]], *, at: Iterable[float] | None = None, width: float = 0.8,
         color: str = BLUE, label: str = "", upright: bool = True) -> None:
    """Bars from spreads: `median`, `p10` and `p90`."""
    middle = np.array([v["median"] for v in values])
    spread = np.abs(np.array([[v["p10"], v["p90"]] for v in values]).T - middle)
    places = np.arange(len(values)) if at is None else np.array(list(at))
    draw, error = (panel.bar, {"yerr": spread}) if upright else (panel.barh, {"xerr": spread})
    draw(places, middle, width, color=color, label=label, error_kw={"elinewidth": 1}, capsize=2, **error)


def legend(figure: Any, panel: Any) -> None:
    """One legend below all panels."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)


def beneath(panel: Any, names: Iterable[str]) -> None:
    names = list(names)
    panel.set_xticks(range(len(names)), names, rotation=55, ha="right", rotation_mode="anchor", fontsize=7)


# -------------------------------------------------------------------------------------------------------------- records
def mlp(record: Record) -> Any:
    """The time of torch over the time of minidl, one stream."""
    rows = [(f"{name}: {key.removeprefix('against ')}", value) for name, entry in record["networks"].items()
            for key, value in entry.items() if key.startswith("against torch")]
    figure, (panel,) = grid(1, 1, (8, 0.3 * len(rows) + 1))
    bars(panel, [value for _, value in rows], upright=False, width=0.6)
    panel.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    panel.invert_yaxis()
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xlabel("time of torch / time of minidl in order (right of 1: minidl is faster)", fontsize=8)
    return figure


def single_device(record: Record) -> Any:
    """The time of one stream over the time of two, for each way to use two."""
    arms = {"multi_stream": BLUE, "multi_region": ORANGE, "multi_region, border kept": GREEN, "published map": PINK}
    networks = record["networks"]
    figure, (panel,) = grid(1, 1, (10, 4))
    for i, (arm, color) in enumerate(arms.items()):
        bars(panel, [entry["against"][f"in_order / {arm}"] for entry in networks.values()], width=0.2, color=color,
             at=np.arange(len(networks)) + 0.2 * (i - 1.5), label=arm)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_ylim(bottom=0.7)
    panel.set_ylabel("time of one stream / of two", fontsize=8)
    panel.set_xticks(range(len(networks)), [name.replace("mobilenet_v3_large", "MobileNetV3").replace(" 32px", "\n32px")
                                            for name in networks], fontsize=8)
    legend(figure, panel)
    return figure


def data_parallel(record: Record) -> Any:
    """A panel for each setting: steps measured and predicted, and the lower bound."""
    settings = record["settings"]
    figure, panels = grid(len(settings), 3, (4, 3.4))
    for s, panel in zip(settings, panels, strict=True):
        arms = s["arms"]
        bars(panel, [a["step_ms"] for a in arms.values()], label="measured")
        panel.plot(range(len(arms)), [a["predicted_ms"] or np.nan for a in arms.values()], "kx", label="predicted")
        panel.axhline(s["lower_bound_ms"], color=RED, linewidth=1, label="lower bound")
        beneath(panel, arms)
        panel.set_title(f"{s['network']}, communication {s['ratio_wanted']:g} of computation", fontsize=8)
        panel.set_ylabel("step, ms", fontsize=8)
    legend(figure, panels[0])
    return figure


def first_k_map(record: Record) -> Any:
    """The gain of reverse first-k over priority, by the shape of the network and the speed of the link."""
    ratios, shapes = (sorted({p[key] for p in record["points"]}) for key in ("ratio", "unevenness"))
    gain = {(p["unevenness"], p["ratio"]): p["gain"] for p in record["points"]}
    table = np.array([[gain[shape, ratio] for ratio in ratios] for shape in shapes])
    figure, (panel,) = grid(1, 1, (7, 4.6))
    image = panel.imshow(table, origin="lower", aspect="auto", cmap="viridis")
    panel.set_xticks(range(len(ratios)), [f"{r:g}" for r in ratios])
    panel.set_yticks(range(len(shapes)), [f"{u:g}" for u in shapes])
    panel.set_xlabel("communication / computation")
    panel.set_ylabel("unevenness (positive: the first layers communicate most)", fontsize=8)
    middle = (table.min() + table.max()) / 2
    for i, j in np.ndindex(table.shape):
        panel.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center",
                   color="white" if table[i, j] < middle else "black")
    figure.colorbar(image, label="period of priority / of reverse first-k, simulated")
    return figure


def pipeline_parallel(record: Record) -> Any:
    """Two panels for each setting: steps and bubbles, measured and predicted."""
    settings = record["settings"]
    figure, panels = grid(2 * len(settings), 2, (5, 2.9))
    for s, (left, right) in zip(settings, zip(panels[::2], panels[1::2], strict=True), strict=True):
        arms = s["arms"]
        bars(left, [a["step_ms"] for a in arms.values()], label="measured")
        left.plot(range(len(arms)), [a["predicted_ms"]["median"] for a in arms.values()], "kx", label="predicted")
        right.bar(range(len(arms)), [100 * a["bubble"] for a in arms.values()], color=BLUE)
        right.plot(range(len(arms)), [100 * a["bubble_predicted"] for a in arms.values()], "kx")
        left.set_ylabel("step, ms", fontsize=8)
        right.set_ylabel("bubble, %", fontsize=8)
        for panel in (left, right):
            panel.set_title(f"{s['network']}, {s['ranks']} ranks, {s['micro_batches']} micro-batches", fontsize=8)
            beneath(panel, arms)
    legend(figure, panels[0])
    return figure


def stale(record: Record) -> Any:
    """A panel for each learning rate: the accuracy on stale weights, and in one process on the newest."""
    rates = list(next(iter(record["arms"].values()))["rates"])
    figure, panels = grid(len(rates), len(rates), (5, 3.6))
    for rate, panel in zip(rates, panels, strict=True):
        for i, (key, label, color) in enumerate((("accuracy", "stale weights", BLUE),
                                                 ("synchronous", "newest weights", GREY))):
            values = [[100 * v if v is not None else np.nan for v in arm["rates"][rate][key]]
                      for arm in record["arms"].values()]
            panel.bar(np.arange(len(values)) + 0.4 * (i - 0.5), [np.mean(v) for v in values], 0.4, color=color,
                      label=f"{label}, mean of {len(values[0])} seeds")
        beneath(panel, record["arms"])
        panel.set_ylim(50, 100)
        panel.set_ylabel("test accuracy, %", fontsize=8)
        panel.set_title(f"learning rate {rate}", fontsize=8)
    legend(figure, panels[0])
    return figure


def batch_size(record: Record) -> Any:
    """Steps to the target against the batch size, and for each sparsity time against ranks under every policy."""
    found = record["sparsities"]
    figure, panels = grid(1 + len(found), 1 + len(found), (4, 3.4))
    for (sparsity, part), color, panel in zip(found.items(), (BLUE, ORANGE, GREEN), panels[1:], strict=False):
        steps = {int(b): k for b, k in part["steps"].items() if k is not None}
        panels[0].plot(list(steps), list(steps.values()), "o-", color=color, label=f"sparsity {sparsity}")
        for policy, line in zip(dict.fromkeys(t["policy"] for t in part["times"]), (GREY, RED, PINK), strict=False):
            mine = [t for t in part["times"] if t["policy"] == policy]
            panel.plot([t["ranks"] for t in mine], [t["ms"] for t in mine], "o-", color=line, label=policy)
        panel.set_title(f"sparsity {sparsity}, predicted", fontsize=8)
        panel.set_xlabel("ranks", fontsize=8)
        panel.set_ylabel("time to target at the best batch size, ms", fontsize=8)
    panels[0].set_xlabel("batch size", fontsize=8)
    panels[0].set_ylabel("steps to target", fontsize=8)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.legend(fontsize=7, frameon=False)
    return figure


def tradeoff(record: Record) -> Any:
    """A panel for each network: accuracy or bits per byte of each method against its predicted time, coloured by how
    late gradients are; without those that diverge."""
    networks = record["networks"]
    figure, panels = grid(len(networks), 1, (9, 5.2))
    latest = max(p["late"] or 0 for n in networks.values() for p in n["points"].values())
    for (name, network), panel in zip(networks.items(), panels, strict=True):
        points = sorted(((label, p) for label, p in network["points"].items()
                         if not diverges(p[network["metric"]], network["metric"])), key=lambda named: named[1]["ms"])
        scale = 100 if network["metric"] == "accuracy" else 1
        x, y = ([p["ms"] for _, p in points], [scale * float(np.mean(p[network["metric"]])) for _, p in points])
        dots = panel.scatter(x, y, c=[p["late"] for _, p in points], cmap="viridis_r", vmin=0, vmax=latest, s=22,
                             edgecolors="black", linewidths=0.4)
        for i, (label, _) in enumerate(points):
            panel.annotate(label, (x[i], y[i]), xytext=((4, -2), (4, 5), (4, -8))[i % 3], fontsize=5,
                           textcoords="offset points")
        panel.set_xscale("log")
        panel.set_xlabel("predicted time of the run, ms", fontsize=8)
        panel.set_ylabel("test accuracy, %" if scale > 1 else "bits per byte (less is better)", fontsize=8)
        panel.set_title(f"{name}, {network['samples']:,} samples", fontsize=8)
        figure.colorbar(dots, ax=panel, label="updates late, mean")
    return figure


def wide_scaling(record: Record) -> Any:
    """A panel for each network: the predicted gain over one core, by the number of cores."""
    networks = record["networks"]
    figure, panels = grid(len(networks), 3, (3.6, 2.6))
    for (name, entry), panel in zip(networks.items(), panels, strict=True):
        for (arm, gains), color in zip(entry["speedup"].items(), (ORANGE, BLUE, GREEN), strict=False):
            cores = [*map(int, gains)]
            panel.plot(cores, [*gains.values()], "o-", color=color, label=arm, markersize=3)
        panel.plot(cores, cores, ":", color=GREY, label="as many times as cores")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_ticks(cores, [*map(str, cores)])
        panel.set_title(name, fontsize=8)
        panel.set_xlabel("cores", fontsize=7)
        panel.set_ylabel("gain, predicted", fontsize=7)
    legend(figure, panels[0])
    return figure


def launches(record: Record) -> Any:
    """Left, the median of each row and kind; right, us a call against the number of calls in one launch."""
    rows = [row for row in record["rows"] if "us" in row and "kernels" not in row]
    fits = [row for row in record["rows"] if "fit" in row]
    figure, panels = grid(1 + bool(fits), 1 + bool(fits), (7.5, 0.17 * len(rows) + 1))
    kinds = {kind: color for kind, color in {"host": BLUE, "first": GREEN, "done": ORANGE, "device": PINK}.items()
             if any(kind in row["us"] for row in rows)}
    for i, (kind, color) in enumerate(kinds.items()):
        found = [(n + 0.8 * ((i + 0.5) / len(kinds) - 0.5), row["us"][kind]) for n, row in enumerate(rows)
                 if kind in row["us"]]
        bars(panels[0], [t for _, t in found], at=[n for n, _ in found], width=0.8 / len(kinds), color=color,
             label=kind, upright=False)
    panels[0].set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=6)
    panels[0].invert_yaxis()
    panels[0].set_xlabel("us a call", fontsize=8)
    for n, row in enumerate(fits):
        kind, fit = list(row["fit"].items())[-1]
        points = {int(at): point["median"] / int(at) for at, point in fit["points"].items()}
        panels[1].plot([*points], [*points.values()], "o-" if n < 10 else "s--" if n < 20 else "^:", color=f"C{n % 10}",
                       markersize=3, linewidth=0.8, label=f"{row['name']} ({kind})")
    for panel in panels:
        panel.set_xscale("log")
        panel.legend(fontsize=6, frameon=False)
    if fits:
        panels[1].set_yscale("log")
        panels[1].set_xlabel("calls, tasks or nodes in one launch", fontsize=8)
        panels[1].set_ylabel("us for each", fontsize=8)
    return figure


PLOTS: dict[str, Callable[[Record], Any]] = {
    "mlp": mlp, "single_device": single_device, "data_parallel_waits": data_parallel, "first_k_map": first_k_map,
    "pipeline_parallel_kernels": pipeline_parallel, "pipeline_parallel_waits": pipeline_parallel, "stale": stale,
    "batch_size": batch_size, "tradeoff": tradeoff, "wide_scaling": wide_scaling, "launch_overhead_cpu": launches,
    "launch_overhead_cuda": launches}


def save(name: str, record: Record, path: Path) -> None:
    """The picture of the record `name` as an SVG that is the same for the same record."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}
    figure = PLOTS[name](record)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"default all: {', '.join(PLOTS)}")
    names = parser.parse_args().names or [name for name in PLOTS if (RESULTS / f"{name}.json").exists()]
    for name in names:
        if name not in PLOTS:
            parser.error(f"no picture of {name!r}; there are {', '.join(PLOTS)}")
        save(name, json.loads((RESULTS / f"{name}.json").read_text()), RESULTS / f"{name}.svg")
        print(RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()
