"""All cores: long attention and recurrent layers beside torch, with one thread and with two; and lanes on busy cores.

    python bench/cores.py [--seconds 20] [--only gpt] [--out FILE.json]      two cores, the extra `parity`; 4 min

The sides of a network run in turn: minidl on one lane and on two, torch with one thread and with two. For `busy cores`
another process keeps each core busy, so that a lane has half of it and the other lane may wait for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import language
import recurrent
from against_torch import Case, Sides
from common import interleave, machine, ratio, save, spread
from wide import CASES, SETTLE, recorded

import minidl as ml

BUSY = ("MLP 1024-2048-2048-10, batch 256", "LSTM 28 x 128, batch 64", "MobileNetV3 0.25, 32 px, batch 32")
QUANTUM = 0.3  #: seconds of a group of steps on busy cores: many of the system's turns


def long_gpt(length: int) -> Sides:
    """Two rows of so many tokens through two layers."""
    return language.sides(Case("gpt", {"vocabulary": 256, "length": length, "width": 256, "layers": 2, "heads": 4,
                                       "dropout": 0.0}, 2, 1.0, preset="small"))


BESIDE: dict[str, Callable[[], Sides]] = {
    **{f"gpt 2 x 256, 2 x {length:,} tokens": partial(long_gpt, length) for length in (2048, 4096)},
    **{f"{kind}, 28 x 128, batch 64": partial(recurrent.sides, case) for kind, case in recurrent.CASES.items()}}


def lanes(stack: ExitStack, graph: Any, inputs: tuple[Any, Any], seconds: float) -> dict[str, Callable[[], Any]]:
    """A step on one lane, and one on two lanes with the widths that measured costs say."""
    cost = ml.measure(graph, parts=2, seconds=seconds)
    found = {}
    for name, policy, split in (("one lane", "in_order", 1), ("two lanes", "multi_stream", "auto")):
        plan = ml.plan(graph, policy, cost, split=split)
        run = stack.enter_context(closing(ml.StreamExecutor(plan.graph, plan.schedule)))
        found[name] = partial(run, *inputs)
    return found


def beside_torch(sides: Sides, seconds: float) -> dict[str, Any]:
    """The entry of a network: the time on as many lanes over that of torch with as many threads."""
    import torch

    def theirs(threads: int) -> Any:
        torch.set_num_threads(threads)
        return sides.step()

    with ExitStack() as stack:
        arms = {**lanes(stack, sides.graph, sides.inputs, seconds / 8), "one thread": partial(theirs, 1),
                "two threads": partial(theirs, 2)}
        samples = interleave(arms, seconds=seconds, warm_up=1, group=SETTLE, settle=SETTLE)
    return {"step_ms": {name: spread(s) for name, s in samples.items()},
            **{f"{mine} / {theirs}": ratio(samples, mine, theirs)
               for mine, theirs in (("one lane", "one thread"), ("two lanes", "two threads"))}}


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process on each core that computes without end."""
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0)):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
            os.sched_setaffinity(loop.pid, {core})
        yield


def under_load(case: str, seconds: float) -> dict[str, Any]:
    """The entry of a network: the time on two lanes over the time on one, while other processes use all cores."""
    make, shape, vocabulary = CASES[case]
    ml.seed(0)
    graph, *inputs = recorded(make(), shape, vocabulary)
    with ExitStack() as stack:
        arms = lanes(stack, graph, (inputs[0], inputs[1]), seconds / 8)
        stack.enter_context(busy_cores())
        samples = interleave(arms, seconds=seconds, group=QUANTUM)
    return {"step_ms": {name: spread(s) for name, s in samples.items()},
            "two lanes / one lane": ratio(samples, "two lanes", "one lane")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="per network")
    parser.add_argument("--only", default="", help="networks whose names begin so")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "networks": {}, "busy cores": {}}
    runs = [*((record["networks"], name, lambda seconds, make=make: beside_torch(make(), seconds))
              for name, make in BESIDE.items()),
            *((record["busy cores"], case, partial(under_load, case)) for case in BUSY)]
    for part, name, run in runs:
        if name.startswith(arguments.only):
            part[name] = run(seconds=arguments.seconds)
            print(name, part[name], flush=True)
    save("cores", record, arguments.out)


if __name__ == "__main__":
    main()
