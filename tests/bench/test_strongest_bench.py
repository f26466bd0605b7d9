"""The benchmark beside the strongest peers: all engines learn alike, arms are processes that take turns, and its
record becomes rows."""

import json

import floors
import pytest
import strongest
import tables
from helpers import deadline, need
from strongest_networks import NETWORKS, Network

QUICK = "MLP 16 x 64, batch 8", "MLP 4 x 512 with norms, batch 64"


def steps(*seconds):
    return [[2 * s, s] for s in seconds]  # by the clock, by the processor


def test_losses_agree_by_what_was_learned():
    assert strongest.agree({"a": [2.0, 1.9], "b": [2.0, 1.904]})
    assert not strongest.agree({"a": [2.0, 1.9], "b": [2.0, 1.906]})
    assert not strongest.agree({"a": [2.0, 2.0], "b": [2.0, 2.001]}), "nothing learned"
    assert not strongest.agree({"a": [2.0, float("nan")], "b": [2.0, 1.9]})


def test_ours_is_compared_with_the_quickest_peer_by_the_clock_of_its_cores():
    arms = {name: {} for name in ("minidl, one lane", "minidl, two lanes", *strongest.PEERS[:2])}
    samples = dict(zip(arms, (steps(3, 3, 3), steps(2, 1, 3), steps(8, 4, 2), steps(9, 9, 9)), strict=True))
    found = strongest.compared(samples, "all", arms)
    assert (found["ours"], found["best"]) == ("minidl, two lanes", "torch eager")
    assert found["over"]["torch eager"]["median"] == 0.25, "the median of neighbours' ratios"
    assert found["over"]["torch eager"]["least"] == 0.5
    assert found["arms"]["minidl, one lane"]["step_ms"]["median"] == 6000
    one = strongest.compared({"minidl": samples["minidl, one lane"]}, "1", {"minidl": {}})
    assert one["best"] is None
    assert one["arms"]["minidl"]["step_ms"]["median"] == 3000


def test_an_arm_that_is_not_installed_is_a_line(call, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(strongest, "missing", lambda name: f"{name.split()[0]} is not here")
    with deadline():
        assert call(strongest, "--networks", QUICK[0], "--cores", 1, "--rounds", 2, "--seconds", 0.01, "--out",
                    tmp_path / "r.json") == 0
    said = capsys.readouterr().out
    assert "JAX jit is left out: JAX is not here\n" in said
    assert "no peer" in said
    record = json.loads((tmp_path / "r.json").read_text())
    entry = record["networks"][QUICK[0]]["1"]
    assert entry["arms"]["minidl"]["step_ms"]["n"] == 2
    assert entry["arms"]["minidl"]["peak_bytes"] > 0
    assert entry["left_out"].keys() == {*strongest.PEERS}
    assert [*tables.strongest(record)][0][0].startswith(f"{QUICK[0]}: seconds until the first step")


def test_an_arm_that_dies_says_its_last_words(tmp_path):
    worker = strongest.Worker("no such network", "minidl", "1", tmp_path)
    try:
        with deadline(), pytest.raises(RuntimeError, match="no such network"):
            worker.answer()
    finally:
        worker.end()


def test_floors_of_a_step_by_family(monkeypatch, tmp_path):
    monkeypatch.setattr(floors, "SECONDS", 0.001)
    monkeypatch.setattr(floors, "SIZES", (1 << 14, 1 << 18))
    found = floors.floors(*strongest.recorded(NETWORKS[QUICK[0]], 0.0, tmp_path)[:3])
    assert found["peak_gflops"] > 0
    assert {"linear", "sgd"} <= found["families"].keys()
    for key in ("ms", "floor_ms", "gflop"):
        assert sum(row[key] for row in found["families"].values()) == pytest.approx(found[key], abs=1e-3)
    record = {"networks": {"a network": {"floors": found}}, "summary": {}}
    assert [row[0] for row in tables.floors(record)][1:] == [f"a network: {found['share']:.0%} of its floor"]


def on_few(network: Network) -> Network:
    """The network on at most 16 samples, or on rows of at most 64 tokens: what is learned says as much."""
    shape, axis = list(network.shape), int(bool(network.vocabulary) or len(network.shape) == 3)
    shape[axis] = min(shape[axis], 64 if network.vocabulary else 16)
    return network._replace(shape=tuple(shape), labels=network.labels * shape[axis] // network.shape[axis])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
                                  for name in NETWORKS])
def test_all_engines_learn_alike(name, tmp_path):
    need("torch"), need("jax")
    network, adamw = on_few(NETWORKS[name]), bool(NETWORKS[name].vocabulary)
    found = {"ours": strongest.ours(network, 0.0, tmp_path, 1),  # it writes the weights
             "torch": strongest.in_torch(network, 0.0, tmp_path, 1, None),
             "jax": strongest.in_jax(network, 0.0, tmp_path)}
    assert strongest.agree({engine: strongest.losses(arm, adamw) for engine, arm in found.items()})
