"""The chapters as notebooks: `python docs/tutorial/notebooks.py` writes notebooks/*.ipynb (extra `notebooks`).

A chapter's docstring and its paragraphs of comments become text, the rest becomes code. The chapters are the source.
Each notebook starts with one cell: it installs minidl, if it is not there, and has all imports of the chapter.
Cells also say where slides begin, so that `jupyter nbconvert --to slides NAME.ipynb` makes a talk of a chapter: a
section to the right, its paragraphs below each other.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: the beginning of the first cell of code: the folder above the notebook that has a setup.py is the repository
START = '''# Run this cell first: it installs minidl from the repository of this notebook, if it is not there yet.
import importlib.util
import subprocess
import sys
from pathlib import Path

sys.path.append("..")  # a chapter may import another one
if importlib.util.find_spec("minidl") is None:
    root = next(folder for folder in Path.cwd().parents if (folder / "setup.py").exists())
    subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", str(root)])
    importlib.invalidate_caches()

'''
FOLDER = HERE / "notebooks"
SECTION = "(a section begins)"  #: stands for a line across the page while a chapter is cut into cells


def notebook(chapter: Path) -> Any:
    """The notebook of a chapter, without outputs."""
    import jupytext
    import nbformat

    text = chapter.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(text)) or ""
    code = re.sub(r'\A""".*?"""\n', "", text, flags=re.DOTALL)
    code = re.sub(r"^# -{20,}\n", f"# {SECTION}\n", code, flags=re.MULTILINE)
    code = re.sub(r'^if __name__ == "__main__":\n((?:    .*\n|\n)+)', lambda found: re.sub(r"^    ", "", found[1],
                                                                                           flags=re.MULTILINE),
                  code, flags=re.MULTILINE)
    title, _, rest = said.partition("\n")
    rest = re.sub(r"(Run it from the top of the repository:\n)?\n    python docs/tutorial/\S+\n", "", rest)
    cells = jupytext.reads(code.strip() + "\n", "py:light").cells
    imports = [cell for cell in cells if cell.cell_type == "code" and all(
        isinstance(part, ast.Import | ast.ImportFrom) for part in ast.parse(cell.source).body)]
    start = nbformat.v4.new_code_cell(START + "\n".join(cell.source for cell in imports))
    cells = [start, *(cell for cell in cells if cell not in imports)]
    found = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {title.rstrip('.')}\n\n{rest.strip()}"),
                                            *cells])
    found.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(found.cells):
        begins = number == 0 or cell.source.startswith(SECTION)
        kind = "slide" if begins else "subslide" if cell.cell_type == "markdown" else "-"
        cell["id"], cell["source"] = f"cell-{number}", cell.source.removeprefix(SECTION).lstrip("\n")
        cell["metadata"] = {"slideshow": {"slide_type": kind}}
    return found


if __name__ == "__main__":
    import nbformat

    FOLDER.mkdir(exist_ok=True)
    for chapter in sorted(HERE.glob("chapter*.py")):
        nbformat.write(notebook(chapter), FOLDER / f"{chapter.stem}.ipynb")
