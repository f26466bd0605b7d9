"""The study of batch sizes: equal draws, pruning by hand, steps that fall with the batch, and the reported optimum."""

from itertools import pairwise

import batch_size
import numpy as np
import pytest
from helpers import results


def test_draws_are_sobols_points():
    """The first of the published sequence after (0, 0) and (1/2, 1/2); 2^k of them fill all cells of a grid."""
    assert batch_size.sobol(4).tolist() == [[0.75, 0.25], [0.25, 0.75], [0.375, 0.375], [0.875, 0.875]]
    points = np.array([[0.0, 0.0], [0.5, 0.5], *batch_size.sobol(62)])
    assert len({(int(8 * a), int(8 * b)) for a, b in points}) == 64
    assert all(0.01 <= rate <= 3 and 0 <= momentum <= 0.95 for rate, momentum in batch_size.rates(30))


def test_pruning_keeps_the_largest_mask_gradients_of_the_whole_network():
    random = np.random.default_rng(0)
    weights = [random.standard_normal(shape).astype("f") for shape in ((32, 64), (32,), (10, 32), (10,))]
    x, y = random.standard_normal((150, 64)).astype("f"), random.integers(0, 10, 150)
    kept = batch_size.masks(weights, x, y, 0.7)
    count = sum(w.size for w in weights)
    assert sum(m.sum() for m in kept) == round(0.3 * count)

    def loss(mask_of_first, part):
        masked = [weights[0] * mask_of_first, *weights[1:]]
        z = batch_size.output([w.astype("d") for w in masked], x[part].astype("d"))[1]
        return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), y[part]])

    sizes = []
    for i, j in ((0, 0), (5, 7), (31, 63), (12, 40)):
        step = np.zeros((32, 64))
        step[i, j] = 1e-6
        sizes.append((abs(sum((loss(1 + step, part) - loss(1 - step, part)) / 2e-6
                              for part in (slice(0, 100), slice(100, 150)))), kept[0][i, j]))
    assert min(s for s, k in sizes if k) > max((s for s, k in sizes if not k), default=0)


def test_larger_batches_need_fewer_steps_and_the_optimum_is_the_least_of_all():
    draws = batch_size.rates(3)
    steps = {str(b): batch_size.steps_to_goal(b, 0.0, draws, 0) for b in (16, 256)}
    assert steps["256"] < steps["16"]
    assert steps["256"] == batch_size.steps_to_goal(256, 0.0, draws, 0), "drawn again"
    rows = list(batch_size.times(steps))
    for row in rows:
        each = {int(b): k * batch_size.predicted(int(b), row["ranks"], row["policy"]) / 1e3 for b, k in steps.items()
                if int(b) % row["ranks"] == 0}
        assert row["ms"] == pytest.approx(min(each.values()), abs=1e-3)
        assert each[row["batch"]] == min(each.values())
    assert 1 <= batch_size.paying(rows, "barrier") <= max(batch_size.RANKS)


def test_recorded_steps_to_the_goal_do_not_grow_with_the_batch():
    """Within noise: a tenth."""
    record = results("batch_size")
    for found in record["sparsities"].values():
        ordered = [steps for _, steps in sorted(found["steps"].items(), key=lambda item: int(item[0])) if steps]
        assert len(ordered) >= 7
        assert all(after <= 1.1 * before for before, after in pairwise(ordered))
