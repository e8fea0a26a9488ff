"""Configuration of the documentation site: Sphinx with MyST, `make docs`.

The front page, the changelog and the contributor's page are README.md, CHANGELOG.md and CONTRIBUTING.md of the root.
"""

import ast
import inspect
import re
import sys
import textwrap
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # autodoc imports the packages of this checkout

project = "GRPO on TorchRL"
author = "the authors of GRPO on TorchRL"
version = release = version_of("grpo")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "index"
exclude_patterns = ["_build"]
myst_heading_anchors = 4
highlight_language = "none"  # blocks without a language are shell commands and their output
default_role = "code"  # single backquotes in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
suppress_warnings = ["config.cache"]
html_theme = "pydata_sphinx_theme"
html_title = project
html_theme_options = {"navigation_depth": 2, "show_toc_level": 2, "show_prev_next": False}
html_show_sourcelink = html_copy_source = False

PAGES_OF_THE_ROOT = {"index": "README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}


def resolve_root_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Inserts the text of a page of the root, and adapts links to the site."""
    text = source[0]
    if page in PAGES_OF_THE_ROOT:
        text = (ROOT / PAGES_OF_THE_ROOT[page]).read_text(encoding="utf-8").replace("](docs/", "](") + "\n" + text
    for name, file in PAGES_OF_THE_ROOT.items():
        text = re.sub(rf"\]\((?:\.\./)?{file}", f"]({name}.md", text)
    # A file of the repository that is no page: its name stays, the link goes.
    source[0] = re.sub(r"\[([^\]]+)\]\((?:\.\./[^)]+|LICENSE|CITATION\.cff)\)", r"\1", text)


def restore_class_docstring(
    app: Sphinx, kind: str, name: str, class_object: Any, options: dict[str, Any], lines: list[str]
) -> None:
    """Restores the docstring of a TensorClass from its source.

    tensordict replaces the docstring by the signature of the class.
    """
    if kind == "class" and getattr(class_object, "_is_tensorclass", False):
        (source,) = ast.parse(textwrap.dedent(inspect.getsource(class_object))).body
        assert isinstance(source, ast.ClassDef)
        lines[:] = (ast.get_docstring(source) or "").splitlines()


def setup(app: Sphinx) -> None:
    """Connects the hooks that read pages and docstrings."""
    app.connect("source-read", resolve_root_links)
    app.connect("autodoc-process-docstring", restore_class_docstring, priority=400)  # before napoleon
