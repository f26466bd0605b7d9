"""Exercise 5. A scheduler of your own.

Copy this file, improve `scheduler`, and grade your copy:

    cp docs/tutorial/exercises/exercise5.py my_scheduler.py
    python docs/tutorial/grade.py 5 my_scheduler.py

The network has 8 linear layers. On given costs a forward task and an output gradient of a linear layer take 1, a weight
gradient takes 2, and all else takes nothing. This scheduler puts every weight gradient on the second lane, and the step
takes 24. On two lanes 20 can be reached. You may use no more than two lanes.
"""

from minidl import Kind, Lane, Schedule


def scheduler(graph):
    """F and O on main, W and U on sub, both in the order in which they were recorded."""
    main = [task.index for task in graph if task.kind in (Kind.F, Kind.O)]
    sub = [task.index for task in graph if task.kind in (Kind.W, Kind.U)]
    return Schedule.of(graph, {Lane(0, "main"): main, Lane(0, "sub"): sub})
