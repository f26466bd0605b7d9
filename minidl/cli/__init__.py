"""The command line: one function per verb. Exit codes: 0; 1 for a failed check; 2 for bad arguments or input, with one
clear line, which also tells of an internal error; 130 for an interrupt, which `minidl.__main__` handles."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..system import interrupts, launcher, process


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. Raises KeyboardInterrupt, also where a library has lost one."""
    from . import machine, show
    from .flags import UsageError
    from .parser import parse

    alone, argv = argv is None, list(sys.argv[1:] if argv is None else argv)
    level = 0
    try:
        level = process.debug_level()
        if argv[:1] == ["train"] and launcher.size() > 1:
            gc.enable()
            code = _train_on_ranks(argv)
        else:
            arguments = parse(argv)
            gc.enable()  # `minidl.__main__` has disabled it
            if alone and arguments.device == "cpu":  # CUDA's driver reserves much address space
                machine.bound()
            show.check_outputs(arguments)
            with show.record_alone(arguments):
                code = int(arguments.verb(arguments) or 0)
            if (ranks := launcher.size()) > 1 and not launcher.rank():
                show.note(f"{launcher.name()} has started {ranks} processes, and each does all of {arguments.command}")
        interrupts.check()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if level and not isinstance(error, UsageError):
            raise
        message = show.reason(error)
    interrupts.check()  # a library may have turned the interrupt into an error
    first, *rest = message.split("\n")
    print(f"minidl: {show.line(first)}", *rest, sep="\n", file=sys.stderr)
    return 2


def _train_on_ranks(argv: Sequence[str]) -> int:
    """A rank with wrong flags connects to the others first, to tell them: they would otherwise wait for it."""
    from . import show
    from .distributed import train
    from .flags import UsageError
    from .parser import parse

    try:
        arguments = parse(argv)
    except Exception as error:
        wrong = UsageError(show.reason(error))

        def refuse() -> NoReturn:
            raise wrong

        return train(refuse)
    with show.record_alone(arguments):
        return train(lambda: arguments)
