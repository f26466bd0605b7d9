"""A pipeline scheduler as a comparison: whether task a of a rank runs before task b of this rank. minidl does the
rest.

A task has a `kind` ("F", "O" and "W", or "F" and "B" if backwards are fused), `stage`, `micro_batch`, `rank`, `chunk`
(the number of the stage on its rank), and the `problem`: `ranks`, `micro_batches`, times by stage, `latency`, `cap`.
"""

from math import ceil

import minidl as ml
from minidl.schedulers.pipeline.comparison import compared


def forwards_first(a, b):
    """GPipe: all forwards, then all backwards."""
    return (a.kind == "B", a.micro_batch) < (b.kind == "B", b.micro_batch)


def alternating(a, b):
    """1F1B: B of micro-batch i is before F of micro-batch i + p - s on rank s."""
    def place(task):
        ahead = task.problem.ranks - task.rank
        return (task.micro_batch, 1) if task.kind == "B" else (task.micro_batch - ahead + 1, 0)

    return place(a) < place(b)


def zero_bubble(a, b):
    """ZB-H2 for the latency of the link: so many forwards in advance that O of the first micro-batch is back in time,
    and W late by as much as the forwards of the opposite rank are early."""
    trip = ceil(2 * (1 + a.problem.latency / a.problem.forward[0]))  # to the next rank and back, in forwards
    ahead, late = trip * (a.problem.ranks - 1 - a.rank), trip * a.rank
    places = {"F": (-ahead, 0), "O": (0, 1), "W": (late, 2)}

    def place(task):
        shift, turn = places[task.kind]
        return task.micro_batch + shift, turn

    return place(a) < place(b)


gpipe, one_f_one_b = (compared(before, fused=True) for before in (forwards_first, alternating))


if __name__ == "__main__":
    for mine, name in ((gpipe, "gpipe"), (one_f_one_b, "one_f_one_b")):
        plan, ours = (ml.plan(ml.Pipeline(8), policy, machine=ml.Machine(ranks=4)) for policy in (mine, name))
        print(f"{name}: {plan.schedule.diff(ours.schedule) or 'the same order'}")
    for latency in (0, 0.5, 1):
        link = ml.Pipeline(16, latency=latency)
        plan, ours = (ml.plan(link, policy, machine=ml.Machine(ranks=4), **more)
                      for policy, more in ((zero_bubble, {}), ("zb_h2", {"hop": latency})))
        print(f"zb_h2, latency {latency}: {plan.schedule.diff(ours.schedule) or 'the same order'}, "
              f"makespan {plan.timeline.makespan}")
