"""docs/claims.md tells the truth: its simulated numbers are what the commands say, and "measured" needs a record."""

import json
import re

import pipelines
import pytest
from helpers import ROOT, need

from minidl.cli import main
from minidl.schedulers import pipeline

TEXT = (ROOT / "docs" / "claims.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")]
STATES = {"measured", "simulated", "tested", "reconstructed", "unmeasured", "not yet there"}
CLAIMS = [row for row in ROWS if len(row) == 4 and row[0] not in ("claim", "script")]
RATES = [[float(cell) for cell in row] for row in ROWS if len(row) == 12 and row[0].isdecimal()]
NUMBERS = [row for row in CLAIMS if " gives " in row[2]]


def test_every_claim_says_how_far_it_is_shown():
    assert len(CLAIMS) > 30
    assert {row[3].split(" (")[0] for row in CLAIMS} <= STATES


def test_measured_claims_have_their_record():
    for row in CLAIMS:
        records = re.findall(r"bench/results/[\w./-]+\.json", " ".join(row))
        assert bool(records) == row[3].startswith("measured"), row
        assert all((ROOT / record).is_file() for record in records), row


def test_files_that_are_named_are_there():
    for path in re.findall(r"(?:tests|bench)/[\w/]+\.py", TEXT):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row[0])
def test_simulated_numbers_are_what_the_command_says(row, capsys):
    command = re.search(r"python -m minidl (simulate [^`]+)", row[2])[1]
    if "--scheduler optimal" in command:
        need("ortools")
    assert main([*command.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    promised = re.findall(r"(makespan|max_span|period) ([\d.]*\d)", row[2].split(" gives ")[1])
    assert promised
    assert {key: record[key] for key, _ in promised} == {key: float(value) for key, value in promised}


@pytest.mark.parametrize("row", RATES, ids=lambda row: f"p={row[0]:g} F={row[2]:g}")
def test_zero_bubble_rates(row):
    """Those of the fixed orders; tests/schedulers/pipeline/test_zb_auto.py has the ones that are searched for."""
    p, m, f, o, w, c, *rates = row
    for name, rate in zip(("one_f_one_b", "zb_h1", "zb_h2"), rates, strict=False):
        cost = pipeline.costs(pipelines.place(name, int(p)), f, o, w, c)
        assert round(pipeline.price(pipelines.plan(name, int(p), int(m), cost), cost).bubble_rate, 4) == rate


def test_the_table_of_rates_is_the_one_that_is_tested():
    assert len(RATES) == 3
