"""The site: `python -m sphinx docs site` (extra `docs`). Pages are the Markdown files of this folder; the API reference
is made from the docstrings."""

project = "minidl"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "minidl"
html_copy_source = False
exclude_patterns = ["tutorial/exercises"]
html_extra_path = ["playground.html"]

default_role = "code"  # a name in backticks in a docstring
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["cupy", "nvmath", "cudnn"]
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "__init__, __new__"}
