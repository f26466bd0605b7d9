"""Exercise 8. What no order can beat.

Copy this file, complete `lower_bound`, and grade your copy:

    cp docs/tutorial/exercises/exercise8.py my_bound.py
    python docs/tutorial/grade.py 8 my_bound.py

Each list has one time per layer; layer 0 is nearest the input, and its output gradient is never computed, so
`output_grad[0]` does not count. There is one compute stream and one channel. Return the largest of three bounds on the
period of an iteration in the steady state: all computation, all communication, and the slowest layer's circuit.

A hint: the circuit of layer l goes up with the forwards from l on, comes down with the output gradients of the layers
above l, then needs the layer's own weight gradient and its own sum.
"""


def lower_bound(forward, output_grad, weight_grad, comm):
    """The largest of the three bounds; here are two of them."""
    computation = sum(forward) + sum(output_grad[1:]) + sum(weight_grad)
    return max(computation, sum(comm))
