"""Exercise 10. Stream capture.

Copy this file, complete `capture`, and grade your copy:

    cp docs/tutorial/exercises/exercise10.py my_capture.py
    python docs/tutorial/grade.py 10 my_capture.py

The host issues three sorts of things, each to a stream:

    ("launch", stream, kernel) the kernel comes after the last one on its stream, and after all that the stream waited
    for ("record", stream, event) from now on the event stands for what the next launch on this stream would come after
    ("wait", stream, event) what is launched on this stream from now on comes after what the event stands for

An event may be recorded again; those who waited before have waited for what it stood for then. Nobody waits for an
event that was never recorded. Edges that follow from others may be left out or not; both are right.
"""


def capture(issues):
    """A set of (earlier kernel, later kernel)."""
    edges, last = set(), {}
    for what, stream, name in issues:
        if what == "launch":  # this keeps the order of each stream, and no event
            if stream in last:
                edges.add((last[stream], name))
            last[stream] = name
    return edges
