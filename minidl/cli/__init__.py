"""The command line: one verb a function. Exit 0; 1 a check failed; 2 bad arguments or input, in one clear line; 130 for an
interrupt, which is the program's to say (`minidl.__main__`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .. import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Raises KeyboardInterrupt, also where one got lost on its way."""
    from .flags import UsageError
    from .parser import parse

    argv = list(sys.argv[1:] if argv is None else argv)
    debug = int(os.environ.get("MINIDL_DEBUG") or 0) if (os.environ.get("MINIDL_DEBUG") or "0").isdecimal() else 0
    try:
        arguments = parse(argv)
        code = int(arguments.verb(arguments) or 0)
        interrupts.check()
        return code
    except UsageError as error:
        if argv[:1] == ["train"] and "--parallel data" in " ".join(argv).replace("=", " "):  # other ranks wait for this one
            from .data_parallel import refuse

            return refuse(error)
        message = str(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug:
            raise
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (ValueError, RuntimeError, TypeError, ArithmeticError, ImportError, MemoryError) as error:
        if debug:
            raise
        message = str(error) or type(error).__name__
    interrupts.check()  # a library may have made an error of it
    first, *rest = message.splitlines()
    print(f"minidl: {first}", file=sys.stderr)
    if rest:
        print("\n".join(rest), file=sys.stderr)
    return 2
