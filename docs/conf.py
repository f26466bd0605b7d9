"""The site: `python -m sphinx docs site` (extra `docs`). Pages are the Markdown files of this folder, and the Python
files of the tutorial and of `extend`, whose comments become text. The API reference is made from the docstrings."""

import ast
import re
from itertools import groupby
from pathlib import Path

project = "minidl"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "minidl"
html_copy_source = False
source_suffix = {".md": "markdown", ".py": "markdown"}
exclude_patterns = ["conf.py", "course", "pictures", "playground", "torch_gpt.py", "tutorial/exercises",
                    "tutorial/grade.py", "tutorial/notebooks*"]
html_extra_path = ["playground.html"]

default_role = "code"  # a name in backticks in a docstring
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["cupy", "nvmath", "cudnn"]
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "__init__, __new__"}


def markdown(text):
    """A Python file as a page: its docstring and its paragraphs of comments are text, the rest is code."""
    said, code = ast.get_docstring(ast.parse(text)) or "", re.sub(r'\A""".*?"""\n', "", text, flags=re.DOTALL)
    title, _, rest = said.partition("\n")
    page = [f"# {title.rstrip('.')}", rest.strip()]
    paragraphs = re.split(r"\n\n(?=\S)", re.sub(r"^# -{20,}\n", "", code, flags=re.MULTILINE).strip())
    for comment, group in groupby(paragraphs, lambda lines: all(line.startswith("#") for line in lines.splitlines())):
        joined = "\n\n".join(group)
        page.append(re.sub(r"^# ?", "", joined, flags=re.MULTILINE) if comment else f"```python\n{joined}\n```")
    return "\n\n".join(page) + "\n"


def setup(app):
    def read(app, name, source):
        if Path(app.env.doc2path(name)).suffix == ".py":
            source[0] = markdown(source[0])
        # a Python file that is no page is a download
        source[0] = re.sub(r"\[([^]]+)\]\(([^)#\s]+\.py)\)", lambda link: link[0] if is_page(app, name, link[2])
                           else f"{{download}}`{link[1].strip('`')} <{link[2]}>`", source[0])

    app.connect("source-read", read)


def is_page(app, name, target):
    docs = Path(app.srcdir).resolve()
    path = (docs / name).parent.joinpath(target).resolve()
    return path.is_relative_to(docs) and str(path.relative_to(docs).with_suffix("")) in app.env.found_docs
