"""Chapter 2. The output gradient and the weight gradient, apart.

    python docs/tutorial/chapter2_two_gradients.py

Each layer of a backward pass computes two gradients. Most libraries compute both in one go. Here we pull them apart
and see how much freedom that gives, and what the freedom costs.
"""

import numpy as np

import minidl as ml
from minidl import models, nn

random = np.random.default_rng(0)

# ---------------------------------------------------------------------------------------------------------------------
# Take a stack of layers, y = relu(x w). Layer 0 is the nearest to the input. From chapter 1 we know the two rules:
#
#     O(l), the output gradient:  dx = dy w^T     the layer below waits for it
#     W(l), the weight gradient:  dw = x^T dy     nobody waits for it, until the parameter is updated
#
# Both read dy, the gradient that arrives from the layer above. Neither reads the other. We write them as two functions
# that take what they read from a table `have` and put there what they make.

LAYERS = 5
weights = [random.standard_normal((16, 16)) * 0.35 for _ in range(LAYERS)]
batch, target = random.standard_normal((8, 16)), random.standard_normal((8, 16))


def forward():
    have = {"x0": batch}
    for l in range(LAYERS):
        have[f"x{l + 1}"] = np.maximum(have[f"x{l}"] @ weights[l], 0)
    # The loss is half the squared distance to the target. Its gradient arrives at the last layer.
    have[f"dy{LAYERS - 1}"] = have[f"x{LAYERS}"] - target
    return have


def through_relu(l, have):
    return have[f"dy{l}"] * (have[f"x{l + 1}"] > 0)


def output_gradient(l, have):
    have[f"dy{l - 1}"] = through_relu(l, have) @ weights[l].T


def weight_gradient(l, have):
    have[f"dw{l}"] = have[f"x{l}"].T @ through_relu(l, have)


# A backward pass is then a list of names. The task 3W is the weight gradient of layer 3. Layer 0 has no O: below it
# are the data, and nobody wants their gradient. This is the order that libraries use:

conventional = [name for l in reversed(range(LAYERS)) for name in (f"{l}W", f"{l}O") if name != "0O"]


def run(order):
    have = forward()
    for name in order:
        (output_gradient if name.endswith("O") else weight_gradient)(int(name[:-1]), have)
    return [have[f"dw{l}"] for l in range(LAYERS)]


# What must come before what? O(l) and W(l) read dy(l), which O(l+1) makes. That is all:
#
#     4O -> 3O -> 2O -> 1O        the chain
#      |     |     |     |
#     3W    2W    1W    0W        one leaf on each link (4W hangs on the loss)
#
# The chain is the critical part. A leaf may fall at any later time. So there are many legal orders.


def needs(name):
    above = int(name[:-1]) + 1
    return None if above == LAYERS else f"{above}O"


def random_order():
    order, waiting = [], list(conventional)
    while waiting:
        ready = [name for name in waiting if needs(name) in order or needs(name) is None]
        order.append(ready[random.integers(len(ready))])
        waiting.remove(order[-1])
    return order


reference = run(conventional)
for _ in range(50):
    for mine, expected in zip(run(random_order()), reference, strict=True):
        assert mine.tobytes() == expected.tobytes()
print("the conventional order:", *conventional)
print("a random legal order:  ", *random_order())
print("50 random legal orders gave the same weight gradients, bit for bit\n")

# Bit for bit is a strong word, and we mean it. Floating-point addition depends on the order of the terms. But each task
# here does the same arithmetic on the same numbers, whenever it runs. Where gradients are added up, as over several
# micro-batches, the order of the additions is fixed by the graph of chapter 3. So no tolerance is ever needed to say
# whether a schedule is right.


# ---------------------------------------------------------------------------------------------------------------------
# What is the freedom good for? With one worker, for nothing: the sum of the work is the same. With two, the leaves can
# run beside the chain. Let each task take one unit of time. Main works on the chain, sub on the leaves.


def timeline(lanes):
    """When each task starts, if each lane keeps its order and each task takes one unit."""
    start, free, left = {}, dict.fromkeys(lanes, 0), {lane: list(order) for lane, order in lanes.items()}
    while any(left.values()):
        for lane, order in left.items():
            if order and (needs(order[0]) is None or needs(order[0]) in start):
                ready = 0 if needs(order[0]) is None else start[needs(order[0])] + 1
                start[order[0]] = max(ready, free[lane])
                free[lane] = start[order[0]] + 1
                order.pop(0)
    return start


def draw(lanes):
    start = timeline(lanes)
    end = max(start.values()) + 1
    for lane, order in lanes.items():
        cells = ["· "] * end
        for name in order:
            cells[start[name]] = name
        print(f"    {lane:5}", " ".join(cells))
    print(f"    the backward pass ends at {end}\n")
    return end


chain = [name for name in conventional if name.endswith("O")]
leaves = [name for name in conventional if name.endswith("W")]
one = draw({"main": conventional})
two = draw({"main": chain, "sub": leaves})
assert (one, two) == (2 * LAYERS - 1, LAYERS)

# This is multi-stream out-of-order backprop in a nutshell. The gain is real when two tasks can run at once: because the
# device has room beside a small kernel, or because one lane would only wait for data from another device.


# ---------------------------------------------------------------------------------------------------------------------
# And the price? W(l) reads x(l) and dy(l). As long as it has not run, both must be kept. Let us count how many of these
# arrays are alive while a single worker runs an order.


def most_alive(order):
    reads = {name: {f"dy{name[:-1]}", f"x{int(name[:-1]) + 1}"} | ({f"x{name[:-1]}"} if "W" in name else set())
             for name in order}
    alive, most = {f"x{l}" for l in range(LAYERS + 1)} | {f"dy{LAYERS - 1}"}, 0
    for i, name in enumerate(order):
        if name.endswith("O"):
            alive.add(f"dy{int(name[:-1]) - 1}")
        most = max(most, len(alive))
        alive &= set().union(*(reads[later] for later in order[i + 1 :]))
    return most


print(f"arrays alive at most: {most_alive(conventional)} in the conventional order,", end=" ")
print(f"{most_alive(chain + leaves)} with all output gradients first\n")
assert most_alive(chain + leaves) > most_alive(conventional)

# So delaying a weight gradient buys time with memory. Every schedule in this project is some answer to when that is a
# good bargain.


# ---------------------------------------------------------------------------------------------------------------------
# In minidl the two gradients are separate tasks from the start. An op is a small class with a forward, an output_grad
# and a weight_grad, and each of them becomes a task. Here is the backward part of a step of a small network:

model = models.mlp(16, 16, 16, 4)


def step(x, y):
    loss = nn.cross_entropy(model(x), y)
    loss.backward()
    return loss


graph = ml.record(step, np.zeros((8, 16), np.float32), np.zeros(8, np.int64))
print("in minidl:", *(task.name for task in graph if task.kind != ml.Kind.F))
assert sum(task.kind == ml.Kind.W for task in graph) == 3

# A task's name is its unit (each use of a layer is one), its kind and its micro-batch: 4W0 is the weight gradient of
# unit 4 for micro-batch 0. Units without parameters, such as a relu, have an O but no W.
#
# Exercise 2. Data-parallel training must send each weight gradient to the other workers, and the next forward pass
# needs layer 0 first. So it helps to compute the weight gradients of the first k layers last, in ascending order. This
# order is called reverse first-k. exercises/exercise2.py asks for it. Grade it with
#
#     python docs/tutorial/grade.py 2 my_first_k.py
