"""A training with checkpoints whose machine is killed: the bits in the end are those of one that nothing disturbed.

Map from label to test:
    ERR-2  test_the_machine_of_the_training_is_killed
"""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from control_clusters import eventually
from machines import MachineCluster
from test_machine_faults import agent_process, machines_of_island

import pathways as pw

pytestmark = pytest.mark.slow

STEPS, EVERY, KILL_AT = 20, 5, 8


def test_the_machine_of_the_training_is_killed(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All processes of the machine at once, agent and supervisor too. The training takes the newest checkpoint and goes
    on at another machine; later there is an agent on the first one again."""
    monkeypatch.syspath_prepend(root / "examples")
    example: Any = importlib.import_module("training_with_checkpoints")
    with MachineCluster(2, 1, 4) as machines:

        def kill_the_machine(cluster: pw.Cluster, devices: pw.Slice) -> None:
            # A save goes on beside the training. One that the kill disturbs counts for nothing.
            eventually((tmp_path / "killed" / str(EVERY)).is_dir, "the first checkpoint is there", 30)
            name = machines_of_island(cluster, machines)[devices.island]
            agent = agent_process(machines, name)
            supervisor = agent.parent()
            assert supervisor is not None
            for process in [supervisor, *supervisor.children(recursive=True)]:
                process.kill()
            _, alive = psutil.wait_procs([agent], timeout=10)
            assert not alive
            machines.agents[name].close()
            machines.start_agent(f"{name}-again")
            print(f"killed machine {name}")

        monkeypatch.setattr(example, "kill_a_host", kill_the_machine)
        with machines.connect() as cluster:
            got = example.run(machines.address, tmp_path / "killed", STEPS, EVERY, KILL_AT)
            output = capsys.readouterr().out
            assert "killed machine m" in output, output
            assert "lost: " in output, output
            assert f"went on from step {EVERY}" in output, output
            cluster.wait_for(8, 60)
            want = example.run(machines.address, tmp_path / "undisturbed", STEPS, EVERY, None)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
