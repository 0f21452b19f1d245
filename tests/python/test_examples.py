"""Every example runs as a program of its own, embedded and on host processes, and says what it should."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

LIMIT_S = 150
CLUSTERS = pytest.mark.parametrize("cluster", ["embedded", pytest.param("local", marks=pytest.mark.slow)])


def run_example(root: pathlib.Path, folder: pathlib.Path, name: str, *arguments: str) -> str:
    """Run an example from another folder, as a user with no JAX settings would; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    environment["COLUMNS"] = "120"
    command = [sys.executable, "-W", "error", str(root / "examples" / name), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@CLUSTERS
def test_figure2_is_four_dispatches_or_one_traced(root: pathlib.Path, tmp_path: pathlib.Path, cluster: str) -> None:
    output = run_example(root, tmp_path, "figure2.py", "--cluster", cluster)
    assert output.splitlines()[-2:] == [
        "without the tracer: ([3.0, 5.0], [2.0, 4.0]), dispatches: 4",
        "with pw.program: ([3.0, 5.0], [2.0, 4.0]), dispatches: 1",
    ]


@CLUSTERS
def test_data_parallel_training_equals_one_device(root: pathlib.Path, tmp_path: pathlib.Path, cluster: str) -> None:
    output = run_example(root, tmp_path, "data_parallel.py", "--cluster", cluster, "--steps", "60")
    assert re.search(r"60 steps on 4 devices: loss \S+, within \S+ of one device", output)


def check_digits(output: str, steps: int, least_accuracy: float) -> None:
    found = dict(re.findall(r"│ ([\w ,.]+?) +│ +(\S.*?) +│", output))
    assert float(found["test accuracy"]) >= least_accuracy, output
    assert found["dispatches"] == f"{steps} for {steps} steps", output
    assert int(found["bytes moved between slices"].replace(",", "")) > 0, output
    assert float(found[f"largest difference from plain JAX after {steps} steps"]) <= 1e-5, output


def test_the_digits_pipeline_follows_plain_jax(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    check_digits(run_example(root, tmp_path, "digits_pipeline.py", "--cluster", "embedded", "--steps", "20"), 20, 0.7)


@pytest.mark.slow
@pytest.mark.watchdog(LIMIT_S + 60)
def test_the_demo_trains_on_two_islands(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    check_digits(run_example(root, tmp_path, "digits_pipeline.py", "--cluster", "local", "--steps", "200"), 200, 0.95)


def test_digits_in_plain_jax_learns(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output = run_example(root, tmp_path, "digits_plain.py", "--steps", "100")
    match = re.search(r"100 steps, test accuracy (\S+),", output)
    assert match and float(match[1]) >= 0.93, output


def test_training_with_checkpoints(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments = ("--cluster", "embedded", "--folder", "c", "--every", "5")
    first = run_example(root, tmp_path, "training_with_checkpoints.py", *arguments, "--steps", "20")
    assert re.search(r"^20 steps, loss \S+$", first, re.MULTILINE), first
    assert sorted(folder.name for folder in (tmp_path / "c").iterdir()) == ["15", "20"]
    # Another process goes on from there.
    second = run_example(root, tmp_path, "training_with_checkpoints.py", *arguments, "--steps", "30", "--compare")
    assert "went on from step 20\n" in second, second
    assert "bit-equal to an undisturbed training: True\n" in second, second


@pytest.mark.slow
def test_training_goes_on_in_the_same_process_when_a_host_is_killed(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """ERR-2: the error names the host; what comes out is what would have come out, bit by bit."""
    output = run_example(root, tmp_path, "training_with_checkpoints.py", "--kill-at", "37", "--compare")
    assert re.findall(r"^(killed host 1|lost: host 1|went on from step [123]0)", output, re.MULTILINE)[:2] == [
        "killed host 1",
        "lost: host 1",
    ], output
    assert "went on from step " in output, output
    assert "bit-equal to an undisturbed training: True\n" in output, output


@pytest.mark.slow
def test_actors_and_learner_reach_their_goal(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output = run_example(root, tmp_path, "actor_learner.py", "--cluster", "local", "--goal", "120")
    assert re.search(r"^goal reached: mean return \d+\.\d of 200, expected 120$", output, re.MULTILINE), output
