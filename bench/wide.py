"""Wide tasks: steps whose tasks are whole, all in parts, or as wide as measured costs say.

    python bench/wide.py [--seconds 20] [--only NAME] [--out FILE.json]     two lanes, predicted and measured; 3 min
    python bench/wide.py --scaling                                          predicted on 1 to 16 cores
    python bench/wide.py --torch --seconds 14                               beside torch eager with two threads; 10 min

Costs are measured once before, in random legal orders of one lane; for more cores also of tasks in 2 to 16 parts. The
arms run in turn. `--torch` needs two free cores and the extra `parity`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests" / "helpers")]

from against_torch import Case, Sides
from common import interleave, machine, ratio, save, spread, write

import minidl as ml
from minidl import models, nn, optim
from minidl.pricing.cost import counts_up_to

#: how to make a network, and the shape of its batch: tokens if there is a vocabulary
CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "MLP 1024-2048-2048-10, batch 256": (lambda: models.mlp(1024, 2048, 2048, 10), (256, 1024), 0),
    "GPT 4 x 256, 4 x 256 tokens": (lambda: models.gpt(512, 256, 256, 4, 8, 0.0), (4, 256), 512),
    "ResNet-18, 64 px, batch 16": (lambda: models.create("resnet18", image_size=64), (16, 64, 64, 3), 0),
    "LSTM 28 x 128, batch 64": (lambda: models.create("rnn", vocabulary=256, length=28, width=128, layers=2), (64, 28),
                                256),
    "MobileNetV3 0.25, 32 px, batch 32": (lambda: models.create("mobilenet_v3_large", width=0.25, image_size=32),
                                          (32, 32, 32, 3), 0),
    "DenseNet-121 k12, 32 px, batch 8": (lambda: models.create("densenet121", growth=12, image_size=32),
                                         (8, 32, 32, 3), 0),
}
CORES = (2, 4, 8, 16)
#: seconds until the threads of one arm stop spinning and the system has spread the next arm's over the cores
SETTLE = 0.1
SCALED = ("whole tasks", "widths chosen", "widths chosen, bandwidth as measured with two lanes")
ARMS = {"in_order": {}, "multi_stream": {}, "all in parts": {"split": 2}, "widths chosen": {"split": "auto"}}


def recorded(model: Any, shape: tuple[int, ...], vocabulary: int) -> tuple[Any, Any, Any]:
    """A step of SGD with momentum, and its inputs."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, vocabulary, shape) if vocabulary else rng.standard_normal(shape, np.float32)
    y = rng.integers(0, vocabulary, shape) if vocabulary else rng.integers(0, 10, shape[0])
    opt = optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        out = model(x)
        loss = nn.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        opt.step()
        return loss

    return ml.record(step, x, y), x, y


def measured(case: str, seconds: float) -> dict[str, Any]:
    """The entry of a case."""
    make, shape, vocabulary = CASES[case]
    ml.seed(0)
    graph, x, y = recorded(make(), shape, vocabulary)
    cost = ml.measure(graph, parts=2, seconds=seconds / 4)
    plans = {name: ml.plan(graph, "in_order" if name == "in_order" else "multi_stream", cost, **how)
             for name, how in ARMS.items()}
    with ExitStack() as stack:
        runs = {name: stack.enter_context(closing(ml.StreamExecutor(plan.graph, plan.schedule)))
                for name, plan in plans.items()}
        samples = interleave({name: lambda run=run: run(x, y) for name, run in runs.items()}, seconds=seconds)
    gains = {f"in_order / {name}": ratio(samples, "in_order", name) for name in plans if name != "in_order"}
    return {"tasks": len(graph), "chosen": plans["widths chosen"].remarks[-1],
            "task_us": round(float(plans["in_order"].step) / len(graph), 1),
            "in_order / best of two lanes": max(gain["median"] for gain in gains.values()),
            "predicted_ms": {name: round(float(plan.predicted_step_ms), 3) for name, plan in plans.items()},
            "peak_bytes": {name: max(plan.peak_bytes) for name, plan in plans.items()},
            "step_ms": {name: spread(s) for name, s in samples.items()},
            **gains}


def scaling(case: str, seconds: float) -> dict[str, Any]:
    """The entry of a case: how many times faster a step is predicted to be than on one core, with whole tasks and with
    chosen widths; and with these if all lanes together had no more bandwidth than those that were measured."""
    make, shape, vocabulary = CASES[case]
    ml.seed(0)
    graph, *_ = recorded(make(), shape, vocabulary)
    found: dict[str, dict[str, float]] = {arm: {"1": 1.0} for arm in SCALED}
    counts = counts_up_to(max(CORES))
    cost = ml.measure(graph, parts=counts, seconds=seconds / (len(counts) + 1))
    for count in CORES:
        cost = replace(cost, cores=count)
        one = float(ml.plan(graph, "in_order", cost).step)
        least = cost.memory and replace(cost.memory, lanes=max(count, cost.memory.lanes))
        for name, split, memory in zip(SCALED, (1, "auto", "auto"), (cost.memory, cost.memory, least), strict=True):
            plan = ml.plan(graph, "multi_stream", replace(cost, memory=memory), split=split)
            found[name][str(count)] = round(one / float(plan.step), 3)
    return {"tasks": len(graph), "speedup": found, "memory": cost.memory and asdict(cost.memory)}


