"""`kernels`: the families of kernels, or one of them checked against its references and timed."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from ..core.columns import grouped
from ..devices import DeviceError
from ..devices import device as devices
from ..kernels import KERNELS
from ..measuring.kernel_times import EXAMPLES, Timing, rate, timing
from . import show
from .flags import UsageError
from .values import nearest


def families() -> dict[str, list[str]]:
    """Family (the file in kernels/) -> its kernels, in the order in which they are defined."""
    files = ((kernel.reference.__module__, name) for name, kernel in KERNELS.items())
    return grouped((file.rpartition(".")[2], name) for file, name in files if file.startswith("minidl.kernels."))


def run(arguments: Any) -> int:
    """Prints the families, or the timings of one; returns 1 if a kernel differs from its reference."""
    known = families()
    if arguments.name is None:
        return _list(arguments, known)
    if arguments.name not in known and arguments.name not in KERNELS:
        raise UsageError(f"unknown kernel or family {arguments.name[:60]!r}; "
                         f"{nearest(arguments.name, [*{**known, **KERNELS}])}")
    wanted = known.get(arguments.name, [arguments.name])
    names = [name for name in wanted if name in EXAMPLES]
    if not names:
        raise UsageError(f"{arguments.name} has no example to time; the kernels that have one: {', '.join(EXAMPLES)}")
    found: list[Timing] = []
    for device in _devices(arguments):
        most = rate(device)
        found += [timing(device, name, most) for name in names]
        show.note(f"{device.name}: {most / 1e3:.1f} GFLOP/s by a large product in float32")
    record = {"kernels": [asdict(t) for t in found], "without_example": [n for n in wanted if n not in EXAMPLES]}
    return show.emit(arguments, record, lambda: _text(found, record["without_example"]),
                     int(not all(t.right for t in found)))


def _devices(arguments: Any) -> list[Any]:
    """The device of the flag, or the CPU and a GPU if there is one. Raises DeviceError for one that is not there."""
    if "--device" in arguments.given:
        return [devices.get(arguments.device)]
    try:
        return [devices.get("cpu"), devices.get("cuda")]
    except DeviceError:
        return [devices.get("cpu")]


def _list(arguments: Any, known: dict[str, list[str]]) -> int:
    record = {"families": [{"family": family, "about": _about(names[0]), "kernels": [
        {"kernel": name, "cpu": KERNELS[name]._cpu is not None, "cuda": KERNELS[name]._cuda is not None,
         "formula": _formula(name), "timed": name in EXAMPLES} for name in names]} for family, names in known.items()]}
    rows = [(family, f"{len(names)}", " ".join(n for n in names if n in EXAMPLES), _about(names[0]))
            for family, names in known.items()]
    hint = "minidl kernels NAME checks a family, or one kernel, against its reference and times it"
    return show.emit(arguments, record, f"{show.table(('family', 'kernels', 'timed', 'about'), rows)}\n\n{hint}")


def _about(name: str) -> str:
    """The first sentence of a family's docstring."""
    text = " ".join((inspect.getdoc(inspect.getmodule(KERNELS[name].reference)) or "").split())
    return text.partition(". ")[0].rstrip(".")


def _formula(name: str) -> str:
    return " ".join((inspect.getdoc(KERNELS[name].reference) or "").split())


def _text(found: list[Timing], without: list[str]) -> str:
    rows = [(t.kernel, t.device, t.shapes, f"{t.error:.1e}" + ("" if t.right else " WRONG"), f"{t.us:,.1f}",
             f"{t.launch_us:,.1f}", f"{t.gbs:,.1f}", "" if t.gflops is None else f"{t.gflops:,.1f}", f"{t.share:.0%}",
            *(("", "", "") if t.naive_us is None else
              (f"{t.naive_us:,.1f}", f"{t.naive_error:.1e}", f"{t.naive_us / t.us:.1f}x"))) for t in found]
    titles = ("kernel", "device", "reads", "error", "us", "launch us", "GB/s", "GFLOP/s", "of roofline", "naive us",
              "naive error", "gain")
    count = len(titles) if any(t.naive_us is not None for t in found) else len(titles) - 3
    text = show.table(titles[:count], [row[:count] for row in rows])
    lines = [f"{name}: {formula}" for name in dict.fromkeys(t.kernel for t in found) if (formula := _formula(name))]
    lines += [f"without an example to time: {', '.join(without)}"] if without else []
    return "\n".join([text, "", *lines])
