"""NCCL with one rank: a sum, and a message to itself, on the engine's own calls.

    python bench/nccl_alone.py [--device cuda] [--out FILE.json]

With one rank the engine transfers nothing, so this calls what it would call with more. Each size is run on poisoned
memory; its bits must be those that were sent. The time is the device's, with a full queue. Ends with 0 if all bits are
equal, or if NCCL is missing, which the record says; 1 if not; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save

from minidl import device as devices
from minidl.core.graph import View
from minidl.devices.cuda.clock import Hold, behind
from minidl.runtime.comm.loopback import LoopBack
from minidl.runtime.comm.nccl import NCCL, NCCLError

COUNTS = (1, 1 << 10, 1 << 20, 1 << 26)  #: elements of float32
HELD = 64 << 20  #: bytes that are filled to keep the stream busy


def measured(device: Any, ranks: Any) -> list[dict[str, Any]]:
    """A row for each size and transfer."""
    hold, rows = Hold(device.driver, ranks.stream, device.allocate(HELD)), []
    for count in COUNTS:
        host = np.random.default_rng(count).standard_normal(count, np.float32)
        memories = [device.allocate(4 * count) for _ in range(2)]
        out, into = (device.array(memory, View(0, (count,), (1,), 0, "float32")) for memory in memories)
        transfers: Mapping[str, tuple[Any, Callable[[], Any]]] = {  # where the result is, and the call
            "all-reduce": (out, lambda out=out: list(ranks._sum(out, 0))),
            "send and receive": (into, lambda out=out, into=into: ranks._swap([out], [into]))}
        for name, (result, call) in transfers.items():
            device.write(into, np.full(count, np.nan, np.float32))
            device.write(out, host)
            device.synchronize()  # a single number is written without waiting, and on another stream
            call()
            device.synchronize()
            equal = device.read(result).tobytes() == host.tobytes()
            us = behind(device.driver, ranks.stream, hold, call)
            rows.append({"transfer": name, "bytes": 4 * count, "equal_bits": equal, "us": round(us, 2)})
            print(f"{name:18} {4 * count:>12} bytes {us:10.2f} us  {'equal bits' if equal else 'OTHER BITS'}")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", metavar="FILE.json", help="the record; default: bench/results/nccl_alone.json")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"machine": machine(), "complete": True, "passed": True}
    try:
        device = devices.get(options.device)
        ranks = NCCL(LoopBack.ranks(1)[0], device)
    except (ImportError, NCCLError) as error:
        print(f"NCCL is missing: {error}")
        save("nccl_alone", record | {"missing": str(error)}, options.out)
        return 0
    except devices.DeviceError as error:
        print(f"nccl_alone: {error}", file=sys.stderr)
        return 2
    rows = measured(device, ranks)
    record |= {"rows": rows, "passed": all(row["equal_bits"] for row in rows)}
    save("nccl_alone", record, options.out)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
