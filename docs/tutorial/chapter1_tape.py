"""Chapter 1. A tensor and a tape, from nothing.

Run it from the top of the repository:

    python docs/tutorial/chapter1_tape.py

This chapter uses NumPy and nothing else. It builds a very small engine, trains a network with it, and stops at the
question that the rest of the tutorial is about.
"""

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# A network is a long formula. To train it we need the derivative of one number, the loss, with respect to thousands of
# others, the parameters. The chain rule gives them all, provided that somebody remembers how the loss came about.
#
# That somebody is the tape. Whenever an operation computes a value, it writes an entry on the tape: what went in, what
# came out, and how to carry a gradient back from the one to the other. We need no compiler and no symbols. The program
# runs, and the tape writes down what ran.
#
# A tensor is a value and, later, the gradient of the loss toward that value.

tape = []


class Tensor:
    def __init__(self, value):
        self.value = np.asarray(value, dtype=np.float64)
        self.grad = None

    def __matmul__(self, other):
        return matmul(self, other)

    def __add__(self, other):
        return add(self, other)


# An operation calls `emit` with its result and with one entry (input, rule) for each input. A rule is a function: the
# gradient of the output goes in, the gradient of that input comes out.


def emit(value, *inputs):
    out = Tensor(value)
    tape.append((out, inputs))
    return out


# Now the operations. Each is two short things side by side: the formula, and the rule for each of its inputs.
#
# For y = x w the rules are dx = dy w^T and dw = x^T dy. Look at them for a moment. They read the same dy and do not
# read each other. Chapter 2 starts from there.


def matmul(x, w):
    return emit(x.value @ w.value, (x, lambda dy: dy @ w.value.T), (w, lambda dy: x.value.T @ dy))


def add(x, b):
    """x (n, k) plus a row b (k,)."""
    return emit(x.value + b.value, (x, lambda dy: dy), (b, lambda dy: dy.sum(axis=0)))


def relu(x):
    return emit(np.maximum(x.value, 0), (x, lambda dy: dy * (x.value > 0)))


def cross_entropy(logits, labels):
    """The mean over samples of -log(softmax(logits)[label])."""
    z = logits.value - logits.value.max(axis=1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    one_hot = np.eye(p.shape[1])[labels]
    return emit(-np.log(p[rows, labels]).mean(), (logits, lambda dy: dy * (p - one_hot) / len(labels)))


# The backward pass reads the tape from its end. When we reach an entry, everything that used its output has been
# passed already, so the gradient of that output is complete. A value that was used twice gets the sum of both
# gradients. That is the whole algorithm.


def backward(loss):
    loss.grad = np.ones_like(loss.value)
    for out, inputs in reversed(tape):
        if out.grad is None:
            continue  # the loss does not depend on this entry
        for tensor, rule in inputs:
            gradient = rule(out.grad)
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


# The engine ends here. It is worth checking, and there is a check that knows nothing of rules: nudge one number of a
# parameter a little, and see how much the loss moves. These are finite differences. Every op of minidl is tested so.


def finite_difference(function, tensor, index, nudge=1e-6):
    """How fast the number `function()` changes with `tensor.value[index]`."""
    before = tensor.value[index]
    tensor.value[index] = before + nudge
    above = float(function())
    tensor.value[index] = before - nudge
    below = float(function())
    tensor.value[index] = before
    return (above - below) / (2 * nudge)


# Something to learn: points in a square, and whether they lie inside a ring. A straight line cannot tell them apart.

random = np.random.default_rng(0)
points = random.uniform(-1, 1, (256, 2))


def inside(p):
    radius = np.hypot(p[:, 0], p[:, 1])
    return ((radius > 0.35) & (radius < 0.85)).astype(int)


labels = inside(points)


class Layer:
    def __init__(self, inputs, outputs):
        self.w = Tensor(random.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs))
        self.b = Tensor(np.zeros(outputs))

    def __call__(self, x):
        return x @ self.w + self.b


layers = [Layer(2, 32), Layer(32, 32), Layer(32, 2)]
parameters = [p for layer in layers for p in (layer.w, layer.b)]


def network(x):
    for layer in layers[:-1]:
        x = relu(layer(x))
    return layers[-1](x)


def loss_of_network():
    return cross_entropy(network(Tensor(points)), labels)


def main():
    # First the check.
    tape.clear()
    backward(loss_of_network())
    for p, index in ((layers[0].w, (0, 3)), (layers[1].w, (5, 7)), (layers[2].b, (1,))):
        slope = finite_difference(lambda: loss_of_network().value, p, index)
        assert abs(slope - p.grad[index]) < 1e-6
        print(f"gradient {p.grad[index]: .8f}   finite difference {slope: .8f}")

    # Then the training. A step clears the tape, runs forward, runs backward, and moves each parameter a little way
    # down. All of it is ordinary Python.
    print()
    for step in range(400):
        tape.clear()
        for p in parameters:
            p.grad = None
        loss = loss_of_network()
        backward(loss)
        for p in parameters:
            p.value -= 0.5 * p.grad
        if step % 100 == 0 or step == 399:
            print(f"step {step:3d}   loss {float(loss.value):.4f}")

    accuracy = (network(Tensor(points)).value.argmax(axis=1) == labels).mean()
    print(f"\n{accuracy:.1%} of the points are classified correctly. The network sees these inside the ring:\n")
    assert accuracy > 0.9
    for row in np.linspace(1, -1, 15):
        line = np.stack([np.linspace(-1, 1, 31), np.full(31, row)], axis=1)
        print("   ", "".join(".#"[k] for k in network(Tensor(line)).value.argmax(axis=1)))

    # The tape of one step has this shape. Time goes down for the forward pass, and up again for the backward pass.
    tape.clear()
    loss_of_network()
    print(f"\nThe tape of one step has {len(tape)} entries:\n")
    for number, (out, inputs) in enumerate(tape):
        print(f"   {number}  {' and '.join(str(t.value.shape) for t, _ in inputs):22} -> {out.value.shape}")


# `backward` above is one loop in one fixed order, the reverse of the forward pass. Nothing in the mathematics asks for
# exactly that order. A rule may run as soon as the gradient that it reads is there. Which of the legal orders is best
# depends on the machine, so the order should be something that we can hold in our hands, look at and exchange. In this
# loop it is nowhere: it is the loop.
#
# Exercise 1. exercises/exercise1.py asks for a new operation, tanh, with its rule. Grade it with
#
#     python docs/tutorial/grade.py 1 my_tanh.py

if __name__ == "__main__":
    main()
