"""Every example runs as a program of its own, embedded and on host processes, and says what it should."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

LIMIT_S = 150
#: Where most of the time is XLA's: without its optimizations, as in `tests/conftest.py`.
QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
CLUSTERS = pytest.mark.parametrize("cluster", ["embedded", pytest.param("local", marks=pytest.mark.slow)])


def run_example(root: pathlib.Path, folder: pathlib.Path, name: str, *arguments: str, xla: str = "") -> str:
    """Run an example from another folder, as a user with no JAX settings but `xla` would; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    environment["COLUMNS"] = "120"
    if xla:
        environment["XLA_FLAGS"] = xla
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


@pytest.mark.slow
@pytest.mark.watchdog(LIMIT_S + 60)
@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("schedules", ["none,1F1B", "GPipe,ZeroBubbleH1", "1F1B,auto", "Interleaved1F1B,Circular"])
def test_a_transformer_learns_the_same_under_each_schedule(
    root: pathlib.Path, tmp_path: pathlib.Path, schedules: str
) -> None:
    arguments = ("--cluster", "local", "--steps", "4", "--schedules", schedules)
    lines = run_example(root, tmp_path, "transformer_pipeline.py", *arguments, xla=QUICK_XLA).splitlines()
    assert len(lines) == 3, lines
    losses = [re.fullmatch(r"(\w+) +loss (\S+) -> (\S+)", line) for line in lines[:2]]
    assert [match and match[1] for match in losses] == schedules.split(","), lines
    assert len({(match[2], match[3]) for match in losses if match}) == 1, lines
    assert all(match and float(match[3]) < float(match[2]) - 0.3 for match in losses), lines
    assert re.fullmatch(r"2 schedules, 4 steps: all losses within \S+e-0[5-9] of plain JAX", lines[2]), lines


@pytest.mark.slow
@pytest.mark.watchdog(LIMIT_S + 60)
def test_two_islands_that_exchange_gradients_have_the_same_bits(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments = ("--cluster", "local", "--steps", "4")
    output = run_example(root, tmp_path, "transformer_islands.py", *arguments, xla=QUICK_XLA)
    assert re.search(r"^loss \S+ -> \S+, within \S+e-0[5-9] of plain JAX", output, re.MULTILINE), output
    assert "bit-equal on both islands after 4 of 4 steps\n" in output, output


@CLUSTERS
def test_beam_search_stops_when_the_data_says_so(root: pathlib.Path, tmp_path: pathlib.Path, cluster: str) -> None:
    lines = run_example(root, tmp_path, "beam_search.py", "--cluster", cluster).splitlines()
    assert len(lines) == 3, lines
    turns = [int(re.match(rf"slice {n}, (\d+) turns: ", line)[1]) for n, line in enumerate(lines[:2])]  # type: ignore[index]
    assert turns[0] != turns[1], lines  # a slice that is done does nothing
    assert "ca|sket" in lines[0] and "f|low" in lines[1], lines
    assert re.fullmatch(r"plain JAX finds the same words in as many turns, scores within \S+", lines[2]), lines


@pytest.mark.slow
@pytest.mark.watchdog(LIMIT_S + 60)
def test_a_mixture_of_experts_learns_with_both_gates(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments = ("--cluster", "local", "--steps", "40")
    output = run_example(root, tmp_path, "mixture_of_experts.py", *arguments, xla=QUICK_XLA)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["top-k", "DSelect-k"], output
    for _, loss, accuracy, visits, in_use, _, left_out in rows:
        first, last = map(float, loss.split(" -> "))
        assert last < first / 2 and float(accuracy) > 0.7, output
        assert 1 <= float(visits) <= 4 and int(in_use) >= 2 and left_out == "0", output


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


@CLUSTERS
def test_training_grows_and_shrinks_with_the_same_bits(
    root: pathlib.Path, tmp_path: pathlib.Path, cluster: str
) -> None:
    output = run_example(root, tmp_path, "elastic_training.py", "--cluster", cluster, "--steps", "9", "--compare")
    islands = "[0, 1, 2]" if cluster == "local" else "[0]"
    assert f"grown after 3 steps: workers on islands {islands}, parameters on 2\n" in output, output
    assert "shrunk after 6 steps: workers on islands [0], parameters on 1\n" in output, output
    assert "bit-equal to an undisturbed one: True\n" in output, output


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
