"""Random orders of one's own, valid and broken, are judged by the arena, `check` and `simulate` as a brute-force
checker judges them; none ends in a traceback, and none that is ranked exceeds a cap.

    python -m pytest tests/fuzz/test_own_orders.py -q            some hundred orders
    SEED=7 PLANS=10000 python -m pytest tests/fuzz/test_own_orders.py -q -m campaign -s
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import brute_force
import numpy as np
import pytest
from test_judged_plans import POLICIES, cap_near, little_effort, mutated, planned

from minidl import arena
from minidl.cli import main
from minidl.schedulers.pipeline import Problem, bounds

__all__ = ["little_effort"]  # a fixture

QUICK = [name for name in POLICIES if name not in ("joint", "zb_auto", "fast_forward_auto", "v_half", "v_min", "zb_v")]


def judged(rng: np.random.Generator, folder: Path, capsys: pytest.CaptureFixture[str], commands: float) -> str:
    """Judges one order; `commands`: the share of orders that `simulate` prices, beside all published policies; if it
    is not 0, `check` judges all of them. Returns the verdict."""
    made = None
    while made is None:
        p, m = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        made = planned(str(rng.choice(QUICK)), p, m, rng)
    cap = cap_near(made, rng)
    text = made.schedule.to_csv()
    for _ in range(int(rng.integers(0, 3))):
        text = mutated(text, rng)
    why = brute_force.Pipeline(p, m, None, cap).judge(text)
    task = arena.Task("random", p, m, *rng.integers(1, 5, 3).astype(float).tolist(),
                      latency=float(rng.integers(0, 3)), activation_cap=cap)
    entry = arena.judge(task, text, "own.csv")
    assert (entry.why == "") == (why == ""), f"{text}\nours: {entry.why or 'valid'}; the checker: {why or 'valid'}"
    if entry.plan is not None:
        assert entry.price is not None
        assert cap is None or max(entry.price.peak_activations) <= cap + 1e-9
        least, work = bounds(Problem.of(entry.plan.placement, m, entry.plan.cost))
        assert entry.price.makespan >= least - 1e-9
        assert entry.price.period >= max(work, task.bound) - 1e-9
    if commands:
        path = folder / "own.csv"
        path.write_text(text)
        flags = ["--ranks", str(p), "--micro-batches", str(m), "--json"]
        flags += [] if cap is None else ["--activation-cap", str(cap)]
        assert main(["check", str(path), *flags]) == (0 if entry.plan is not None else 1), text
        found = json.loads(capsys.readouterr().out)
        assert found["valid"] == (entry.plan is not None)
    if rng.random() < commands:
        times = [f"--{name.replace('_', '-')}={getattr(task, name)}"
                 for name in ("forward", "output_grad", "weight_grad", "latency")]
        code = main(["simulate", *flags, *times, "--scheduler", str(path)])
        out, error = capsys.readouterr()
        assert "Traceback" not in error
        if entry.price is not None:
            assert (code, json.loads(out)["makespan"]) == (0, entry.price.makespan)
        else:
            assert code == 2, error
    return "valid" if not why else "broken"


def test_orders_of_ones_own(tmp_path, capsys):
    rng = np.random.default_rng(3)
    found = Counter(judged(rng, tmp_path, capsys, 0.0) for _ in range(120))
    assert min(found.values()) > 20
    assert len(found) == 2
    judged(rng, tmp_path, capsys, 1.0)


@pytest.mark.campaign
def test_many_orders_of_ones_own(tmp_path, capsys):
    seed, plans = int(os.environ.get("SEED", "0")), int(os.environ.get("PLANS", "10000"))
    with capsys.disabled():
        print(f"seed {seed}, {plans} orders")
    rng = np.random.default_rng(seed)
    found = Counter(judged(rng, tmp_path, capsys, min(1.0, 60 / plans)) for _ in range(plans))
    with capsys.disabled():
        print(dict(found))
    assert min(found.values()) > plans / 5
