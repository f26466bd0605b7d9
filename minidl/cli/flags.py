"""Flags that verbs share, and how their values are read."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..fusion import RULES
from ..training import DTYPES, OPTIMIZERS, Job


class UsageError(ValueError):
    """Arguments that make no sense; one line."""


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


def rules(text: str) -> tuple[str, ...]:
    """`all`, `none`, or names of fusion rules with commas."""
    names = {"all": tuple(RULES), "none": ()}.get(text, tuple(text.split(",")))
    for name in names:
        if name not in RULES:
            raise argparse.ArgumentTypeError(f"{name!r} is no fusion; {nearest(name, ['all', 'none', *RULES])}")
    return names


# ------------------------------------------------------------------------------------------------------------- groups
def common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output and nothing else")


def model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="a network; see `minidl models`")
    parser.add_argument("--model-arg", type=pair, action="append", default=[], metavar="K=V",
                        help="an argument of the network, such as classes=10, width=64, preset=tiny")


def job_flags(parser: argparse.ArgumentParser) -> None:
    model(parser)
    parser.add_argument("--data", default="digits", help="a data set's name or a path (default: the embedded digits)")
    parser.add_argument("--root", help="folder in which named data sets are looked for")
    parser.add_argument("--strict", action="store_true", help="an error instead of a substitute where data is missing")
    parser.add_argument("--device", default="cpu", help="cpu or cuda[:N]")
    parser.add_argument("--tf32", action="store_true", help="on cuda: products and convolutions may round float32 for the tensor cores")
    parser.add_argument("--nondeterministic", action="store_true", help="on cuda: kernels of cuDNN's may give other last bits each time")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES), help="bf16 and fp16, on cuda: products in 16 bits, parameters in float32")
    parser.add_argument("--fusion", type=rules, metavar="all|none|RULE,..",
                        help=f"launches that become one: {', '.join(RULES)} (default: all on cuda, none on cpu)")
    parser.add_argument("--batch-size", type=whole(1), default=64, metavar="B", help="of a step, over all ranks (default 64)")
    parser.add_argument("--micro-batches", type=whole(1), default=1, metavar="M", help="gradients accumulate over M parts of a batch")
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--lr", type=float, default=0.1, metavar="X", help="learning rate (default 0.1)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="S")
    parser.add_argument("--streams", type=whole(1), metavar="N", help="streams of the scheduler")
    parser.add_argument("--scheduler-arg", type=pair, action="append", default=[], metavar="K=V")
    parser.add_argument("--memory-limit", type=size, metavar="SIZE", help="bound on the peak of the memory plan, such as 2GiB")
    parser.add_argument("--costs", metavar="measured|analytic|FILE", default="measured", help="task costs for plans and predictions")
    parser.add_argument("--pairs", choices=["measured", "estimated", "none"],
                        help="how much tasks on two streams slow each other down (default: as --costs for multi_region, else none)")
    parser.add_argument("--save-costs", metavar="FILE.json", help="write costs and pairs, for --costs")
    parser.add_argument("--config", metavar="FILE.toml", help="flags from a file: batch-size = 32; the command line wins")


def scheduler(parser: argparse.ArgumentParser, default: str = "in_order") -> None:
    parser.add_argument("--scheduler", default=default, metavar="S")


def length(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole(1), metavar="N")
    length.add_argument("--epochs", type=whole(1), metavar="N")


def job(arguments: argparse.Namespace, under: str | None = None) -> Job:
    """The job that the flags describe. Raises UsageError without a model."""
    if not arguments.model:
        raise UsageError("which network? give --model NAME (see `minidl models`)")
    return Job(model=arguments.model, model_args=dict(arguments.model_arg), data=arguments.data, root=arguments.root,
               strict=arguments.strict, device=arguments.device, tf32=arguments.tf32, deterministic=not arguments.nondeterministic,
               dtype=arguments.dtype, batch_size=arguments.batch_size, micro_batches=arguments.micro_batches,
               optimizer=arguments.optimizer, lr=arguments.lr, seed=arguments.seed,
               scheduler=under or str(getattr(arguments, "scheduler", "in_order")), scheduler_args=dict(arguments.scheduler_arg),
               streams=arguments.streams, memory_limit=arguments.memory_limit,
               fusion=arguments.fusion)
