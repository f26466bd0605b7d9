"""The command line: one verb a function. Exit 0; 1 a check failed; 2 bad arguments or input, in one clear line; 130 for
an interrupt, which is the program's to say (`minidl.__main__`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import interrupts, launcher
from ..runtime import debug


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Raises KeyboardInterrupt, also where one got lost on its way."""
    from . import machine, show
    from .flags import UsageError
    from .parser import parse

    alone, argv = argv is None, list(sys.argv[1:] if argv is None else argv)
    level = 0
    try:
        level = debug.level()
        if argv[:1] == ["train"] and launcher.size() > 1:
            code = _train_on_ranks(argv)
        else:
            arguments = parse(argv)
            if alone and arguments.device == "cpu":  # what CUDA's driver takes is its own business
                machine.bound()
            code = int(arguments.verb(arguments) or 0)
        interrupts.check()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, RuntimeError, TypeError, ArithmeticError, ImportError, MemoryError) as error:
        if level and not isinstance(error, UsageError):
            raise
        message = show.reason(error)
    interrupts.check()  # a library may have made an error of it
    first, *rest = message.split("\n")
    print(f"minidl: {show.line(first)}", file=sys.stderr)
    if rest:
        print("\n".join(rest), file=sys.stderr)
    return 2


def _train_on_ranks(argv: Sequence[str]) -> int:
    """Ranks first meet, then look at their flags: one that cannot read its own tells the others, who
    would wait for it."""
    from . import show
    from .distributed import train
    from .flags import UsageError
    from .parser import parse

    wrong = ""
    try:
        arguments = parse(argv)
    except Exception as error:
        wrong = show.reason(error)

    def read() -> Any:
        if wrong:
            raise UsageError(wrong)
        return arguments

    return train(read)
