"""A solution of assignment 1."""

import numpy as np


def backward(layers, x, dy, order):
    inputs, y = [], np.array(x, float)
    for layer in layers:
        inputs.append(y)
        y = y @ layer["weight"] + layer["bias"] if layer["kind"] == "linear" else np.maximum(y, 0)
    toward = {len(layers): np.array(dy, float)}  # layer -> the gradient toward its input
    found = {}
    for name in order:
        i, kind = int(name[:-1]), name[-1]
        if i + 1 not in toward:
            raise ValueError(f"{name} needs {i + 1}O")
        above, layer = toward[i + 1], layers[i]
        if kind == "W":
            found[name] = [inputs[i].T @ above, above.sum(0)]
        else:
            toward[i] = above @ np.transpose(layer["weight"]) if layer["kind"] == "linear" else above * (inputs[i] > 0)
            found[name] = toward[i]
    return found
