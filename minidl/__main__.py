"""The program: `python -m minidl`, and the command `minidl`.

Once `run` has begun, an interrupt ends the program with one line and exit code 130. Before that, Python handles it:
with a traceback, or without a word.
"""

import gc
import io
import os
import sys
from _signal import SIG_BLOCK, SIG_SETMASK, SIGINT, SIGTERM, SIGUSR1, pthread_sigmask  # `signal` takes 3 ms


def run() -> None:
    """Runs one command and ends the process."""
    gc.disable()  # until the verb begins: what is imported stays
    streams = sys.stdin, sys.stdout, sys.stderr  # None if it is closed; no file may get its number
    sys.stdin, sys.stdout, sys.stderr = (each or open(os.devnull, "r+") for each in streams)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of letters that its encoding does not have
    try:
        # Python may lose an interrupt that falls into an import, so it waits until there are handlers that keep it
        mask = pthread_sigmask(SIG_BLOCK, (SIGINT, SIGTERM, SIGUSR1))
        from .system import interrupts

        interrupts.install()
        pthread_sigmask(SIG_SETMASK, mask)
        try:
            from .cli import main

            code = main()
        except SystemExit:  # after --help
            interrupts.ignore()
            raise
        except Exception:
            interrupts.check()  # a library may have turned the interrupt into an error
            raise
        interrupts.ignore()
    except KeyboardInterrupt:
        stopped()
    gc.freeze()  # the memory of a process that ends need not be searched for cycles: a tenth of a short command
    sys.exit(code)


def stopped() -> None:
    """Ends an interrupted process."""
    from .system import interrupts

    interrupts.say(number := interrupts.take())
    interrupts.leave(number)


if __name__ == "__main__":
    run()
