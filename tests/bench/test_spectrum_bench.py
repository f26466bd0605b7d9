"""The report on approximate backward passes: a run's record has what its table shows."""

import sys

from helpers import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import spectrum


def test_a_run_with_rounded_gradients():
    told = {"model": "mlp", "model_args": {"layers": 2, "hidden": 8}, "batch_size": 256, "dither": 4.0}
    found = spectrum.trained(0, told, 1)
    assert 0 <= found["zeros_before"] < found["zeros"] < 1
    assert spectrum.trained(0, told, 1) == found
    text = spectrum.said({"runs": [found, {**found, "accuracy": 1.0}]})
    assert "to 100.0)" in text
    assert f"zeros {100 * found['zeros_before']:.0f} % before" in text
