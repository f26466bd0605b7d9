"""Flags: what every verb understands, read from the command line and from a TOML file."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..training import OPTIMIZERS, Job


class UsageError(ValueError):
    """Arguments that make no sense; one line."""


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


def nearest(word: str, known: Sequence[str]) -> str:
    """`nearest: a, b`, or all that is known."""
    near = difflib.get_close_matches(word, known, 3, 0.4)
    return f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"


def size(text: str) -> int:
    """`2GiB`, `300MB`, `4096` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 300MB or 2GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2] or " "))


def pair(text: str) -> tuple[str, Any]:
    """`key=value`, the value read as a Python literal where it is one."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip().isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    try:
        return key.strip(), ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key.strip(), value


def whole(least: int) -> Callable[[str], int]:
    """An integer of at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return int(text)

    return read


def numbers(text: str) -> float | list[float]:
    """`1.5`, or `1,2,2` for one number per stage or layer."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or numbers with commas") from None
    return values if len(values) > 1 else values[0]


# ------------------------------------------------------------------------------------------------------------- groups
def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output and nothing else")


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="a network; see `minidl models`")
    parser.add_argument("--model-arg", type=pair, action="append", default=[], metavar="K=V",
                        help="an argument of the network, such as classes=10, width=64, preset=tiny")


def _job(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--data", default="digits", help="a data set's name or a path (default: the embedded digits)")
    parser.add_argument("--root", help="folder in which named data sets are looked for")
    parser.add_argument("--strict", action="store_true", help="an error instead of a substitute where data is missing")
    parser.add_argument("--device", default="cpu", help="cpu or cuda[:N]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--batch-size", type=whole(1), default=64, metavar="B")
    parser.add_argument("--micro-batches", type=whole(1), default=1, metavar="M", help="gradients accumulate over M parts of a batch")
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--lr", type=float, default=0.1, metavar="X", help="learning rate (default 0.1)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S")
    parser.add_argument("--streams", type=whole(1), metavar="N", help="streams of the scheduler")
    parser.add_argument("--scheduler-arg", type=pair, action="append", default=[], metavar="K=V")
    parser.add_argument("--memory-limit", type=size, metavar="SIZE", help="bound on the peak of the memory plan, such as 2GiB")
    parser.add_argument("--costs", metavar="measured|analytic|FILE", default="measured", help="task costs for plans and predictions")
    parser.add_argument("--config", metavar="FILE.toml", help="flags from a file: batch-size = 32; the command line wins")


def _scheduler(parser: argparse.ArgumentParser, default: str = "in_order") -> None:
    parser.add_argument("--scheduler", default=default, metavar="S")


def _length(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole(1), metavar="N")
    length.add_argument("--epochs", type=whole(1), metavar="N")


def _parser() -> _Parser:
    from . import data_parallel, info, planning, training

    parser = _Parser(prog="minidl", description="A mini deep-learning engine in which the order of the backward pass is a value.")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_Parser)

    def verb(name: str, run: Callable[[Any], Any], text: str, *groups: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".", allow_abbrev=False)
        for group in (_common, *groups):
            group(added)
        added.set_defaults(verb=run, parser=added)
        return added

    verb("info", info.info, "devices and versions, or what a network is made of", _model)
    verb("models", info.models, "all networks with their arguments")
    train = verb("train", training.train, "train a network; without any flag, compare two schedules on the digits", _job, _scheduler, _length)
    train.add_argument("--parallel", default="none", choices=["none", "data", "pipeline"])
    train.add_argument("--checkpoint", metavar="DIR", help="save parameters and all that a run needs to go on")
    train.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    train.add_argument("--trace", metavar="FILE", help="timeline of the last step, for ui.perfetto.dev")
    train.add_argument("--dry-run", action="store_true", help="plan and predict, but do not train")
    compare = verb("compare", training.compare, "the same training under several schedules, interleaved", _job, _length)
    compare.add_argument("--schedulers", default="in_order,multi_stream", metavar="A,B,C")
    plan = verb("plan", planning.plan, "schedule without running", _job, _scheduler, planning.pipeline_flags)
    plan.add_argument("--parallel", default="none", choices=["none", "pipeline"])
    plan.add_argument("--save", metavar="FILE.csv", help="write the schedule")
    plan.add_argument("--svg", metavar="FILE.svg", help="draw the predicted timeline")
    check = verb("check", planning.check, "validate a saved or edited schedule", _job, planning.pipeline_flags)
    check.add_argument("plan", metavar="PLAN.csv")
    explain = verb("explain", planning.explain, "why a task stands where it does", _job, _scheduler, planning.pipeline_flags)
    explain.add_argument("task", metavar="TASK", help="such as 4W0")
    simulate = verb("simulate", planning.simulate, "price a plan of a network, or a data-parallel or pipeline policy on given times", _job, _scheduler,
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
        content = tomllib.loads(Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
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


def job(arguments: argparse.Namespace, scheduler: str | None = None) -> Job:
    """The job that the flags describe. Raises UsageError without a model."""
    if not arguments.model:
        raise UsageError("which network? give --model NAME (see `minidl models`)")
    return Job(model=arguments.model, model_args=dict(arguments.model_arg), data=arguments.data, root=arguments.root,
               strict=arguments.strict, device=arguments.device, dtype=arguments.dtype, batch_size=arguments.batch_size,
               micro_batches=arguments.micro_batches, optimizer=arguments.optimizer, lr=arguments.lr, seed=arguments.seed,
               scheduler=scheduler or str(getattr(arguments, "scheduler", "in_order")), scheduler_args=dict(arguments.scheduler_arg),
               streams=arguments.streams, memory_limit=arguments.memory_limit)
