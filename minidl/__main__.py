"""The program: `python -m minidl`, and the command `minidl`.

Once `run` has begun, an interrupt ends the program with one line and exit code 130. Before that, Python handles it:
with a traceback, or without a word.
"""

import sys


def run() -> None:
    """Runs one command and ends the process."""
    try:
        from . import interrupts

        interrupts.install()
        try:
            from .cli import main

            code = main()
        except Exception:
            interrupts.check()  # a library may have turned the interrupt into an error
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
