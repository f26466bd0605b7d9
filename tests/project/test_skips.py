"""What skipped tests say, and that none hides where every extra is installed: pytest with our conftest."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from helpers import EXTRAS, IMPORTABLE, PATIENCE, ROOT

LACKS = 'pytest.importorskip("not_there", reason="not_there is not installed; install minidl[it]")\n'
SOME = f"""
import pytest
def test_right(): pass
def test_lacks(): {LACKS}
@pytest.mark.parametrize("x", ["a b", "c::d"])
def test_lacks_too(x): {LACKS}
@pytest.mark.skipif(True, reason="no such program")
def test_never(): pass
@pytest.mark.gpu
def test_gpu(): pytest.skip("no GPU")
@pytest.mark.may_skip
def test_may(): pytest.skip("no such library")
@pytest.mark.xfail(reason="not yet")
def test_expected(): assert 0
"""
FILE = f"import pytest\n{LACKS}def test_more(): pass\n"


@pytest.fixture
def run(tmp_path):
    """`run(arguments, **environment)` gives the exit code and what was said."""
    (tmp_path / "test_some.py").write_text(SOME)
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())

    def run(*arguments, **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MINIDL_", "PYTEST_"))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-c", "/dev/null",
                   "-W", "ignore::pytest.PytestUnknownMarkWarning", *arguments]
        done = subprocess.run(command, env={**environment, "PYTHONPATH": IMPORTABLE, **variables},
                              cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        return done.returncode, done.stdout + done.stderr

    return run


def counts(said):
    """Of pytest's closing line."""
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", said.splitlines()[-1].partition(" in ")[0])}


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", ["0", "2"])
def test_skips_are_counted_by_their_reason(run, workers):
    code, said = run("-n", workers)
    assert code == 0, said
    assert counts(said) == {"passed": 1, "skipped": 7, "xfailed": 1}
    for line in ("4 skipped: not_there is not installed; install minidl[it]", "1 skipped: no such program",
                 "1 skipped: no GPU", "1 skipped: no such library"):
        assert line in said.splitlines()


@pytest.mark.slow
def test_where_every_extra_is_installed_a_skip_is_a_failure(run):
    code, said = run("-n", "2", "--continue-on-collection-errors", MINIDL_ALL_EXTRAS="1")
    assert code == 1
    assert "ERROR test_file.py" in said
    assert "skipped although MINIDL_ALL_EXTRAS=1: not_there is not installed; install minidl[it]" in said
    found = counts(said)
    assert found.pop("error", 0) + found.pop("errors", 0) == 2, "the file, and the test that a mark skips"
    assert found == {"failed": 3, "passed": 1, "skipped": 2, "xfailed": 1}


@pytest.mark.slow
def test_what_was_skipped_can_be_run_where_more_is_installed(run, tmp_path):
    run("-n", "2", MINIDL_SKIPPED="skipped")
    (tmp_path / "not_there.py").touch()
    code, said = run("-n", "2", "@skipped")
    assert (code, counts(said)) == (0, {"passed": 4, "skipped": 3}), said


def test_the_extras_that_skips_name_are_there():
    declared = (ROOT / "setup.py").read_text()
    for extra in EXTRAS.values():
        assert f'"{extra}": [' in declared
