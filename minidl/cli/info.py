"""`info` and `models`: devices, versions and networks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from .. import models as networks
from ..autograd import random
from ..autograd.recording import record
from ..autograd.tape import Tape, no_grad, use
from ..core.graph import TaskGraph
from ..core.tasks import Kind
from ..devices import DeviceError, device
from ..devices.device import default_lanes
from ..devices.native import no_native_lanes
from ..pricing.cost import CostModel
from ..schedulers import pipeline
from ..system import launcher
from ..system.loading import users_code
from . import ranks, show
from .machine import blas, versions


def info(arguments: Any) -> int:
    """Without a model: devices, versions, MPI. With one: parameters, flops of a forward pass, layers."""
    if arguments.each_rank:
        with ranks.job() as communicator:
            return ranks.info(arguments, communicator)
    if arguments.model:
        found, _ = _outline(arguments.model, dict(arguments.model_arg))
        rows = [(layer["name"], layer["op"], layer["parameters"]) for layer in found["layers"]]
        return show.emit(arguments, found,
                         f"{found['model']}: {found['parameters']:,} parameters, {found['flops_per_sample']:,} "
                         f"flops a sample (forward)\n" + show.table(("layer", "op", "parameters"), rows))
    gpus, why_not = _gpus()
    library, starts = _mpi()
    cores, processor = len(os.sched_getaffinity(0)), platform.processor() or platform.machine()
    told = {"devices": [{"name": "cpu", "cores": cores, "processor": processor}, *gpus],
              "lanes": default_lanes(), "native_lanes": no_native_lanes() or "available", "blas": blas(),
              "mpi": library, "launcher": starts, "versions": versions()}
    return show.emit(arguments, told, show.table(("what", "is"), [
        ("device cpu", f"{cores} cores, {processor}"),
        *((f"device {g['name']}", f"{g['gpu']}, {g['memory_bytes'] / 2**30:.0f} GiB, sm_{g['capability']}")
          for g in gpus), *([] if gpus else [("device cuda", why_not)]),
        ("lanes on the cpu", f"{told['lanes']} by default; native ones: {told['native_lanes']}"),
        ("BLAS", told["blas"]), ("MPI", library or "none found"), ("launcher", starts or "none found"),
        *versions().items()]))


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """The GPUs; and if there are none, the reason."""
    found: list[dict[str, Any]] = []
    while True:
        try:
            about = device.get(f"cuda:{len(found)}").driver.describe()
        except DeviceError as error:
            return found, str(error)
        found.append({"name": f"cuda:{len(found)}", "gpu": about.pop("name"), **about})


def _mpi() -> tuple[str | None, str | None]:
    """The MPI library with its version, and the launcher: the one that started this process, or the mpiexec that would
    start ranks, with a word if that does not fit. In a separate process, which a broken MPI may abort."""
    code = "import json; from minidl.runtime.comm.mpi import load; print(json.dumps(load()[1:]))"
    library, known = None, None
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
        library, known = json.loads(done.stdout)[::-1] if done.returncode == 0 else (None, None)
    found = launcher.first()
    name, path = (launcher.name(), "") if launcher.name() or not found else (found[1] or "an unknown one", found[0])
    wrong = f", which cannot connect ranks of {known}" if known and not launcher.connects(name, known) else ""
    needs = "" if launcher.name() else "".join(f"; needs {flag}" for flag in launcher.needs(name, os.cpu_count() or 1))
    alone = f"; in a Slurm job of {launcher.tasks()} tasks, use srun" if launcher.tasks() > 1 else ""
    return library, f"{name}{f' ({path})' if path else ''}{wrong}{needs}{alone}" if name or alone else None


def _outline(name: str, model_args: dict[str, Any]) -> tuple[dict[str, Any], TaskGraph]:
    """A network's figures, and the graph of its forward pass for one sample, unallocated. `layers` are its units."""
    with use(Tape()), no_grad():
        random.seed(0)
        model = networks.create(name, **model_args).eval()
        x = np.zeros((1, *model.input_shape), model.input_dtype)
        with users_code():
            graph = record(model, x, name=name)
    layers = [{"name": graph.unit_names[task.unit], "op": task.launches[0].kernel,
               "parameters": sum(b.bytes // np.dtype(b.dtype).itemsize for b in task.reads if b.role == "parameter"),
               "flops": task.flops} for task in graph if task.kind == Kind.F]
    return {"model": name, "parameters": sum(p.size for p in model.parameters()),
            "flops_per_sample": int(graph.flops.sum()), "layers": layers, "objective": model.objective}, graph


STAGES, EVEN = 4, 1.25  #: a network suits pipelines if the longest of so many stages takes so many times the mean


def _suited(graph: Any) -> list[str]:
    """The schedulers of out-of-order backprop that suit a network: always those for one device and for data-parallel
    ranks, and those for pipelines if it can be cut into STAGES stages that are EVEN."""
    cost = CostModel.analytic()
    found = ["multi_region", "reverse_first_k"]
    try:
        stage = pipeline.balanced(graph, cost, STAGES)
    except pipeline.PipelineError:
        return found
    time = np.bincount(stage[graph.unit], cost.durations(graph), STAGES)
    return found + ["fast_forward", "modulo"] * bool(time.max() <= EVEN * time.mean())


def models(arguments: Any) -> None:
    """Every network, or the one that is named, with its parameters, flops of a sample, layers, what it is trained for,
    the schedulers that suit it, its arguments and its presets."""
    found = list[dict[str, Any]]()
    for name in [arguments.name] if arguments.name else networks.names():
        figures, graph = _outline(name, {})
        found.append({**figures, "layers": len(figures["layers"]), "schedulers": _suited(graph),
                      "arguments": networks.arguments(name), "presets": networks.presets(name)})
    head = ("model", "parameters", "flops a sample", "layers", "objective", "schedulers", "presets", "arguments")
    show.emit(arguments, {"models": found}, lambda: show.table(head, [
        (m["model"], m["parameters"], m["flops_per_sample"], m["layers"], m["objective"], " ".join(m["schedulers"]),
         " ".join(m["presets"]) or "-", " ".join(f"{k}={v}" for k, v in m["arguments"].items())) for m in found])
        + f"\n\nFlops count the forward pass. Schedulers: the orders of out-of-order backprop that suit the network, "
          f"fast_forward and modulo\nwhere {STAGES} stages can take about as long. Others run it as well; `minidl "
          f"schedulers` lists them. --model-arg sets arguments and preset.")
