"""The pages: links lead somewhere, commands are understood, and those that need nothing but this machine run."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
from helpers import ROOT, need

from minidl.cli import main
from minidl.cli.parser import parse

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("minidl/*/README.md")),
         *sorted(ROOT.glob("schedulers/*/README.md"))]
#: Python files that the site shows as pages
PYTHON = [*(ROOT / "docs" / "tutorial").glob("chapter*.py"), *(ROOT / "docs" / "extend").glob("*.py"),
          ROOT / "docs" / "race.py", ROOT / "docs" / "essence.py"]
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
#: what no test has: ranks, a GPU, a cluster's folders, a file of the reader's
ELSEWHERE = ("mpiexec", "srun", "podman", "--device cuda", " /", "...", "my_", "report DIR")


def lines(text: str) -> list[str]:
    """Lines of shell, in blocks, without comments; those that go on are put together."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+# .*", "", line) for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def command(line: str) -> list[str] | None:
    """The arguments of minidl, if it is called."""
    found = re.match(r"(?:.*\s)?minidl ([a-z]+(?: .*)?)$", re.sub(r"\$\w+", "1", line.partition(" $(")[0]))
    return [word for word in shlex.split(found[1]) if word != "..."] if found else None


BLOCKS = {(page, line): arguments for page, text in TEXT.items()
          for line in lines(text) if (arguments := command(line))}
INLINE = {(page, line): arguments for page, text in TEXT.items()
          for line in re.findall(r"`((?:python -m )?minidl [^`\n]+)`", text) if (arguments := command(line))}
#: pages whose commands need files that other tests make: test_your_own.py, test_arena_pages.py
WITH_FILES = ("docs/your_own.md", "docs/arena.md", "docs/instructors.md")
RUN = [pytest.param(arguments, id=f"{page}: {line}", marks=[pytest.mark.slow] if "--table" in line else [])
       for (page, line), arguments in BLOCKS.items()
       if not any(word in line for word in ELSEWHERE) and page not in WITH_FILES]


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", TEXT[page]):
        assert re.match("https?://", target) or (ROOT / page).parent.joinpath(target).is_file(), target


@pytest.mark.parametrize("arguments",
                         [pytest.param(a, id=f"{page}: {line}") for (page, line), a in (BLOCKS | INLINE).items()])
def test_commands_are_understood(arguments):
    parse(arguments)


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", RUN)
def test_commands_run(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_there_are_commands():
    assert len(BLOCKS) > 12
    assert len(RUN) > 5


def test_the_glossary_says_each_term_once():
    rows = [line.strip("| ").split(" | ") for line in TEXT["docs/glossary.md"].splitlines() if line.startswith("| ")]
    terms = [name for first, *_ in rows if first != "term" for name in re.sub(r" \(.*?\)", "", first).split(", ")]
    assert len(terms) > 80
    assert len(set(terms)) == len(terms)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    need("sphinx")
    done = subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "trees",
                           "-D", "extensions=myst_parser,sphinx.ext.autodoc",  # without pages of all sources
                           ROOT / "docs", tmp_path / "site"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "api.html").stat().st_size > 100_000
    for page in PYTHON:
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file()
    assert not list((tmp_path / "site" / "_downloads").rglob("chapter*.py"))
    assert '<iframe src="playground.html"' in (tmp_path / "site" / "index.html").read_text()


def test_a_python_file_becomes_a_page_with_all_its_words():
    markdown = runpy.run_path(str(ROOT / "docs" / "conf.py"))["markdown"]
    for file in PYTHON:
        page = markdown(file.read_text())
        assert page.startswith("# ")
        assert page.count("```python") == page.count("\n```\n") > 0
        missing = {*re.findall(r"\w+", file.read_text())} - {*re.findall(r"\w+", page)}
        assert not missing, file


def test_every_chapter_is_linked_as_a_notebook():
    text = TEXT["docs/tutorial/README.md"]
    for chapter in (ROOT / "docs" / "tutorial").glob("chapter*.py"):
        assert f"]({chapter.name})" in text
        assert f"](notebooks/{chapter.stem}.ipynb)" in text


def test_every_page_is_in_the_site():
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in [*PAGES, *PYTHON]
             if page.is_relative_to(ROOT / "docs")} - {"index"}
    assert pages == set(re.findall(r"^[\w/]+$", TEXT["docs/index.md"], re.MULTILINE))


def test_every_picture_is_shown_on_a_page():
    shown = {(ROOT / page).parent.joinpath(target).resolve() for page, text in TEXT.items()
             for target in re.findall(r"!\[[^]]*\]\(([^)\s]+)", text)}
    assert not {*(ROOT / "docs").rglob("*.svg"), *(ROOT / "bench" / "results").glob("*.svg")} - shown


def test_the_picture_of_the_readme_is_what_is_drawn(tmp_path):
    pictures = ROOT / "docs" / "pictures"
    subprocess.run([sys.executable, pictures / "orders.py", tmp_path / "orders.svg"], check=True, timeout=300)
    assert (tmp_path / "orders.svg").read_text() == (pictures / "orders.svg").read_text(), (
        "python docs/pictures/orders.py draws it again")


def test_modules_whose_names_are_stable_list_them():
    modules = re.search(r"the `__all__` of (.*?) \|", TEXT["docs/stability.md"])[1]
    for name in re.findall(r"`([\w.]+)`", modules):
        module = import_module(f"minidl.{name.removeprefix('minidl.')}")
        assert module.__all__
        assert all(hasattr(module, each) for each in module.__all__)
