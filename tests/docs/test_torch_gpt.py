"""docs/torch_gpt.py runs: every order that it plans has one process's gradients in torch's runtime; and the network of
docs/torch_schedules.md is one that `profile` takes."""

import re
import subprocess
import sys

import pytest
from helpers import PATIENCE, ROOT, need

from minidl.measuring.torch_stages import measure_stages, network_of

PAGE = (ROOT / "docs" / "torch_schedules.md").read_text()


@pytest.mark.wide
def test_the_whole_way_runs(tmp_path):
    need("torch.distributed.pipelining")
    picture = tmp_path / "order.svg"
    run = subprocess.run([sys.executable, ROOT / "docs" / "torch_gpt.py", "--steps", "1", "--svg", picture],
                         capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.split() for line in run.stdout.splitlines() if line.endswith("x")]
    assert [row[0] for row in rows] == ["one_f_one_b", "interleaved", "zb_h1", "zb_auto", "joint"]
    predicted = {row[0]: float(row[1]) for row in rows}
    best = re.search(r"best by prediction: (\w+),", run.stdout)[1]
    assert predicted[best] == min(predicted.values())
    message, empty, action = map(int, re.search(r"takes (\d+) us, (\d+) us if empty; the runtime adds (\d+) us",
                                                run.stdout).groups())
    assert message >= empty > 0
    assert action > 0
    assert picture.read_text().startswith("<svg")


def test_the_pages_network_can_be_profiled():
    need("torch")
    scope = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(next(block for block in blocks if "def network(" in block), scope)
    network = network_of(scope["network"](), "cpu")
    cost = measure_stages(network, [4, 4], "adamw", 0.01, lambda done: None)
    assert cost.sizes["layers"] == [4, 4]
