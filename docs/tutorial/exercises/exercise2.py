"""Exercise 2. Reverse first-k.

Copy this file, complete `reverse_first_k`, and grade your copy:

    cp docs/tutorial/exercises/exercise2.py my_first_k.py
    python docs/tutorial/grade.py 2 my_first_k.py

The rule: go down from the last layer to the first. At each layer with l >= k, its weight gradient comes first, then
its output gradient. At layers below k there is only the output gradient. When the chain is done, the weight gradients
of layers 0, 1, .., k-1 follow in ascending order. Layer 0 has no output gradient.

With 4 layers and k = 2:  3W 3O 2W 2O 1O 0W 1W
"""


def reverse_first_k(layers, k):
    """The backward pass of `layers` layers as a list of names such as "3W", for 0 <= k <= layers."""
    order = []
    for l in reversed(range(layers)):
        order.append(f"{l}W")  # this is the conventional order: k is not used yet
        if l > 0:
            order.append(f"{l}O")
    return order
