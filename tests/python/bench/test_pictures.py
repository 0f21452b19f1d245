"""`python -m benchmarks.pictures` draws committed results again, no wider than pages show them."""

from __future__ import annotations

import pathlib
import shutil
import struct

import pytest

from benchmarks import pictures

WIDEST = 960  # pixels


def width_of(path: pathlib.Path) -> int:
    """Of a PNG, from its header."""
    return int(struct.unpack(">I", path.read_bytes()[16:20])[0])


@pytest.mark.parametrize("what", ["mpmd", "pipeline", "tenants"])
def test_a_committed_result_is_drawn_again(
    what: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (result,) = pictures.RESULTS.glob(f"{what}-*.json")
    shutil.copy(result, tmp_path)
    pictures.main([tmp_path / result.name])
    drawn = sorted(tmp_path.glob("*.png"))
    assert [str(path) for path in drawn] == sorted(capsys.readouterr().out.split())
    assert [path.name for path in drawn] == sorted(path.name for path in pictures.RESULTS.glob(f"{result.stem}*.png"))
    assert all(width_of(path) <= WIDEST for path in drawn)


def test_committed_pictures_are_no_wider() -> None:
    assert [path.name for path in pictures.RESULTS.glob("*.png") if width_of(path) > WIDEST] == []
