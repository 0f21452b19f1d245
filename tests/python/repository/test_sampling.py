"""What a session leaves out (tests/sampling.py): a share of each file, but no function of the contract suite."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import pytest
import sampling


class Item:
    """As much of a collected test as the draw looks at."""

    def __init__(self, nodeid: str, *marks: str, share: float | None = None, case: int = 0) -> None:
        self.nodeid = nodeid
        self.marks: dict[str, Any] = {mark: types.SimpleNamespace(args=()) for mark in marks}
        if share is not None:
            self.marks["sampled"] = types.SimpleNamespace(args=(share,))
        self.callspec = types.SimpleNamespace(indices={"case": case})

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)


def played(monkeypatch: pytest.MonkeyPatch, tests: Iterable[Item], share: str, seed: str) -> list[str]:
    monkeypatch.setenv(sampling.SHARE, share)
    monkeypatch.setenv(sampling.SEED, seed)
    tests = list(tests)
    absent = sampling.left_out(tests)
    return [test.nodeid for test in tests if test not in absent]


def a_file(name: str, quick: int, slow: int) -> list[Item]:
    return [
        *(Item(f"{name}::test_quick_{n}") for n in range(quick)),
        *(Item(f"{name}::test_slow_{n}", "slow") for n in range(slow)),
    ]


@pytest.mark.parametrize(("share", "quick", "slow"), [("1", 20, 30), ("0.3", 6, 3), ("0", 0, 0), ("0.01", 1, 1)])
def test_each_file_plays_its_share(monkeypatch: pytest.MonkeyPatch, share: str, quick: int, slow: int) -> None:
    tests = a_file("tests/python/test_a.py", 20, 30)
    names = played(monkeypatch, tests, share, "5")
    assert sum("quick" in name for name in names) == quick
    assert sum("slow" in name for name in names) == slow
    assert names == played(monkeypatch, tests, share, "5")
    # another file beside it changes nothing
    both = played(monkeypatch, a_file("tests/python/test_b.py", 9, 0) + tests, share, "5")
    assert [name for name in both if "test_a" in name] == names


def test_each_seed_plays_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = a_file("tests/python/test_a.py", 20, 30)
    seen = {name for seed in range(60) for name in played(monkeypatch, tests, "0.3", str(seed))}
    assert len(seen) == 50
    assert len(played(monkeypatch, tests, "0.3", "all")) == 50


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_each_contract_is_played_and_quick_where_it_can_be(monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
    file = sampling.CONTRACT + "test_c.py"
    tests = [Item(f"{file}::test_{n}[{kind}]", *(["slow"] if kind == "islands" else [])) for n in range(40)
             for kind in ("embedded", "islands")]  # fmt: skip
    tests += [Item(f"{file}::test_hosts_{n}", "slow") for n in range(5)]
    names = played(monkeypatch, tests, "0", seed)
    assert {name.partition("[")[0] for name in names} == {test.nodeid.partition("[")[0] for test in tests}
    assert not any("islands" in name for name in names)
    assert any("islands" in name for name in played(monkeypatch, tests, "0.3", seed))


def test_a_table_plays_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [Item(f"tests/python/test_t.py::test_table[{n}]", share=0.25, case=n) for n in range(40)]
    assert len(played(monkeypatch, tests, "1", "7")) == 10
    assert len(played(monkeypatch, tests, "0.5", "7")) == 5
    assert len(played(monkeypatch, tests, "1", "all")) == 40


@pytest.mark.parametrize("wrong", ["2", "1.1", "-0.1", "much", ""])
def test_a_share_that_is_none(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(sampling.SEED, "1")
    monkeypatch.setenv(sampling.SHARE, wrong)
    with pytest.raises(pytest.UsageError, match="expected a number from 0 to 1"):
        sampling.set_up()
