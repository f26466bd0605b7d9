"""`fuzz`: compares recorded steps with eager ones."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from ..system.loading import function_of
from ..testing import fuzz
from . import show

ABOUT = """Runs steps eagerly, recorded under every scheduler of one device, in random legal orders and with random
tasks late, and compares every bit that they return and leave.

FILE.py:FUNCTION is a function of a seed that makes a training, the same one each time. It returns (step, inputs,
owners): the step, a list with the arrays of each of its calls, and a list of everything that it changes: modules,
optimizers, loss scalers, tensors. An optional fourth value is a function that is called with the number of each call
before the call, to set learning rates. Without FILE.py:FUNCTION the steps are random. Cases have the seeds S, S + 1,
.., so `--seed S --cases 1` repeats one.

The exit code is 0 if everything is equal, and 1 if something differs or nothing could be compared."""


def run(arguments: Any) -> int:
    """Returns exit code 1 for a difference, or if no case could be compared."""
    make, cases = (function_of(arguments.step), 3) if arguments.step else (fuzz.random_training, 100)
    cases, arrangements = arguments.cases or cases, partial(fuzz.arranged, all_policies=bool(arguments.step))
    verdicts: list[fuzz.Verdict] = []
    with show.progress("comparing", cases) as done:
        for seed in range(arguments.seed, arguments.seed + cases):
            verdicts.append(fuzz.check(make, seed, arrangements))
            done(len(verdicts))
    bad = [v for v in verdicts if v.failures]
    runs = sum(v.runs for v in verdicts)
    failures = [{"seed": v.seed, "arrangement": name, "what": what} for v in bad for name, what in v.failures.items()]
    record = {"step": arguments.step, "seed": arguments.seed, "cases": cases, "arrangements": runs,
              "tasks": sum(v.tasks for v in verdicts), "failures": failures,
              "refused": [{"seed": v.seed, "why": v.refused} for v in verdicts if v.refused],
              "invalid": [{"seed": v.seed, "why": v.invalid} for v in verdicts if v.invalid]}
    return show.emit(arguments, record, lambda: text(record, bad), 0 if runs and not bad else 1)


def text(record: dict[str, Any], bad: list[fuzz.Verdict]) -> str:
    compared = record["cases"] - len(record["refused"]) - len(record["invalid"])
    lines = [f"{record['cases']:,} cases from seed {record['seed']}: {compared - len(bad):,} of {compared:,} equal "
             f"their eager run bit for bit, in {record['arrangements']:,} arrangements of {record['tasks']:,} tasks"]
    for what, title in ("refused", "cannot be recorded"), ("invalid", "do not run eagerly"):
        lines += [f"{count:,} {title}: {why}"
                  for why, count in Counter(entry["why"] for entry in record[what]).most_common()]
    for v in bad:
        (name, what), *more = v.failures.items()
        lines += [f"seed {v.seed}, {name}: {what}" + (f"; and {len(more)} more" if more else ""),
                  f"  again: minidl fuzz {record['step'] + ' ' if record['step'] else ''}--seed {v.seed} --cases 1"]
    return "\n".join(lines)
