"""The parser: verbs with their flags, over a TOML file, over defaults."""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..files import read_text
from . import data_parallel, info, planning, training
from .flags import UsageError, common, job_flags, length, model, nearest, scheduler


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            known = [o for action in self._actions for o in action.option_strings]
            near = difflib.get_close_matches(unknown[1], known, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        choice = re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            known = [c.strip("' ") for c in choice[3].split(",")]
            message = f"unknown {choice[1].split('/')[0].strip('-').lower()} {choice[2]!r}; {nearest(choice[2], known)}"
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> _Parser:
    parser = _Parser(prog="minidl", description="A mini deep-learning engine in which the order of the backward pass is a value.")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_Parser)

    def verb(name: str, run: Callable[[Any], Any], text: str, *groups: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".", allow_abbrev=False)
        for group in (common, *groups):
            group(added)
        added.set_defaults(verb=run, parser=added)
        return added

    about = verb("info", info.info, "devices and versions, or what a network is made of", model)
    about.add_argument("--each-rank", action="store_true", help="under mpiexec: what every rank sees, and whether it fits together")
    verb("models", info.models, "all networks with their arguments")
    train = verb("train", training.train, "train a network; without any flag, compare two schedules on the digits", job_flags, scheduler, length,
                 data_parallel.train_flags)
    train.add_argument("--parallel", default="none", choices=["none", "data", "pipeline"])
    train.add_argument("--checkpoint", metavar="DIR", help="save parameters and all that a run needs to go on")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    train.add_argument("--trace", metavar="FILE", help="timeline of the last step, for ui.perfetto.dev")
    train.add_argument("--dry-run", action="store_true", help="plan and predict, but do not train")
    compare = verb("compare", training.compare, "the same training under several schedules, interleaved", job_flags, length)
    compare.add_argument("--schedulers", default="in_order,multi_stream", metavar="A,B,C")
    plan = verb("plan", planning.plan, "schedule without running", job_flags, scheduler, planning.pipeline_flags)
    plan.add_argument("--parallel", default="none", choices=["none", "pipeline"])
    plan.add_argument("--save", metavar="FILE.csv", help="write the schedule")
    plan.add_argument("--svg", metavar="FILE.svg", help="draw the predicted timeline")
    plan.add_argument("--curve", action="store_true", help="predicted step time against memory limit (multi_region)")
    check = verb("check", planning.check, "validate a saved or edited schedule", job_flags, planning.pipeline_flags)
    check.add_argument("plan", metavar="PLAN.csv")
    explain = verb("explain", planning.explain, "why a task stands where it does", job_flags, scheduler, planning.pipeline_flags)
    explain.add_argument("task", metavar="TASK", help="such as 4W0")
    simulate = verb("simulate", planning.simulate, "price a plan of a network, or a data-parallel or pipeline policy on given times", job_flags, scheduler,
                    planning.pipeline_flags, data_parallel.flags)
    simulate.add_argument("--parallel", default="none", choices=["none", "data", "pipeline"])
    simulate.add_argument("--table", action="store_true", help="all pipeline policies side by side, the best marked")
    simulate.add_argument("--objective", default="makespan", choices=["makespan", "span", "period"], help="what `optimal` minimises")
    simulate.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds that `optimal` may take")
    simulate.add_argument("--svg", metavar="FILE.svg", help="draw the predicted timeline")
    simulate.add_argument("--trace", metavar="FILE", help="the predicted timeline, for ui.perfetto.dev")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags over a config file over defaults. Raises UsageError."""
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.given = {a.split("=")[0] for a in argv if a.startswith("--")}
    if getattr(arguments, "config", None):
        from_file = _config(arguments.config, arguments.parser)
        arguments.parser.set_defaults(**{k: v for k, v in from_file.items() if k not in ("model_arg", "scheduler_arg")})
        given = arguments.given
        arguments = parser.parse_args(argv)
        arguments.given = given | {"--" + k.replace("_", "-") for k in from_file}
        for key in ("model_arg", "scheduler_arg"):  # single names on the command line win
            if key in from_file:
                setattr(arguments, key, [*from_file[key], *getattr(arguments, key)])
    return arguments


def _config(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """A TOML file's flags, checked like those of the command line. Raises UsageError that names the key."""
    try:
        content = tomllib.loads(read_text(path, "config"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())[:200]}") from None
    except (RecursionError, OverflowError):
        raise UsageError(f"{path}: nested too deeply, or a number too large") from None
    actions = {o.lstrip("-"): action for action in parser._actions for o in action.option_strings if o.startswith("--")}
    found: dict[str, Any] = {}
    for key, value in content.items():
        action = actions.get(key)
        if action is None or key in ("config", "help"):
            raise UsageError(f"{path}: unknown flag {key!r}; {nearest(key, sorted(actions))}")
        if key in ("model-arg", "scheduler-arg"):
            if not isinstance(value, dict):
                raise UsageError(f"{path}: {key} must be a table, as in [{key}]")
            found[action.dest] = list(value.items())
        elif action.nargs == 0:
            if not isinstance(value, bool):
                raise UsageError(f"{path}: {key} must be true or false")
            found[action.dest] = value
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            try:
                converted = action.type(text) if callable(action.type) else text
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise UsageError(f"{path}: {key}: {error}") from None
            if action.choices is not None and converted not in action.choices:
                raise UsageError(f"{path}: unknown {key} {text!r}; {nearest(text, list(action.choices))}")
            found[action.dest] = converted
    return found
