"""`profile`: costs of a torch network per stage, and what `plan` and `simulate` make of them."""

from pathlib import Path

import pytest
from command_line import refusal, reported, shown
from helpers import need

from minidl.pricing.cost import CostModel

NET = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 64),
                           nn.Linear(64, 5))
    return layers, torch.randint(11, (4, 6)), torch.randint(5, (4,)), nn.functional.cross_entropy

def halves(): return net()[:2]
def pair():
    class Two(nn.Module):
        def forward(self, x): return x, x
    layers, x, y, loss = net()
    return [*layers[:2], Two(), layers[2]], x, y, loss
def broken():
    layers, x, y, loss = net()
    return layers[:1] + nn.Sequential(nn.Linear(7, 7)) + layers[1:], x, y, loss
def changes():
    layers, x, y, loss = net()
    layers[3] = nn.ReLU(inplace=True)
    return [*layers[:4], nn.Identity(), nn.Flatten(), *layers[4:]], x, y, loss
def listed(): return net()[0], net()[1], [1, 2], print
def one(): return nn.Linear(6, 5), torch.zeros(4, 6), torch.zeros(4, 5), nn.functional.mse_loss
def words(): return ["a"], torch.zeros(1), torch.zeros(1), print
def meta():
    with torch.device("meta"): return net()
def off():
    torch.set_grad_enabled(False)
    return [nn.Linear(4, 4)], torch.zeros(4, 4), torch.zeros(4, 4), nn.functional.mse_loss
def frozen(): return net()[0].requires_grad_(False)[2:], torch.randn(4, 48), *net()[2:]
def a_float(): return *net()[:3], lambda x, y: 1.0
def four(): return *net()[:3], lambda x, y: nn.functional.cross_entropy(x, y, reduction="none")
def two_inputs(): return [nn.Bilinear(4, 4, 4)], torch.zeros(4, 4), torch.zeros(4, 4), nn.functional.mse_loss
def outside(): return net()[0], torch.full((4, 6), 11), *net()[2:]
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    need("torch")
    (file := tmp_path / "net.py").write_text(NET)
    return str(file)


def test_costs_are_those_of_torchs_tasks_on_each_stage(net, tmp_path, capsys):
    saved = tmp_path / "costs.json"
    found = reported(capsys, "profile", f"{net}:net", "--stages", "3", "--save-costs", str(saved))
    cost = CostModel.load(saved)
    assert found["kinds"] == cost.kinds
    assert found["sizes"] == cost.sizes
    assert found["stages"] == 3
    assert sum(cost.sizes["layers"]) == 6
    assert all(len(cost.kinds[kind]) == 3 and min(cost.kinds[kind]) > 0 for kind in "FOWBU")
    assert cost.kinds["O"][0] == 1e-3  # nothing to do there
    assert cost.kinds["W"][0] == cost.kinds["B"][0]
    assert (cost.source, cost.unit) == ("measured", "us")
    table = reported(capsys, "simulate", "--table", "--ranks", "3", "--micro-batches", "6", "--costs", str(saved))
    assert {"one_f_one_b", "zb_h1", "zb_auto"} <= {row["scheduler"] for row in table["policies"]}


def test_bytes_are_those_of_messages_and_of_what_a_forward_keeps(net, capsys):
    sizes = reported(capsys, "profile", f"{net}:net", "--optimizer", "adamw")["sizes"]
    assert sizes["layers"] == [1] * 6
    assert sizes["message_bytes"] == [4 * 48 * 4, 4 * 48 * 4, 4 * 32 * 4, 4 * 32 * 4, 4 * 64 * 4, 0]
    # tokens; nothing; its input; its output; its input; its input, log-probabilities, targets, and one number
    assert sizes["saved_bytes"][:5] == [4 * 6 * 8, 0, 4 * 48 * 4, 4 * 32 * 4, 4 * 32 * 4]
    assert sizes["saved_bytes"][5] >= 4 * 64 * 4 + 4 * 5 * 4 + 4 * 8


def test_layers_that_work_in_place_or_return_their_input(net, capsys):
    """The cut in stages needs the time of each layer alone, and a stage may have them inside."""
    for more, stages in (([], 8), (["--stages", "2"], 2)):
        found = reported(capsys, "profile", f"{net}:changes", *more)
        assert all(len(found["kinds"][kind]) == stages and min(found["kinds"][kind]) > 0 for kind in "FOWBU")
        assert sum(found["sizes"]["layers"]) == 8


@pytest.mark.slow
def test_the_table_for_people_has_a_row_for_each_stage(net, capsys):
    out = shown(capsys, "profile", f"{net}:net", "--stages", "2")
    assert "input grad" in out
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["0", "1"]


@pytest.mark.parametrize(("name", "more", "why"), [
    ("net", ["--stages", "7"], "--stages 7 are more than the 6 layers"),
    ("net", ["--optimizer", "nadamw"], "has no nadamw; give another --optimizer, such as adamw"),
    ("net", ["--optimizer", "muon"], "layer 2: Muon only supports 2D parameters"),
    ("halves", [], "must return (layers, x, y, loss)"),
    ("pair", [], "layer 2: it returns a tuple; each layer must return one tensor"),
    ("words", [], "layer 0 is a str, not a torch module"),
    ("broken", [], "layer 1: mat1 and mat2 shapes cannot be multiplied"),
    ("listed", [], "must return (layers, x, y, loss): a list of modules, two tensors"),
    ("one", [], "must return (layers, x, y, loss): a list of modules, two tensors"),
    ("absent", [], "has no function absent"),
    ("meta", [], "it is on torch's device meta, where tensors have no numbers; make it on cpu"),
    ("off", [], "layer 0: its loss must be a tensor of one number that has a gradient"),
    ("frozen", ["--stages", "1"], "layer 0: its loss must be a tensor of one number that has a gradient"),
    ("a_float", [], "layer 5: its loss must be a tensor of one number that has a gradient"),
    ("four", [], "layer 5: its loss must be a tensor of one number that has a gradient"),
    ("two_inputs", [], "layer 0: Bilinear.forward() missing 1 required positional argument"),
    ("outside", [], "layer 0: index out of range in self")])
def test_what_cannot_be_profiled_is_one_line(name, more, why, net, capsys):
    import torch

    with torch.enable_grad():
        assert why in refusal(capsys, "profile", f"{net}:{name}", *more)
