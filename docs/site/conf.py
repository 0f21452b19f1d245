"""Sphinx's settings for the site that `make docs` builds.

The source folder is the repository, so that links between its pages lead to the same places on the site. `contents.md`
beside this file lists the pages; the reference is in `docs/reference`, and takes its text from the docstrings.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.ext.napoleon import Config, GoogleDocstring

import pathways

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]

project = "Pathways for JAX"
author = "the authors of Pathways for JAX"
version = release = pathways.__version__
html_title = f"Pathways for JAX {release}"
html_short_title = "Pathways"

root_doc = "README"
include_patterns = [
    *("*.md", "benchmarks/README.md", "benchmarks/results/*.md", "tests/README.md", "deploy/**/*.md"),
    *("docs/*.md", "docs/reference/*.md", "docs/notebooks/*.ipynb"),
]
exclude_patterns = [".venv*", "build*"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

html_theme = "furo"
html_static_path = ["static"]
html_extra_path = ["extra"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "default"
pygments_dark_style = "monokai"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 600  # seconds for a cell; it bounds a hang alone
nb_execution_raise_on_error = True
nb_merge_streams = True

nitpicky = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Puts the list of all pages behind the README, which is the first page. Some are found by links alone."""
    if name.startswith(("benchmarks/results/", "deploy/")):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    if name == root_doc:
        app.env.note_dependency(HERE / "contents.md")
        source[0] += "\n" + (HERE / "contents.md").read_text(encoding="utf-8")


FENCE = re.compile(r"\s*```")
SECTION = re.compile(r"(Args|Raises|Returns|Warns|Example|Yields):$")
#: Code between backticks, as in Markdown; in reStructuredText no letter may follow.
LITERAL = re.compile(r"(?<!`)`([^`]+)`(?!`)(?=(\w?))")
#: A star that begins no emphasis, as in "(batch, *targets)"; and code, which keeps its own.
STAR = re.compile(r"`[^`]*`|(?<=[(\s])\*(?=\w+[,)])")


def literal(found: re.Match[str]) -> str:
    """Code between backticks, as reStructuredText; a public name is a link to its entry."""
    words, behind = found[1], "\\ " if found[2] else ""
    name = words.removeprefix("pw.").removeprefix("errors.")
    if words.startswith("pw.") and name in pathways.__all__ and name not in ("nn", "checkpoint", "errors"):
        return f":py:obj:`{words} <pathways.{name}>`{behind}"
    if isinstance(getattr(pathways.errors, name, None), type):
        return f":py:obj:`{words} <pathways.errors.{name}>`{behind}"
    return f"``{words}``{behind}"


def restructured(lines: list[str]) -> list[str]:
    """A docstring in reStructuredText. What is indented more than the text around it, or between fences, is code."""
    marked: list[str] = []
    prose: list[str] = []

    def end_prose() -> None:
        text = STAR.sub(lambda found: "\\*" if found[0] == "*" else found[0], "\n".join(prose))
        marked.extend(LITERAL.sub(literal, text).split("\n") if prose else [])
        prose.clear()

    is_code = is_fenced = is_section = False
    for line in lines:
        is_section = is_section or bool(SECTION.match(line))
        if FENCE.match(line):
            end_prose()
            is_fenced = not is_fenced
            margin = line[: len(line) - len(line.lstrip())]
            marked += [f"{margin}.. code-block:: python", ""] if is_fenced else [""]
        elif is_fenced:
            marked.append(f"    {line}")
        elif line.startswith(indent := " " * (12 if is_section else 4)) and (
            is_code or not (prose or marked or [""])[-1]
        ):
            if not is_code:
                end_prose()
                marked += [f"{indent[4:]}.. code-block:: python", ""]
            is_code = True
            marked.append(line)
        else:
            is_code = is_code and not line
            prose.append(line)
    end_prose()
    return marked


def convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turns a docstring into reStructuredText: our docstrings are Markdown, with Google's sections."""
    found = restructured(lines)
    if what in ("function", "method", "class", "exception"):
        found = GoogleDocstring(found, Config(napoleon_use_rtype=False), app, what, name, obj, options).lines()
    lines[:] = found


def unlink_folders(app: Any, tree: nodes.document) -> None:
    """Makes plain text of links to folders of the repository, which are not on the site."""
    folder = pathlib.Path(app.env.doc2path(app.env.docname)).parent
    for link in list(tree.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and (folder / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", convert)
    app.connect("doctree-read", unlink_folders)
