"""Exercise 3. Edges from reads and writes.

Copy this file, complete `edges`, and grade your copy:

    cp docs/tutorial/exercises/exercise3.py my_edges.py
    python docs/tutorial/grade.py 3 my_edges.py

Three rules, for tasks in the order in which they were emitted:

    read after write    whoever reads a buffer waits for the last task that wrote it
    write after read    whoever writes a buffer waits for all tasks that read what was there before
    write after write   whoever writes a buffer waits for the last task that wrote it

A task does not wait for itself. Edges that follow from others may be left out or not; both are right.
"""


def edges(tasks):
    """`tasks`: a list of (name, reads, writes), where reads and writes are sets. Returns a set of (earlier, later)."""
    found, writer = set(), {}
    for name, reads, writes in tasks:
        for buffer in reads:
            if buffer in writer:
                found.add((writer[buffer], name))
        for buffer in writes:
            writer[buffer] = name
    return found
