"""Data of one's own stay as they are, unless --standardize asks for it; then checkpoints and exported weights carry the
mean and deviation, so that they are right on raw data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import one_line, refusal, reported, run, shown
from data_checks import refused
from safetensors.numpy import load_file

from minidl import data, models
from minidl.data.loader import fifth
from minidl.training import weights
from minidl.training.job import Job
from minidl.training.recorded import Recorded

RUN = ("--model", "mlp", "--model-arg", "hidden=8", "--costs", "analytic", "--batch-size", "16")
OWN = "import numpy as np\n\n\ndef arrays():\n    found = np.load('v.npz')\n    return found['x'], found['y']\n"


def raw(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((100, 3)) * [1, 40, 3] + [5, 100, -2]
    return x, (x[:, 0] * 20 + x[:, 1] > 200).astype(int)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """The same vectors in each form, and images of bytes."""
    monkeypatch.chdir(tmp_path)
    x, y = raw()
    np.savez("v.npz", x=x, y=y)
    (tmp_path / "arrays").mkdir()
    np.save("arrays/x.npy", x)
    np.save("arrays/y.npy", y)
    Path("t.csv").write_text("\n".join(["a,b,c,label", *(f"{a!r},{b!r},{c!r},{k}" for (a, b, c), k in
                                                           zip(x.tolist(), y.tolist(), strict=True))]))
    Path("own.py").write_text(OWN)
    np.savez("i.npz", x=np.random.default_rng(1).integers(0, 256, (40, 8, 8, 1)).astype(np.uint8), y=np.arange(40) % 10)
    return tmp_path


@pytest.mark.parametrize("name", ["v.npz", "arrays", "t.csv", "own.py:arrays", "i.npz"])
def test_own_data_stay_as_they_are_and_are_standardised_on_demand(folder: Path, name: str) -> None:
    x = np.load("i.npz" if name == "i.npz" else "v.npz")["x"]
    told: list[str] = []

    def tell(line: str) -> None:
        if "standardi" in line:
            told.append(line)

    for split in ("train", "test"):
        mine, seen = x[fifth(len(x), split)], x[fifth(len(x), "train")]
        places = tuple(range(x.ndim - 1))
        plain = data.load(f"./{name}" if name == "arrays" else name, batch_size=8, split=split, note=tell)
        np.testing.assert_array_equal(plain.dataset.rows(np.arange(8))[0], mine[:8].astype(np.float32))
        assert plain.scaling is None
        scaled = data.load(f"./{name}", batch_size=8, split=split, standardize=True, note=tell)
        assert scaled.scaling is not None
        np.testing.assert_allclose(scaled.scaling.mean, seen.mean(places, np.float64), rtol=1e-12)
        np.testing.assert_allclose(scaled.scaling.std, seen.std(places, np.float64), rtol=1e-12)
        np.testing.assert_allclose(scaled.dataset.rows(np.arange(8))[0],
                                   (mine[:8] - scaled.scaling.mean) / scaled.scaling.std, rtol=1e-5, atol=1e-6)
    assert ["--standardize scales them" in line for line in told] == [True, False] * 2
    assert all("standardised by the mean and deviation of its training part" in line for line in told[1::2])


@pytest.mark.parametrize("true", [1, np.True_])
def test_what_is_true_asks_for_it(folder: Path, true: Any) -> None:
    told: list[str] = []
    data.load("v.npz", batch_size=8, standardize=true, note=told.append)
    assert "standardised by the mean and deviation of its training part" in told[-1]
    refused("--standardize has no effect on digits", act=lambda: data.load("digits", batch_size=8, standardize=true))
    assert data.load("v.npz", batch_size=8, standardize=np.False_, note=told.append).scaling is None


def test_exported_weights_are_right_on_raw_data(folder: Path, capsys: Any) -> None:
    """An independent forward pass on the raw numbers has the loss that the run reports."""
    record = reported(capsys, "train", *RUN, "--data", "v.npz", "--standardize", "--steps", "20", "--checkpoint", "c")
    out = shown(capsys, "export", "c", "w.safetensors")
    assert "reads (x - standardize.mean) / standardize.std" in out
    w = load_file("w.safetensors")
    x, y = (part[fifth(100, "test")] for part in raw())
    h = (x - w["standardize.mean"]) / w["standardize.std"]
    layers = sorted(name.removesuffix(".weight") for name in w if name.endswith(".weight"))
    for layer in layers:
        h = h @ w[f"{layer}.weight"].T.astype(np.float64) + w[f"{layer}.bias"]
        h = h if layer == layers[-1] else np.maximum(h, 0)
    loss = np.mean(np.log(np.exp(h - h.max(1, keepdims=True)).sum(1)) + h.max(1) - h[np.arange(len(y)), y])
    assert loss == pytest.approx(record["test"]["loss"], rel=1e-5)


def test_a_run_that_resumes_keeps_the_mean_and_deviation(folder: Path, capsys: Any) -> None:
    args = ("train", *RUN, "--data", "v.npz")
    whole = reported(capsys, *args, "--standardize", "--steps", "9")
    assert run(capsys, *args, "--standardize", "--steps", "4", "--checkpoint", "c")[0] == 0
    resumed = reported(capsys, *args, "--steps", "9", "--checkpoint", "c", "--resume")
    assert resumed["params_sha256"] == whole["params_sha256"]
    x, y = raw(7)  # other numbers under the same name
    np.savez("v.npz", x=x, y=y)
    assert run(capsys, *args, "--steps", "12", "--checkpoint", "c", "--resume")[0] == 0
    np.testing.assert_allclose(load_file("c/checkpoint.safetensors")["standardize.mean"],
                               raw()[0][fifth(100, "train")].mean(0), rtol=1e-12)


def test_a_run_that_starts_from_weights_uses_their_mean_and_deviation(folder: Path, capsys: Any) -> None:
    args = ("train", *RUN, "--data", "v.npz", "--steps", "1")
    assert run(capsys, *args, "--standardize", "--checkpoint", "c")[0] == 0
    assert run(capsys, "export", "c", "w.safetensors")[0] == 0
    x, y = raw(7)
    np.savez("v.npz", x=x, y=y)
    recorded = Recorded(Job(model="mlp", model_args={"hidden": 8, "features": 3}, data="v.npz", batch_size=16,
                            init="w.safetensors"))
    found = weights.scaling("w.safetensors")
    assert found is not None
    seen, _ = recorded.test_data.dataset.rows(np.arange(5))
    np.testing.assert_allclose(seen, (x[fifth(100, "test")][:5] - found.mean) / found.std, rtol=1e-5)
    assert "reads standardised data" in recorded.remarks[0]
    np.savez("v.npz", x=x[:, :2], y=y)
    code, _, err = run(capsys, *args, "--init", "w.safetensors")
    note, error = err.splitlines(keepends=True)
    assert note.startswith("v.npz: standardised by the mean and deviation of the data on which its weights were")
    assert (code, "has 2 features or channels" in one_line(error)) == (2, True)


def test_a_checkpoint_of_data_as_they_are_does_not_resume_on_standardised_ones(folder: Path, capsys: Any) -> None:
    args = ("train", *RUN, "--data", "v.npz", "--checkpoint", "c")
    assert run(capsys, *args, "--steps", "2")[0] == 0
    code, _, err = run(capsys, *args, "--steps", "3", "--resume", "--standardize")
    assert code == 2
    note, error = err.splitlines(keepends=True)
    assert note.startswith("v.npz: standardised by the mean and deviation of its training part")
    assert "its data are as they are, the data of this run are standardised" in one_line(error)


def test_timms_names_keep_the_mean_and_deviation() -> None:
    values = models.create("mobilenet_v3_large", preset="tiny").state_dict()
    scales = dict.fromkeys(weights.STANDARDIZE, np.ones(3))
    assert weights.to_timm(values | scales).keys() == weights.to_timm(values).keys() | scales


DATASET = """
import numpy as np
from minidl import data


