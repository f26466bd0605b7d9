"""Data and a network of your own. Use them as `--model data.py:small --data data.py:rings`."""

import numpy as np

from minidl import data, models, nn


def rings(split, seed):
    """Points on two rings, as batches (x, y): x (n, 2) numbers, y (n,) the ring. Any iterable of batches will do."""
    rng = np.random.default_rng([seed, split == "test"])
    for _ in range(20):
        y = rng.integers(0, 2, 64)
        angle, radius = rng.uniform(0, 2 * np.pi, 64), 1 + y + 0.1 * rng.standard_normal(64)
        yield np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), y


def small(width=32):
    """`input_shape` says what a sample must be, and `classes` how many there are."""
    network = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))
    network.input_shape, network.classes = (2,), 2
    return network


if __name__ == "__main__":
    train = data.load(f"{__file__}:rings", batch_size=64)
    network = models.create(f"{__file__}:small", width=16)
    x, y = next(train)
    print(f"{train.dataset.samples} points, logits {network(x).shape}")
