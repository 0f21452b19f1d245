"""The reference in docs/reference has an entry and an example for every public name, and its docstring says enough.

`tests/python/repository/test_docs.py` runs the examples.
"""

from __future__ import annotations

import inspect
import pathlib
import re
from typing import Any

import pytest

import pathways as pw

ROOT = pathlib.Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
ENTRY = re.compile(r"^\.\. auto(?:class|function):: ([\w.]+)", re.MULTILINE)
BLOCK = re.compile(r"^```(\S+)(?: norun)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROOMS = ("checkpoint", "errors", "nn")  # public modules
ARGUMENT = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)
#: What its users get from another call, and never make themselves.
GIVEN = {pw.Array, pw.Cluster, pw.Device, pw.Slice, pw.VirtualDeviceSet, pw.nn.Gating, pw.nn.Mixed}


def public() -> dict[str, Any]:
    """Every public name but those of errors, which have one entry for all."""
    found = {f"pathways.{name}": getattr(pw, name) for name in pw.__all__ if name not in ROOMS}
    found |= {f"pathways.nn.{name}": getattr(pw.nn, name) for name in pw.nn.__all__}
    return found | {"pathways.api.checkpoints.checkpoint.register": pw.checkpoint.register}


def examples() -> dict[str, str]:
    """By entry: the code block that follows it on its page, before the next one; empty if there is none."""
    found: dict[str, str] = {}
    for page in PAGES:
        waiting: list[str] = []
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if kind == "{eval-rst}":
                waiting += ENTRY.findall(text)
                found.update(dict.fromkeys(waiting, ""))
            elif kind == "python":
                found.update(dict.fromkeys(waiting, text))
                waiting = []
    return found


def test_every_public_name_has_an_entry_and_an_example() -> None:
    found = examples()
    assert [name for name in public() if name not in found] == [], "add an entry to a page of docs/reference"
    assert [name for name, text in found.items() if not text] == [], "add an example behind the entry"


@pytest.mark.parametrize("name", public())
def test_a_docstring_has_every_argument_and_the_errors(name: str) -> None:
    thing = public()[name]
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    if thing in GIVEN:
        return
    if thing is pw.Variable:
        text += "\n" + (inspect.getdoc(thing.__init__) or "")
    assert "\nRaises:\n" in text, f"{name} does not say what it raises"
    said = {each.strip("*") for names in ARGUMENT.findall(text) for each in names.split(", ")}
    taken = set(inspect.signature(thing).parameters)
    if thing is pw.HostObject:  # all of them are the factory's, which its text says
        return
    assert taken - said == set(), f"{name}: its docstring lacks arguments"


def test_the_site_lists_every_page() -> None:
    listed = (ROOT / "docs/site/contents.md").read_text(encoding="utf-8").split()
    pages = [*(ROOT / "docs").glob("*.md"), *PAGES]
    missing = [page.stem for page in pages if page.relative_to(ROOT).with_suffix("").as_posix() not in listed]
    assert missing == [], "add these pages to docs/site/contents.md"


def test_every_error_has_an_entry_and_a_docstring() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    assert re.search(r"^\.\. automodule:: pathways\.errors\n(   :.*\n)*   :members:$", text, re.MULTILINE)
    found = [each for each in vars(pw.errors).values() if isinstance(each, type)]
    assert len(found) > 20
    assert [each.__name__ for each in found if not each.__dict__.get("__doc__")] == []


@pytest.mark.parametrize("name", [name for name, thing in public().items() if inspect.isclass(thing)])
def test_what_a_class_shows_has_docstrings(name: str) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    entry = re.search(rf"^\.\. autoclass:: {re.escape(name)}(?:\(\))?\n((?:   :.*\n)*)", text, re.MULTILINE)
    assert entry is not None
    thing = public()[name]
    members = re.search(r":members: (.*)", entry[1])
    shown = re.split(", *", members[1]) if members else [each for each in vars(thing) if not each.startswith("_")]
    fields = {*getattr(thing, "__dataclass_fields__", ()), *getattr(thing, "_fields", ()), "mesh"}
    bare = [each for each in shown if each not in fields and not inspect.getdoc(getattr(thing, each))]
    assert bare == [], f"{name}: these members have no docstring"
