"""Code that all benchmarks share: interleaved timing of arms, and one JSON record per run.

Times on a shared machine mean little by themselves, so arms are interleaved, and ratios with their spread are quoted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results")
PACKAGE = ("kernels", "minidl", "models", "schedulers")


def interleave(arms: Mapping[str, Callable[[], Any]], *, seconds: float = 5.0,
               warm_up: int = 5, group: float = 0.005, settle: float = 0.0) -> dict[str, list[float]]:
    """Seconds per call of each arm. Groups of calls of at least `group` seconds run in turn, for about `seconds` in
    all. The calls of a group's first `settle` seconds are not timed, nor is its first: it finds the caches filled by
    another arm, which does not happen in training."""
    groups = {}
    for name, arm in arms.items():
        for _ in range(warm_up):
            begin = time.perf_counter()
            arm()
        groups[name] = max(1, math.ceil(group / (time.perf_counter() - begin)))
    samples: dict[str, list[float]] = {name: [] for name in arms}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, samples.values())) < 5:
        for name, arm in arms.items():
            settled = time.perf_counter() + settle
            arm()
            while time.perf_counter() < settled:
                arm()
            begin = time.perf_counter()
            for _ in range(groups[name]):
                arm()
            samples[name].append((time.perf_counter() - begin) / groups[name])
    return samples


def spread(samples: list[float], scale: float = 1e3) -> dict[str, float]:
    """Median, 10th and 90th percentile (milliseconds by default) and the number of samples."""
    return {**{name: round(float(np.percentile(samples, q)) * scale, 5)
               for name, q in (("median", 50), ("p10", 10), ("p90", 90))},
            "n": len(samples)}


def ratio(samples: Mapping[str, list[float]], slow: str, fast: str) -> dict[str, float]:
    """How many times faster `fast` is: the median of the ratios of neighbouring groups, with their spread."""
    return spread([a / b for a, b in zip(samples[slow], samples[fast], strict=True)], 1.0)


def sgd_step(model: Any) -> Callable[[Any, Any], Any]:
    """One step of SGD with momentum 0.9 on cross-entropy, as a function of images and labels."""
    from minidl import nn, optim

    opt = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    return step


def recorded_step(model: Any, batch: int) -> tuple[Any, Any, Any]:
    """(graph, images, labels): a recorded step of `sgd_step` on inputs at random."""
    import minidl as ml

    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *model.input_shape), np.float32)
    y = rng.integers(0, 10, batch)
    return ml.record(sgd_step(model), x, y), x, y


def prediction_errors(graph: Any, plans: Mapping[str, Any], arms: Mapping[str, Callable[[], Any]], seconds: float,
                      corun: Any = None, far: Any = None) -> dict[str, dict[str, float]]:
    """Predicted over measured step time, minus 1, in five rounds. Costs are measured in turn with the arms, since a
    machine's speed drifts and depends on how many of its cores are busy; the `corun` ratios and the link to
    `far` memory are measured before."""
    from dataclasses import replace

    import minidl as ml
    from minidl.measuring.measure import Profile

    errors: dict[str, list[float]] = {key: [] for key in plans}
    for seed in range(5):
        profile = Profile(graph, seed=seed)
        measured = interleave({"costs": profile.run, **{key: arms[key] for key in plans}},
                              seconds=seconds / 5, warm_up=2)
        cost = replace(profile.costs(), corun=corun, far=far)
        for key, schedule in plans.items():
            errors[key].append(ml.plan(graph, schedule, cost).step / 1e6 / float(np.median(measured[key])) - 1)
    return {key: {"median": round(float(np.median(e)), 4), "worst": round(max(e, key=abs), 4), "n": len(e)}
            for key, e in errors.items()}


def sources(*folders: str) -> str:
    """A digest of the sources in these folders of the repository: it distinguishes versions, also without git."""
    digest = hashlib.sha256()
    files = [Path(folder) / name for top in folders for folder, _, names in os.walk(ROOT / top) for name in names]
    for path in sorted(p for p in files if p.suffix in (".py", ".cu", ".cuh", ".h")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The short name of the commit; None without a git checkout or without git."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or None


def machine() -> dict[str, Any]:
    """The machine and the versions with which a record was made."""
    from minidl.cli.machine import blas, versions

    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
                 platform.machine())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "load_before": round(os.getloadavg()[0], 2),
            "versions": versions(), "blas": blas(), "commit": commit(), "sources": sources(*PACKAGE),
            "date": time.strftime("%Y-%m-%d")}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def write(name: str, record: Mapping[str, Any], path: str | None = None) -> Path:
    """Writes `bench/results/NAME.json` (or `path`) atomically."""
    from minidl.system.files import write_atomic

    target = Path(path) if path else RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, json.dumps({"name": name, **record}, indent=1) + "\n")
    return target


def save(name: str, record: Mapping[str, Any], path: str | None = None) -> Path:
    """Like `write`, and prints the path."""
    target = write(name, record, path)
    print(f"record: {target}", file=sys.stderr)
    return target
