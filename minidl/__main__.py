"""The program: `python -m minidl`, and the command `minidl`.

From the first line of `run` on, an interrupt ends it with one line and exit code 130. Before that it is Python's own:
it shows a traceback, or dies in silence.
"""

import sys


def run() -> None:
    """One command, to the end of the process."""
    try:
        from . import interrupts

        interrupts.install()
        try:
            from .cli import main

            code = main()
        except Exception:
            interrupts.check()  # a library may have made an error of it
            raise
        interrupts.ignore()
    except KeyboardInterrupt:
        stopped()
    sys.exit(code)


def stopped() -> None:
    """Ends an interrupted process."""
    from . import interrupts

    number = interrupts.take()
    interrupts.say(number)
    interrupts.leave(number)


if __name__ == "__main__":
    run()
