"""docs/claims tells the truth: simulated numbers are what the commands say, and "measured" needs a record."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import pipelines
import pytest
from helpers import ROOT, need

from minidl.cli import main
from minidl.schedulers import pipeline

INDEX = (ROOT / "docs" / "claims.md").read_text()
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs" / "claims").glob("*.md"))}
TEXT = "".join(PAGES.values())
STATES = re.findall(r"^- \*\*([a-z ]+)\*\*:", INDEX, re.MULTILINE)


class Claim(NamedTuple):
    state: str
    words: str
    shown: str  #: its commands, tests and records


CLAIMS = [Claim(*found) for found in re.findall(r"^- \*\*([a-z ]+)\*\* (.*)\n((?:  .*\n)+)", TEXT, re.MULTILINE)]
RATES = [[float(cell) for cell in re.findall(r"[\d.]+", line)] for line in TEXT.splitlines()
         if re.match(r"\| \d+ (\| [\d.]+ ){11}\|", line)]
NUMBERS = [claim for claim in CLAIMS if "` gives " in claim.shown]


def test_every_claim_is_short_and_says_how_far_it_is_shown():
    assert len(CLAIMS) == len(re.findall(r"^- ", TEXT, re.MULTILINE)) > 100, "each has its form"
    assert {claim.state for claim in CLAIMS} == set(STATES)
    assert {claim.words: n for claim in CLAIMS if (n := len(claim.words.split())) > 25} == {}
    assert all(f"](claims/{name})" in INDEX for name in PAGES)


def test_measured_claims_have_their_record():
    for claim in CLAIMS:
        records = re.findall(r"bench/results/[\w./-]+\.json", claim.shown)
        assert bool(records) == (claim.state == "measured"), claim
        assert all((ROOT / record).is_file() for record in records), claim


def test_files_that_are_named_are_there():
    named = re.findall(r"(?:tests|bench)/[\w/]+\.py", TEXT)
    assert len(named) > 80
    assert {path for path in named if not (ROOT / path).is_file()} == set()


@pytest.mark.few(10)
@pytest.mark.parametrize("claim", NUMBERS, ids=lambda claim: claim.words)
def test_simulated_numbers_are_what_the_command_says(claim, capsys):
    command, said = re.search(r"`python -m minidl (simulate [^`]+)` gives (.*)", claim.shown).groups()
    if "--scheduler optimal" in command:
        need("ortools")
    assert main([*command.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    promised = re.findall(r"(makespan|max_span|period) ([\d.]*\d)", said)
    assert promised
    assert {key: record[key] for key, _ in promised} == {key: float(value) for key, value in promised}


@pytest.mark.few(1)
@pytest.mark.parametrize("row", RATES, ids=lambda row: f"p={row[0]:g} F={row[2]:g}")
def test_zero_bubble_rates(row):
    """Those of the fixed orders; tests/schedulers/pipeline/test_zb_auto.py has the ones that are searched for."""
    p, m, f, o, w, c, *rates = row
    for name, rate in zip(("one_f_one_b", "zb_h1", "zb_h2"), rates, strict=False):
        cost = pipeline.costs(pipelines.place(name, int(p)), f, o, w, c)
        assert round(pipeline.price(pipelines.plan(name, int(p), int(m), cost), cost).bubble_rate, 4) == rate


def test_the_table_of_rates_is_the_one_that_is_tested():
    assert len(RATES) == 3
