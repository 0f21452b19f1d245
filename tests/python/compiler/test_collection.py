"""Garbage is collected while a program is compiled, only less often (pathways/process/collection.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pathways.process import collection
from pathways.process.collection import collection_is_rare


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_it_is_as_before_behind_the_outermost_block() -> None:
    before = gc.get_threshold()
    with collection_is_rare():
        with collection_is_rare():
            pass
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before


def test_the_garbage_of_others_still_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block may wait for long: for a controller that is stopped, or for the user's own function."""
    monkeypatch.setattr(collection, "_RARELY", 5_000)
    gc.set_threshold(100)
    with collection_is_rare():
        gone = weakref.ref(Cycle())
        kept = [[] for _ in range(20_000)]
        assert gone() is None and len(kept) == 20_000


@pytest.mark.parametrize("own", [0, 10_000_000])
def test_what_the_user_has_set_stays(own: int) -> None:
    gc.set_threshold(own)
    with collection_is_rare():
        assert gc.get_threshold()[0] == own
    with collection_is_rare():
        gc.set_threshold(123)
    assert gc.get_threshold()[0] == 123
