"""Sphinx's settings for the manual: `make docs` builds it into build/docs, and every warning is an error."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Undertow"
version = release = version_of("undertow")
extensions = ["myst_parser", "sphinx.ext.autodoc", "reference"]
exclude_patterns = ["_ext"]
# single backticks are code, in comments and docstrings as in Markdown
default_role = "literal"
highlight_language = "none"

# so many levels of headings can be linked to, by GitHub's names
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# parts of an engine that no caller needs
autodoc_default_options = {"exclude-members": "journal, ranker, scheduler, trace"}

html_theme = "furo"
html_title = f"Undertow {version}"
html_show_copyright = False
html_copy_source = False
