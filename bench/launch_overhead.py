"""The cost of a launch: throughput and latency, for the host that issues it and on the device, by all ways to issue
one; events, copies, graphs; the cost over the number of calls as fixed + each * n.

    python bench/launch_overhead.py [--device cpu|cuda] [--quick|--full] [--row NAME] [--list] [--json]
                                    [--out FILE.json] [--plot FILE.svg] [--note TEXT]

--quick takes 20 seconds, --full (the default) 60, and rows that were not reached say so. --row measures one row alone,
--list names them all. Without --out the record goes to bench/results/launch_overhead_DEVICE.json (with --quick or --row
nowhere), after every row; it says whether it is complete. Packages that are not installed have a row too. --plot needs
the extra `plot`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save, write
from launches import Bench, Missing, Row, measured, said

from minidl import device as devices

QUICK, FULL, APART = 20.0, 60.0, 1.0  #: seconds of the whole command, and those of its start and its end
LEGEND = ("host: the issuing thread is busy for one call; device: from one queued call to the next where they run; "
          "first: from a\nsingle call on an idle device until the host sees that its first instruction has run; done: "
          "until the host knows its\nend. Medians (10th to 90th percentile, and more of single calls); fixed + each n: "
          "the cost over the number n of calls.\nA profiler that watches calls (Nsight, CUPTI, torch.profiler, "
          "sanitizers, NVTX tools, Python's) makes each one longer.")
#: environment variables by which tools make every call longer
TAXES = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDA_LAUNCH_BLOCKING", "NSYS_PROFILING_SESSION_ID")


def rows_of(name: str) -> Sequence[Row]:
    """The rows for a device, which need not be there. Raises DeviceError for an unknown name."""
    if name == "cpu":
        import launches_cpu

        return launches_cpu.ROWS
    if re.fullmatch(r"cuda(:\d+)?", name) is None:
        raise devices.DeviceError(f"unknown device {name!r}; known: cpu, cuda, cuda:N")
    import launches_cuda

    return launches_cuda.ROWS


def gpu(name: str) -> Any:
    """minidl's device, which needs only CuPy here: other packages have their own rows."""
    from minidl.devices.cuda.device import CONNECTIONS, Cuda
    from minidl.devices.cuda.dnn import Dnn
    from minidl.devices.cuda.driver import Driver
    from minidl.devices.cuda.products import Products

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)  # as for every device of minidl
    try:
        driver = Driver(int(name.partition(":")[2] or 0))
    except ImportError as error:
        raise devices.DeviceError(f"cuda needs cupy: pip install 'minidl[cuda13]' ({error})") from error
    except Exception as error:  # CuPy has its own error types
        raise devices.DeviceError(f"there is no GPU for {name} here: {error}") from error
    return Cuda(driver, lambda: Products(driver), lambda: Dnn(driver), name)


def opened(name: str) -> tuple[Callable[[], Bench], dict[str, Any]]:
    """Measures the rows for a device; and its description. Raises DeviceError for a device that is not available."""
    if name == "cpu":
        return Bench, {}
    import launches_cuda

    device = gpu(name)
    about = {"gpu": device.driver.describe(), "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")}
    return lambda: launches_cuda.Gpu(device), about


def measure(name: str, seconds: float, row: str = "", note: str | None = None,
            keep: Callable[[dict[str, Any]], object] = lambda record: None) -> dict[str, Any]:
    """The record, which `keep` gets after every row. `row`: the only one. Raises DeviceError for a device that is not
    available, and Missing for a row that there is not."""
    end = perf_counter() + seconds
    rows = [r for r in rows_of(name) if row in ("", r.name)]
    if not rows:
        raise Missing(f"there is no row {row!r} for {name}; --list names them all")
    bench, about = opened(name)
    tools = [key for key in TAXES if os.environ.get(key)] + ["sys.setprofile"] * (sys.getprofile() is not None)
    record: dict[str, Any] = {"device": name, "seconds": seconds, "unit": "us", "machine": machine(), **about,
                              "tools": tools, "note": note, "complete": False, "rows": []}
    for entry in measured(rows, bench(), end):
        entry["command"] = f'python bench/launch_overhead.py --device {name} --row "{entry["name"]}"'
        record["rows"].append(entry)
        keep(record)
        print(f"\r{len(record['rows'])}/{len(rows)} rows  {entry['name']:50.50}", end="", file=sys.stderr)
    print(file=sys.stderr)
    record["complete"] = True
    keep(record)
    return record


def table(record: dict[str, Any]) -> str:
    """One line per row: name, values or why there are none, description."""
    lines, group = [LEGEND], None
    if record["tools"]:
        lines.append(f"Calls may take longer here: {', '.join(record['tools'])} is set.")
    for row in record["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines += ["", group]
        lines.append(f"  {row['name']:46} {said(row)}   {row['what'] * ('missing' not in row)}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help=f"within {QUICK:g} seconds")
    length.add_argument("--full", action="store_true", help=f"within {FULL:g} seconds (default)")
    parser.add_argument("--row", default="", metavar="NAME", help="this row alone")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--json", action="store_true", help="print the record instead of the table")
    parser.add_argument("--out", help="where to write the record")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a picture of the record")
    parser.add_argument("--note", help="words for the record, as 'taken beside other work'")
    arguments = parser.parse_args()
    name = f"launch_overhead_{arguments.device.partition(':')[0]}"
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.exit(2, "--plot needs matplotlib: pip install 'minidl[plot]'\n")
    kept = bool(arguments.out) or not (arguments.quick or arguments.row)
    try:
        if arguments.list:
            print("\n".join(row.name for row in rows_of(arguments.device)))
            return
        record = measure(arguments.device, (QUICK if arguments.quick else FULL) - APART, arguments.row, arguments.note,
                         *([lambda record: write(name, record, arguments.out)] if kept else []))
        if kept:
            save(name, record, arguments.out)
        print(json.dumps({"name": name, **record}, indent=1) if arguments.json else table(record))
        if arguments.plot:
            import plots

            plots.save(name, record, Path(arguments.plot))
    except (devices.DeviceError, Missing, OSError) as error:  # of a file, too
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the packages that rows have imported take up to two seconds to end
