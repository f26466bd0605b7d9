"""An entry's own process: it closes the walls, loads the entry, and hands over the text of its order.

It gets a record on standard input, and writes to one pipe: `ready`, then `order` and a CSV, or `error` and a line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ..core import columns
from ..core.schedule import Schedule
from ..schedulers.ordered import Ordered, taken
from ..schedulers.pipeline import Policy, Problem
from ..schedulers.registry import find
from ..system.loading import line_of, text_of
from . import walls
from .problems import Task


def run(pipe: int) -> None:
    """Runs the entry that standard input names, and ends the process."""
    told = json.loads(sys.stdin.buffer.read())
    sys.path[:0] = told["paths"]
    sys.dont_write_bytecode, columns.writes = True, False
    task = Task(**told["task"])
    walled = walls.close(told["memory"], int(told["seconds"]) + 1)
    out = os.fdopen(pipe, "w", encoding="utf-8", errors="backslashreplace", newline="\n")
    out.write(f"ready {int(walled)}\n")
    out.flush()
    try:
        text = f"order\n{order_of(told['entry'], task)}"
    except MemoryError:
        text = f"error\nneeds more memory than {told['memory'] >> 20} MiB (--memory-limit)"
    except (KeyboardInterrupt, SystemExit) as error:
        text = f"error\nended with {type(error).__name__}: {text_of(error)}".removesuffix(": ")
    except BaseException as error:  # of a user's code
        place = f" ({found})" if (found := line_of(error)) else ""
        text = f"error\n{type(error).__name__}: {text_of(error)}{place}"
    out.write(text)
    out.flush()
    os._exit(0)  # whatever its threads are doing


def order_of(entry: str, task: Task) -> str:
    """The entry's order as text: what its function returns, or the CSV of its schedule. Raises ValueError."""
    policy = find(entry, "pipeline").function
    if not isinstance(policy, Policy):
        raise TypeError(f"it is a {type(policy).__name__}; an entry is a function of the problem, or a Policy")
    placement = policy.place(task.ranks)
    problem = Problem.of(placement, task.micro_batches, task.pipeline.cost(placement), task.activation_cap)
    placement, _ = policy.placed(problem, {})
    made: Any = policy.order(Problem.of(placement, task.micro_batches, task.pipeline.cost(placement),
                                        task.activation_cap), **taken(policy.order, {}))
    made = made.schedule if isinstance(made, Ordered) else made
    if not isinstance(made, Schedule | str):
        raise TypeError(f"it returned {type(made).__name__}; it must return a Schedule, or the text of a CSV")
    return made if isinstance(made, str) else made.to_csv()
