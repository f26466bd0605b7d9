"""Chapter 6. Pipelines, from GPipe to zero bubble.

    python docs/tutorial/chapter6_pipelines.py

A network too large for one device is cut into stages, one per rank. The batch is cut into micro-batches that go through
the stages like parts along an assembly line. This chapter writes four famous schedules, each in a few lines, and shows
what it is worth that a weight gradient can wait.
"""

import minidl as ml
from minidl.schedulers import pipeline

RANKS, MICRO_BATCHES = 3, 6

# ---------------------------------------------------------------------------------------------------------------------
# The tasks are as before, but a unit is now a whole stage: 2F4 is the forward of stage 2 for micro-batch 4. Stage s
# lives on rank s. A policy is a function that says, for each rank, in which order it does its tasks. When each task
# starts follows from the order: as soon as its rank is free and what it needs has arrived.
#
# `show` makes a plan of a policy, proves it, prices it and draws it. Every task takes one unit of time here, so a fused
# backward B takes two. Sending takes no time.

cost = ml.CostModel.given(forward=1, output_grad=1, weight_grad=1)


def show(title, policy):
    schedule = ml.Schedule.from_names({ml.Lane(rank): policy(rank) for rank in range(RANKS)})
    plan = ml.plan(ml.Pipeline(MICRO_BATCHES), schedule, machine=ml.Machine(RANKS))
    price = pipeline.price(plan, cost)
    print(f"\n{title}\n{pipeline.grid(plan, ml.simulate(plan.graph, plan.schedule, cost))}")
    print(f"makespan {price.makespan:g}, largest span {price.max_span:g}, chained {price.period:g}, "
          f"bubble {price.bubble_rate:.0%}, activations kept {max(price.peak_activations):g}")
    return schedule, price


# GPipe (2018): all forwards, then all backwards.


def gpipe(rank):
    return [f"{rank}F{i}" for i in range(MICRO_BATCHES)] + [f"{rank}B{i}" for i in range(MICRO_BATCHES)]


_, first = show("GPipe", gpipe)

# The empty places are the bubble. Rank 2 must wait until something arrives, and rank 0 until something comes back. How
# large is it? The work of one rank is m(F+O+W) = 18 units. The makespan is 24. The bubble is (p-1)(F+O+W) = 6: it does
# not depend on the number of micro-batches, so many of them make it small in proportion. But GPipe keeps the
# activations of all micro-batches until their backwards, so many of them need much memory.

assert first.makespan == (MICRO_BATCHES + RANKS - 1) * 3
assert max(first.peak_activations) == MICRO_BATCHES


# 1F1B (2020) repairs the memory. A rank runs only as many forwards ahead as it needs to stay busy, p - s on rank s.
# From then on, one backward and one forward in turn: each backward frees an activation before the next forward makes
# one.


def alternate(rank, ahead, backward):
    """`ahead` forwards, then `backward(i)` and one forward in turn, as long as there are any."""
    order = [f"{rank}F{i}" for i in range(min(ahead, MICRO_BATCHES))]
    for i in range(MICRO_BATCHES):
        order += backward(i)
        if ahead + i < MICRO_BATCHES:
            order.append(f"{rank}F{ahead + i}")
    return order


def one_f_one_b(rank):
    return alternate(rank, RANKS - rank, lambda i: [f"{rank}B{i}"])


_, second = show("1F1B", one_f_one_b)
assert second.makespan == first.makespan
assert max(second.peak_activations) == RANKS


# ---------------------------------------------------------------------------------------------------------------------
# Same bubble, less memory. To make the bubble smaller, look at what the ranks wait for while the pipeline drains. Rank
# 0 waits for a gradient from rank 1. Rank 1 sends it when its backward is done, and half of that backward is a weight
# gradient, which rank 0 does not need.
#
# So the same idea as in chapter 2: compute the output gradient and send it off, and do the weight gradient when there
# is nothing better to do. ZB-H1 (2023) is 1F1B with the two halves apart, where the weight gradients of rank s lag s
# micro-batches behind.


def zero_bubble(rank, ahead, lag):
    """1F1B with the halves apart: after the output gradient i comes the weight gradient i - lag."""
    order = alternate(rank, ahead, lambda i: [f"{rank}O{i}"] + [f"{rank}W{i - lag}"] * (i >= lag))
    return order + [f"{rank}W{i}" for i in range(max(0, MICRO_BATCHES - lag), MICRO_BATCHES)]


def zb_h1(rank):
    return zero_bubble(rank, ahead=RANKS - rank, lag=rank)


_, third = show("ZB-H1", zb_h1)
assert third.makespan == first.makespan - 2 * (RANKS - 1)  # the bubble is (p-1)(F+O-W) now
assert max(third.peak_activations) == max(second.peak_activations)


# Two thirds of the bubble are gone, for the same memory. The rest is the gap on rank 0 before its first gradient
# comes back. Only forwards could fill it. So ZB-H2 takes more of them in at the start, up to 2p - 1 on rank 0, and lets
# the weight gradients lag further behind.


def zb_h2(rank):
    return zero_bubble(rank, ahead=2 * (RANKS - rank) - 1, lag=2 * rank)


_, fourth = show("ZB-H2", zb_h2)
assert fourth.makespan == third.makespan
assert fourth.period == MICRO_BATCHES * 3  # no bubble at all
assert max(fourth.peak_activations) == 2 * RANKS - 1

# The makespan is that of ZB-H1. But look at the rows: each rank works without a gap from its first task to its last. So
# the next iteration can follow at once, provided that no barrier stands between: rank 0 begins while rank 2 still ends.
# That is why a schedule needs three times and not one: the makespan from barrier to barrier, the largest span of a
# rank, and the period when iterations are chained. The price was memory, 5 activations in place of 3.

# ---------------------------------------------------------------------------------------------------------------------
# Is there anything better? minidl knows many more policies, and prices them side by side:
#
#     python -m minidl simulate --table --ranks 3 --micro-batches 6
#
# All four above are among them, with the same orders.

for name, policy in {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}.items():
    theirs = ml.plan(ml.Pipeline(MICRO_BATCHES), name, machine=ml.Machine(RANKS)).schedule
    assert [theirs.names(rank) for rank in range(RANKS)] == [policy(rank) for rank in range(RANKS)]
print("\nthe four orders equal the ones that minidl's own policies make")


# A plan is a CSV file as in chapter 4, and its proof is as strict. Here somebody edited ZB-H1 and copied one row too
# many. The weight gradient would count twice, and training would go wrong without any error:

rows = {rank: zb_h1(rank) for rank in range(RANKS)}
rows[1].append("1W0")
try:
    ml.plan(ml.Pipeline(MICRO_BATCHES), ml.Schedule.from_names({ml.Lane(rank): names for rank, names in rows.items()}),
            machine=ml.Machine(RANKS))
    raise AssertionError("the duplicate went unnoticed")
except ml.ScheduleError as error:
    print(f"\n{error}")

# Exercise 6. exercises/exercise6.csv is 1F1B for 3 ranks and 4 micro-batches with O and W apart, but every W still
# stands right behind its O. It takes 16. Move the weight gradients so that it takes 14, which is the proved optimum for
# no more than 3 activations on a rank. The plan must stay valid all along:
#
#     cp docs/tutorial/exercises/exercise6.csv my_pipeline.csv
#     python -m minidl check my_pipeline.csv --ranks 3 --micro-batches 4 --activation-cap 3
#     python docs/tutorial/grade.py 6 my_pipeline.csv
