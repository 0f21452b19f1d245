"""For tests of the control plane: `surroundings` for clusters of doubles, and `own`, such a cluster to destroy. For
tests of who may come in: `controller`, a port with an authority of its own.
"""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
from control_clusters import SMALL, assert_gone
from trust_cases import SECRETS, Controller

from pathways.cluster.launcher import LocalClusterHandle, start_local_cluster
from pathways.process import run_directory

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def surroundings() -> Iterator[None]:
    """Every process finds the doubles, and a file's clusters are in a folder of their own, empty in the end."""
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(run_directory, "_bases", lambda: [folder])
        yield
        assert os.listdir(folder) == []


@pytest.fixture
def own(surroundings: None) -> Iterator[LocalClusterHandle]:
    """A cluster of one's own, to destroy."""
    handle = start_local_cluster(1, 2, 1, **SMALL)
    yield handle
    handle.close()
    assert_gone(handle)


@pytest.fixture
def controller(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> Iterator[Controller]:
    """A controller's port on this machine. CERT-2: in the end no secret stands in the log, whatever callers did."""
    caplog.set_level(logging.DEBUG, logger="pathways")
    made = Controller(tmp_path / "authority")
    yield made
    made.port.close()
    assert not SECRETS.search(caplog.text)
