"""One device, DenseNet-121 and MobileNetV3-Large: the gain from recording, a second stream, regions, and crossing the
iteration boundary.

    python bench/single_device.py [--seconds 20] [--only NAME] [--torch] [--svg] [--out FILE.json]

Arms: eager; recorded on one stream; multi_stream; the authors' map; multi_region within and across the iteration
boundary. All start from one seed and are interleaved; their parameters must be equal bit for bit. `--torch` needs the
extra `parity`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent),
                str(Path(__file__).parent.parent / "tests" / "helpers")]

from common import RESULTS, interleave, machine, prediction_errors, ratio, save, sgd_step, spread

import minidl as ml
from minidl import models, schedulers
from minidl.measuring.pairs import measure_pairs
from minidl.passes.boundary import late_tasks
from minidl.plans.program import lower
from minidl.runtime.executors import executor


def _cases() -> dict[str, tuple[str, dict[str, Any], int]]:
    """Network, arguments and batch by name: every width and growth at 32 px, and two at 224 px."""
    mobile = [(width, 32, 32) for width in (0.25, 0.5, 0.75, 1.0)] + [(1.0, 224, 8)]
    dense = [(growth, 32, 8) for growth in (12, 24, 32)] + [(32, 224, 4)]
    return {**{f"mobilenet_v3_large a{a:g} {px}px b{batch}":
               ("mobilenet_v3_large", {"width": a, "image_size": px, "classes": 10}, batch) for a, px, batch in mobile},
            **{f"densenet121 k{k} {px}px b{batch}":
               ("densenet121", {"growth": k, "image_size": px, "classes": 10}, batch) for k, px, batch in dense}}


CASES = _cases()
#: networks that torch runs too -> the largest allowed ratio of minidl's time to torch eager's on the CPU
TORCH = {"mobilenet_v3_large a0.25 32px b32": 1.5, "densenet121 k12 32px b8": 2.5}
MAPS = {"densenet121": "densenet121", "mobilenet_v3_large": "mobilenet_v3"}


def training(case: str) -> tuple[Any, Callable[..., Any], Any, Any]:
    """A new model from seed 0, its SGD step, images and labels."""
    name, arguments, batch = CASES[case]
    ml.seed(0)
    model = models.create(name, **arguments)
    rng = np.random.default_rng(0)
    return (model, sgd_step(model), rng.standard_normal((batch, *model.input_shape), np.float32),
            rng.integers(0, model.classes, batch))


def with_pairs(graph: Any, cost: Any) -> Any:
    groups, pairs = schedulers.profile_groups(graph, cost)
    return replace(cost, corun=measure_pairs(graph, cost, groups, pairs))


def plans(case: str, graph: Any, cost: Any) -> dict[str, Any]:
    return {"in_order": schedulers.in_order(graph), "multi_stream": schedulers.multi_stream(graph, cost=cost),
            "published map": schedulers.multi_stream(graph, cost=cost, map=MAPS[CASES[case][0]]),
            "multi_region, border kept": schedulers.multi_region(graph, cost, crossing=False),
            "multi_region": schedulers.multi_region(graph, cost)}


def torch_arms(case: str, model: Any, x: Any, y: Any) -> dict[str, Callable[[], Any]]:
    """The same step in torch on one thread, channels last: eager and compiled."""
    import torch
    from torch_twins import images, load, twin

    torch.set_num_threads(1)
    name, given, _ = CASES[case]
    inputs, labels, arms = images(x), torch.from_numpy(y), {}
    for how in ("eager", "compiled"):
        network = load(twin(name, {**models.arguments(name), **given}), model).to(memory_format=torch.channels_last)
        opt = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=True)
        run = torch.compile(network) if how == "compiled" else network

        def step(run: Any = run, opt: Any = opt) -> None:
            opt.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(run(inputs), labels).backward()
            opt.step()

        try:
            step()
            arms[f"torch {how}"] = step
        except Exception as error:  # without a compiler the other arms are still measured
            print(f"torch {how} is left out: {str(error).splitlines()[0][:120]}", file=sys.stderr)
    return arms


def measured(case: str, seconds: float, with_torch: bool, svg: Path | None) -> dict[str, Any]:
    model, eager, x, y = training(case)
    graph = ml.record(eager, x, y)
    cost = with_pairs(graph, ml.measure(graph, seconds=seconds / 5))
    made = plans(case, graph, cost)
    equal = len({_bits(case, schedule) for schedule in (None, *made.values())}) == 1
    runs = {}
    for arm, schedule in made.items():
        _, step, *_ = training(case)
        runs[arm] = executor(ml.record(step, x, y), schedule)
    model, eager, x, y = training(case)
    arms: dict[str, Any] = {"eager": lambda: eager(ml.array(x), ml.array(y)),
                            **{arm: (lambda run=run: run(x, y)) for arm, run in runs.items()}}
    if with_torch:
        arms |= torch_arms(case, model, x, y)
    samples = interleave(arms, seconds=seconds)
    entry: dict[str, Any] = {"tasks": len(graph), "equal_bits": equal,
                             "step_ms": {arm: spread(s) for arm, s in samples.items()},
                             "late_tasks": {arm: len(late_tasks(graph, s)) for arm, s in made.items()},
                             "peak_bytes": {arm: run.peak_bytes for arm, run in runs.items()},
                             "against": {f"{slow} / {fast}": ratio(samples, slow, fast) for slow, fast in [
                                 ("eager", "in_order"), *(("in_order", arm) for arm in made if arm != "in_order"),
                                 *(("in_order", arm) for arm in arms if arm.startswith("torch"))]}}
    entry["prediction_error"] = prediction_errors(graph, made, arms, seconds, cost.corun)
    if svg:
        traced = executor(graph, made["multi_region"], trace=True)
        for _ in range(3):
            traced(x, y)
        _draw(graph, made["multi_region"], cost, traced.timeline, svg)
        traced.close()
    for run in runs.values():
        run.close()
    return entry


def _bits(case: str, schedule: Any) -> bytes:
    """The parameters after three steps under a schedule, or eagerly for None."""
    model, step, x, y = training(case)
    run = executor(ml.record(step, x, y), schedule) if schedule else lambda x, y: step(ml.array(x), ml.array(y))
    for _ in range(3):
        run(x, y)
    found = b"".join(p.numpy().tobytes() for p in model.parameters())
    if schedule:
        run.close()
    return found


def _draw(graph: Any, schedule: Any, cost: Any, timeline: Any, path: Path) -> None:
    """Draws the predicted timeline above the measured one, as a picture and as text."""
    from minidl.core.draw import timeline_svg
    from minidl.core.report import compare
    from minidl.system.files import write_atomic

    body = lower(graph, schedule)
    predicted = ml.simulate(body.graph, body.schedule, cost)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, timeline_svg(predicted, timeline))
    print(compare(predicted, timeline))


def predictions(networks: dict[str, Any]) -> dict[str, Any]:
    """The median over the networks of the absolute prediction errors, on one stream and on two (there the median over
    the schedules), and the worst of all rounds."""
    found = {}
    for streams, wanted in (("one stream", lambda arm: arm == "in_order"),
                            ("two streams", lambda arm: arm != "in_order")):
        errors = [[e for arm, e in entry["prediction_error"].items() if wanted(arm)] for entry in networks.values()]
        found[streams] = {"median":
                          round(float(np.median([np.median([abs(e["median"]) for e in some]) for some in errors])), 4),
                          "worst": max((e["worst"] for some in errors for e in some), key=abs), "n": len(errors)}
    return found


def show(case: str, entry: dict[str, Any]) -> None:
    """Prints a network's results."""
    print(f"\n{case}   ({entry['tasks']} tasks, equal bits: {entry['equal_bits']})")
    for arm, s in entry["step_ms"].items():
        peak, late = entry["peak_bytes"].get(arm, 0), entry["late_tasks"].get(arm, 0)
        print(f"  {arm:28} {s['median']:9.3f} ms   p10 {s['p10']:9.3f}   p90 {s['p90']:9.3f}   n {s['n']:4}   "
              f"peak {peak:13,}   late {late}")
    for name, r in entry["against"].items():
        print(f"  {name:44} {r['median']:7.3f}x   p10 {r['p10']:7.3f}   p90 {r['p90']:7.3f}")
    print("  prediction error: " + ", ".join(f"{a} {e['median']:+.1%} (worst {e['worst']:+.1%})"
                                             for a, e in entry["prediction_error"].items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per network, at least")
    parser.add_argument("--only", metavar="NAME", default="",
                        help="networks whose name contains this; default: all at 32 px")
    parser.add_argument("--torch", action="store_true", help="also run torch, eager and compiled: " + ", ".join(TORCH))
    parser.add_argument("--svg", action="store_true", help="SVGs of predicted and measured timelines beside the record")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "networks": {}}
    for case in (c for c in CASES if arguments.only in c and (arguments.only or "32px" in c)):
        folder = Path(arguments.out).parent if arguments.out else RESULTS
        svg = folder / f"single_device {case}.svg".replace(" ", "_") if arguments.svg else None
        entry = record["networks"][case] = measured(case, arguments.seconds, arguments.torch and case in TORCH, svg)
        record["prediction"] = predictions(record["networks"])
        show(case, entry)
        save("single_device", record, arguments.out)  # what is finished is in the record
    if not record["networks"]:
        parser.error(f"no network's name contains {arguments.only!r}; there are {', '.join(CASES)}")
    for streams, e in record["prediction"].items():
        print(f"{streams}: predicted within {e['median']:.1%} of the measured step (median over {e['n']} networks), "
              f"at worst {e['worst']:+.1%}")


if __name__ == "__main__":
    main()
