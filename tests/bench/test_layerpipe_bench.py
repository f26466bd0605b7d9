"""The LayerPipe report: a readable table and a record that agree with the partition."""

import json
import subprocess
import sys

from helpers import PATIENCE, ROOT

BENCH = ROOT / "bench" / "layerpipe.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(BENCH), *arguments], capture_output=True, text=True, timeout=PATIENCE)


def test_given_costs(tmp_path):
    out = tmp_path / "record.json"
    done = run("--forward", "1", "--output-grad", "1", "--weight-grad", "1", "--activation", "8,8", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "published: mean 1.25" in done.stdout
    assert "Why our figures differ" in done.stdout
    found = json.loads(out.read_text())["networks"]["given"]
    assert [(r["method"], r["period"]) for r in found["rows"] if r["processors"] == 2] == [
        ("pipedream", 3), ("intra", 2), ("inter", 1.5)]
    assert [r["processors"] for r in found["rows"]][::3] == list(range(2, 17))
    assert found["limit"] == 3


def test_bad_costs_are_one_clear_line():
    done = run("--forward", "1,2", "--output-grad", "1", "--weight-grad", "1")
    assert done.returncode == 2
    assert "given for 2, 1, 1 layers" in done.stderr
    assert "Traceback" not in done.stderr
