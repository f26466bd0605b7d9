"""The arena: problems of pipelines, entries that order them, and the referee that proves, prices and ranks the orders.

An entry runs in a process of its own (`entrant`), with limits (`walls`), and hands over nothing but text (`contest`).
"""

from .contest import Outcome, ask
from .problems import ArenaError, Task, read
from .referee import Entry, board, judge, published, ranked

__all__ = ["ArenaError", "Entry", "Outcome", "Task", "ask", "board", "judge", "published", "ranked", "read"]