def beside_torch() -> dict[str, Callable[[], Sides]]:
    """Networks with a twin in torch: what makes both."""
    import cnn
    import language
    import recurrent
    import untuned

    def untuned_sides(make: Callable[[Any], Any], batch: int) -> Sides:
        ml.seed(0)
        return cnn.of_both(make(untuned.MINIDL), make(untuned.in_torch()), batch)

    images = {**cnn.CASES, "resnet18, 64 px": Case("resnet18", {"image_size": 64}, 16, 1.0),
              "mobilenet_v3 of width 1": Case("mobilenet_v3_large", {"image_size": 32, "classes": 10}, 32, 1.0),
              "mlp 1024-2048-2048-10": Case("mlp", {"features": 1024, "hidden": 2048}, 256, 1.0)}
    wide = {"gpt 4 x 256, 256 tokens": Case("gpt", {"vocabulary": 512, "length": 256, "width": 256, "heads": 8,
                                                    "dropout": 0.0}, 4, 1.0, preset="small")}
    cases = [(bench, name, case) for bench, own in (
        (cnn, images), (language, {**language.CASES, **wide}), (recurrent, recurrent.CASES))
        for name, case in own.items()]
    cases += [(cnn, "resnet20", cnn.CASES["resnet20"]._replace(batch=batch)) for batch in (1, 64)]
    return {**{f"{name}, batch {case.batch}": partial(bench.sides, case) for bench, name, case in cases},
            **{f"{name}, batch {batch}": partial(untuned_sides, make, batch) for name, make, batch in (
                ("vgg", untuned.vgg, 32), *(("unet", untuned.unet, batch) for batch in (8, 1, 64)))}}


def against_torch(sides: Sides, seconds: float) -> dict[str, Any]:
    """The entry of a network: the time on two lanes over that of torch with two threads."""
    import torch

    torch.set_num_threads(2)
    graph, (x, y), step, _ = sides
    plan = ml.plan(graph, "multi_stream", ml.measure(graph, parts=2, seconds=seconds / 4), split="auto")
    with closing(ml.StreamExecutor(plan.graph, plan.schedule)) as run:
        samples = interleave({"minidl": lambda: run(x, y), "torch": step}, seconds=seconds, group=SETTLE, settle=SETTLE)
    return {"chosen": plan.remarks[-1], "predicted_ms": round(float(plan.predicted_step_ms), 3),
            "step_ms": {name: spread(s) for name, s in samples.items()},
            "minidl / torch": ratio(samples, "minidl", "torch")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="per network")
    parser.add_argument("--only", help="networks whose names begin so")
    parser.add_argument("--scaling", action="store_true", help="predicted steps on 1 to 16 cores")
    parser.add_argument("--torch", action="store_true", help="beside torch with two threads")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "networks": {}}
    name_of_record = "wide_torch" if arguments.torch else "wide_scaling" if arguments.scaling else "wide"
    makers = beside_torch() if arguments.torch else {}
    for case in [name for name in makers or CASES if name.startswith(arguments.only or "")]:
        if arguments.torch or arguments.scaling:
            entry = record["networks"][case] = (against_torch(makers[case](), arguments.seconds) if arguments.torch else
                                                scaling(case, arguments.seconds))
            print(case, entry, flush=True)
            write(name_of_record, record, arguments.out)  # what is finished is in the record
            continue
        entry = record["networks"][case] = measured(case, arguments.seconds)
        print(f"\n{case}   ({entry['tasks']} tasks; {entry['chosen']})", flush=True)
        for name, step in entry["step_ms"].items():
            gain = entry.get(f"in_order / {name}", {"median": 1.0, "p10": 1.0, "p90": 1.0})
            print(f"  {name:14} predicted {entry['predicted_ms'][name]:8.2f} ms, measured {step['median']:8.2f} ms, "
                  f"{gain['median']:5.2f}x of one lane (p10 {gain['p10']:.2f}, p90 {gain['p90']:.2f})", flush=True)
    if not arguments.torch and not arguments.scaling:
        print("\none lane over the best of two lanes, and the mean time of a task:")
        for case, entry in record["networks"].items():
            print(f"  {case:36} {entry['in_order / best of two lanes']:5.2f}x, {entry['task_us']:7.0f} us", flush=True)
    save(name_of_record, record, arguments.out)


if __name__ == "__main__":
    main()
