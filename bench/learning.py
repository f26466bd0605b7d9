"""What networks learn on a CPU: GPT on text, DenseNet and MobileNetV3 on the digits at 32 px, as the command line
trains them, judged on data that they have not seen.

    python bench/learning.py [--only mobilenet] [--steps N] [--out FILE.json]

It takes about six minutes on a free core. `--steps` tries it with few steps, and writes a record only with `--out`.
Ends with 1 where a target is missed. Seconds are of the whole command, from start to end, beside whatever else runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import ROOT, machine, save

from minidl.cli import show


@dataclass(frozen=True)
class Case:
    """A run by its `flags`, without its `length`. `metric` of the test data must reach `target` within `seconds`."""

    flags: str
    length: str
    metric: str
    target: float
    seconds: int

    def command(self, steps: int | None = None) -> list[str]:
        length = self.length if steps is None else f"--steps {steps}"
        return shlex.split(f"train {self.flags} {length} --costs analytic")

    def reached(self, found: Mapping[str, Any]) -> bool:
        value = found["test"][self.metric]
        good = value >= self.target if self.metric == "accuracy" else value < self.target
        return bool(good and found["seconds"] < self.seconds)


SMALL = "--model-arg preset=small"
CASES = {
    "gpt": Case(f"--model gpt {SMALL} --data pydoc --batch-size 16 --optimizer adamw --lr-schedule cosine",
                "--warmup 50 --steps 1600", "bits_per_byte", 2.7, 600),
    "densenet121, growth 12": Case(f"--model densenet121 {SMALL} --data digits --batch-size 32 --lr-schedule cosine",
                                   "--epochs 15", "accuracy", 0.97, 300),
    "mobilenet_v3_large": Case(f"--model mobilenet_v3_large {SMALL} --data digits --batch-size 32 --lr-schedule cosine",
                               "--epochs 40", "accuracy", 0.97, 300),
}


def run(case: Case, steps: int | None = None) -> dict[str, Any]:
    """The result of a case. Raises RuntimeError with the command's last line where it fails."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "minidl", *case.command(steps), "--json"], capture_output=True,
                          text=True, cwd=ROOT)
    seconds = round(time.monotonic() - begin, 1)
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or ["without a message"])[-1])
    result = json.loads(done.stdout)
    kept = ("model", "parameters", "data", "steps", "loss_first", "loss_last", "test", "step_ms", "params_sha256")
    found = {"command": f"minidl {shlex.join(case.command(steps))}", **{key: result[key] for key in kept},
             "metric": case.metric, "target": case.target, "seconds": seconds, "seconds_target": case.seconds}
    return found | {"reached": case.reached(found)}


def rows(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, seen, target) of each run."""
    return [(f"{name} on {e['data']}: {e['metric'].replace('_', ' ')} of test data", said(e),
             f"{'>=' if e['metric'] == 'accuracy' else '<'} {e['target']:g} in {e['seconds_target']} s")
            for name, e in record["networks"].items()]


def said(entry: Mapping[str, Any]) -> str:
    return f"{entry['test'][entry['metric']]:.4g} after {entry['steps']} steps, {entry['seconds']:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", default="", help="networks whose name has this")
    parser.add_argument("--steps", type=int, metavar="N", help="train for N steps, to try it")
    parser.add_argument("--out", metavar="FILE.json", help="file for the record")
    arguments = parser.parse_args()
    about, found = machine(), {}
    for name, case in CASES.items():
        if arguments.only in name:
            found[name] = run(case, arguments.steps)
            print(f"{name}: {said(found[name])}", file=sys.stderr)
    record = {"machine": about, "networks": found}
    print(show.table(("what", "seen", "target"), rows(record)))
    if arguments.out or (arguments.steps is None and found.keys() == CASES.keys()):
        save("learning", record, arguments.out)
    return 0 if all(entry["reached"] for entry in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
