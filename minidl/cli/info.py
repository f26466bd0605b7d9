"""`info` and `models`: devices, versions and networks."""

from __future__ import annotations

import os
import platform
from typing import Any

from . import ranks, show
from .machine import versions


def info(arguments: Any) -> int:
    """Without a model: devices, versions, MPI. With one: parameters, flops, layers."""
    if arguments.each_rank:
        return ranks.info(arguments)
    record: dict[str, Any]
    if arguments.model:
        record = model_info(arguments.model, dict(arguments.model_arg))
        rows = [(layer["name"], layer["op"], layer["parameters"]) for layer in record["layers"]]
        show.emit(arguments, record,
                  f"{record['model']}: {record['parameters']:,} parameters, {record['flops_per_sample']:,} "
                  f"flops a sample (forward)\n" + show.table(("layer", "op", "parameters"), rows))
        return 0
    gpus, why_not = _gpus()
    record = {"devices": [{"name": "cpu", "cores": len(os.sched_getaffinity(0)),
                           "processor": platform.processor() or platform.machine()}, *gpus],
              "mpi": _mpi(), "versions": versions()}
    show.emit(arguments, record, show.table(("what", "is"), [
        ("device cpu", f"{record['devices'][0]['cores']} cores, {record['devices'][0]['processor']}"),
        *((f"device {g['name']}", f"{g['gpu']}, {g['memory_bytes'] / 2**30:.0f} GiB, sm_{g['capability']}")
          for g in gpus), *([] if gpus else [("device cuda", why_not)]), ("MPI", record["mpi"] or "none found"),
        *record["versions"].items()]))
    return 0


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """The GPUs; and if there are none, the reason."""
    from ..runtime import device

    found: list[dict[str, Any]] = []
    while True:
        try:
            about = device.get(f"cuda:{len(found)}").driver.describe()
        except device.DeviceError as error:
            return found, str(error)
        found.append({"name": f"cuda:{len(found)}", "gpu": about.pop("name"), **about})


def _mpi() -> str | None:
    """The first line of the MPI library's version, from a separate process: a broken MPI may abort the one that loads
    it."""
    import subprocess
    import sys

    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def model_info(name: str, model_args: dict[str, Any]) -> dict[str, Any]:
    """`flops_per_sample` counts the forward pass; `layers` are its units in order."""
    import numpy as np

    from .. import models as networks
    from ..autograd import random
    from ..autograd.recording import record
    from ..autograd.tape import no_grad
    from ..tasks import Kind

    random.seed(0)
    model = networks.create(name, **model_args).eval()
    x = np.zeros((1, *model.input_shape), model.input_dtype)
    with no_grad():
        graph = record(model, x, name=name)
    layers = []
    for task in graph:
        if task.kind == Kind.F:
            own = sum(b.bytes // np.dtype(b.dtype).itemsize for b in task.reads if b.role == "parameter")
            layers.append({"name": graph.unit_names[task.unit], "op": task.launches[0].kernel, "parameters": own,
                           "flops": task.flops})
    return {"model": name, "parameters": sum(p.size for p in model.parameters()),
            "flops_per_sample": int(graph.flops.sum()), "layers": layers}


def models(arguments: Any) -> None:
    """Every network with its arguments, presets and parameters."""
    from .. import models as networks

    found: list[dict[str, Any]] = [{"model": name, "arguments": networks.arguments(name),
                                    "presets": networks.presets(name)} for name in networks.names()]
    show.emit(arguments, {"models": found}, lambda: show.table(("model", "arguments", "presets"), [
        (m["model"], " ".join(f"{k}={v}" for k, v in m["arguments"].items()), " ".join(m["presets"]) or "-")
        for m in found]))