def made():
    return data.Dataset("mine", 64, (3,), 2, lambda i: (np.ones((len(i), 3), "float32"), i % 2))
"""


@pytest.mark.parametrize(("argv", "says"), [
    (["train", *RUN, "--standardize"], "--standardize has no effect on digits"),
    (["train", *RUN, "--data", "synthetic", "--standardize"], "--standardize has no effect on synthetic"),
    (["train", "--model", "gpt", "--model-arg", "preset=tiny", "--standardize"], "has no effect on pydoc"),
    (["train", *RUN, "--data", "made.py:made", "--standardize"], "--standardize has no effect on mine"),
    (["plan", *RUN, "--standardize"], "--standardize has no effect on `minidl plan`"),
])
def test_it_is_refused_where_it_has_no_effect(folder: Path, capsys: Any, argv: list[str], says: str) -> None:
    Path("made.py").write_text(DATASET)
    assert says in refusal(capsys, *argv)


@pytest.mark.parametrize("bad", [np.zeros(3), np.full(3, np.nan), np.full(3, -1.0)])
def test_a_deviation_by_which_nothing_can_be_divided_is_refused(folder: Path, bad: Any) -> None:
    refused("v.npz", "not above 0", act=lambda: data.load("v.npz", batch_size=4,
                                                          standardize=data.Scaling(np.zeros(3), bad)))
