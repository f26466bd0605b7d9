"""The cost of a launch: for the host that issues it and on the device, by all ways to issue one; streams, events,
graphs.

    python bench/launch_overhead.py [--device cpu|cuda] [--quick] [--json] [--out FILE.json] [--plot FILE.png]

Without --out the record goes to bench/results/launch_overhead_DEVICE.json (with --quick nowhere), after every row; it
says whether it is complete. --plot needs the extra `plot`. Packages that are not installed have a row too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save, write
from launches import CHAINS, Row, measured

from minidl import device as devices

LEGEND = ("host: us that the issuing thread is busy for one call; device: us from one call to the next where they run "
          "(CPU: until it is done);\n"
          "median, and the 10th and 90th percentile.")


def gpu(name: str) -> Any:
    """minidl's device, which needs only CuPy here: other packages have their own rows."""
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if found is None:
        raise devices.DeviceError(f"unknown device {name!r}; known: cpu, cuda, cuda:N")
    from minidl.devices.cuda.device import Cuda
    from minidl.devices.cuda.driver import Driver

    try:
        driver = Driver(int(found[1] or 0))
    except ImportError as error:
        raise devices.DeviceError(f"cuda needs cupy: pip install 'minidl[cuda13]' ({error})") from error
    except Exception as error:  # CuPy has its own error types
        raise devices.DeviceError(f"there is no GPU for {name} here: {error}") from error
    return Cuda(driver, dict, dict, name)


def measure(name: str, quick: bool, keep: Callable[[dict[str, Any]], object] = lambda record: None) -> dict[str, Any]:
    """The record, which `keep` gets after every row. Raises DeviceError for a device that is not available."""
    record: dict[str, Any] = {"device": name, "quick": quick, "unit": "us", "machine": machine(),
                              "complete": False, "rows": []}
    rows: Iterator[Row]
    if name == "cpu":
        import launches_cpu

        rows = launches_cpu.rows(quick)
    else:
        import launches_cuda

        device = gpu(name)
        record["gpu"] = device.driver.describe()
        rows = launches_cuda.rows(device, quick)
    for entry in measured(rows):
        record["rows"].append(entry)
        keep(record)
        print(f"\r{len(record['rows'])} rows  {entry['name']:50.50}", end="", file=sys.stderr)
    print(file=sys.stderr)
    record["complete"] = True
    keep(record)
    return record


# ----------------------------------------------------------------------------------------------------------------- text
def table(record: dict[str, Any]) -> str:
    """One line per row: name, host, device, description."""
    lines, group = [LEGEND], None
    for row in record["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines += ["", f"{group:44} {'host us':>28} {'device us':>28}"]
        if "missing" in row:
            lines.append(f"  {row['name']:42} {row['missing']}")
        else:
            lines.append(f"  {row['name']:42} {_said(row['us'].get('host')):>28} "
                         f"{_said(row['us'].get('device')):>28}   {_more(row)}{row['words']}")
    return "\n".join(lines)


def _said(times: dict[str, float] | None) -> str:
    return "-" if times is None else f"{_digits(times['median'])} ({_digits(times['p10'])} to {_digits(times['p90'])})"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _more(row: dict[str, Any]) -> str:
    """Further values that some rows have."""
    times, parts = row["us"], []
    if "launch" in times:
        parts.append(f"launch {_digits(times['launch']['median'])} us in all, captured in "
                     f"{_digits(times['capture']['median'] / 1000)} ms")
    if row.get("bytes", 0) >= 1 << 20:
        parts.append(f"{row['bytes'] / times.get('device', times['host'])['median'] / 1000:.1f} GB/s")
    return "".join(f"{part}; " for part in parts)


# ----------------------------------------------------------------------------------------------------------------- plot
def plot(record: dict[str, Any], path: str) -> None:
    """Left, one bar for each way to issue one call; right, chains: us per kernel over their length."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'minidl[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["rows"] if "us" in row]
    calls, chains = [r for r in rows if "kernels" not in r], [r for r in rows if "kernels" in r]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 0.24 * len(calls) + 2), width_ratios=(3, 2),
                                            layout="constrained")
    for offset, kind in ((-0.2, "host"), (0.2, "device")):
        found = [(i + offset, row["us"][kind]) for i, row in enumerate(calls) if kind in row["us"]]
        medians = [t["median"] for _, t in found]
        error = [[t["median"] - t["p10"] for _, t in found], [t["p90"] - t["median"] for _, t in found]]
        left.barh([at for at, _ in found], medians, 0.4, xerr=error, label=kind, error_kw={"elinewidth": 0.8})
    left.set_yticks(range(len(calls)), [row["name"] for row in calls], fontsize=8)
    left.invert_yaxis()
    left.set_xscale("log")
    left.set_xlabel("us a call: median, 10th to 90th percentile")
    left.legend()
    for by, line in zip(dict.fromkeys(row["by"] for row in chains), ("-", "--", ":"), strict=False):
        for i, (branches, said) in enumerate(CHAINS.items()):
            points = [(row["kernels"], row["us"]["device"])
                      for row in chains if (row["by"], row["branches"]) == (by, branches)]
            if points:
                right.errorbar([n for n, _ in points], [t["median"] for _, t in points], [
                    [t["median"] - t["p10"] for _, t in points], [t["p90"] - t["median"] for _, t in points]],
                               fmt=f"o{line}", color=f"C{i}", markersize=3, label=f"by {by}, {said}")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("kernels in the chain")
    right.set_ylabel("us a kernel, from the first to the last")
    right.legend(fontsize=7)
    figure.suptitle(f"what a launch costs: {record.get('gpu', {}).get('name', record['machine']['cpu'])}, "
                    f"{record['machine']['date']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="few samples and short chains, to check that it works")
    parser.add_argument("--json", action="store_true", help="print the record instead of the table")
    parser.add_argument("--out", help="where to write the record")
    parser.add_argument("--plot", help="write a plot of the record")
    arguments = parser.parse_args()
    name = f"launch_overhead_{arguments.device.replace(':', '_')}"
    kept = bool(arguments.out) or not arguments.quick
    try:
        record = measure(arguments.device, arguments.quick,
                         *([lambda record: write(name, record, arguments.out)] if kept else []))
    except devices.DeviceError as error:
        parser.exit(2, f"{error}\n")
    if kept:
        save(name, record, arguments.out)
    print(json.dumps({"name": name, **record}, indent=1) if arguments.json else table(record))
    if arguments.plot:
        plot(record, arguments.plot)


if __name__ == "__main__":
    main()
