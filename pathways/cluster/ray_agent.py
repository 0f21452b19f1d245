"""The Ray actor that runs a machine's agent. `ray_cluster.py` starts one per island, or several, on nodes that Ray
chooses.

Ray imports this module on that node; it needs nothing of Ray itself. The actor has the whole of its bundle. So Ray has
put the devices of its hosts into the actor's environment (CUDA_VISIBLE_DEVICES and its kin), and the agent
and its hosts inherit them.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from pathways import errors
from pathways.trust.tokens import TokenText

#: How long `end` waits for the agent, in seconds. An agent that ends in order takes one or two.
END_TIMEOUT_S = 15.0
_LOOK_S = 0.2


class RayAgent:
    """The actor. `run` and `end` are called at the same time: it needs two threads (`max_concurrency=2`)."""

    def __init__(self) -> None:
        self._is_told_to_end = threading.Event()
        self._is_running = threading.Lock()

    def run(self, address: str, token: str, is_encrypted: bool, island: int, shape: dict[str, Any]) -> str:
        """Runs the agent until `end` is called, or until it ends by itself.

        Args:
            address: of the controller's port.
            token: for one use.
            is_encrypted: whether the token is traded for a certificate.
            island: the place that it takes.
            shape: `hosts`, `devices_per_host` and `platform` of `AgentHandle`; of an island on several nodes, `fabric`
                and `trusted_fabric`, too.

        Returns:
            Empty after `end`. Else why the agent ended, for `errors.from_text`.
        """
        from pathways.cluster.agent_launcher import JOIN_TIMEOUT_S, AgentHandle

        if shape["platform"] == "rocm" and "HIP_VISIBLE_DEVICES" in os.environ:
            # Ray names AMD's devices by this variable, our hosts by the other one. Both at once would contradict.
            os.environ["ROCR_VISIBLE_DEVICES"] = os.environ.pop("HIP_VISIBLE_DEVICES")
        with self._is_running, _private_folder() as folder:
            kept = os.path.join(folder, "agent.pem") if is_encrypted else None
            agent = None
            try:
                agent = AgentHandle(address, token, kept, name=machine_name(island, token), island=str(island), **shape)
                agent.wait_joined(JOIN_TIMEOUT_S)
                while not self._is_told_to_end.is_set():
                    agent.check(_LOOK_S)
            except errors.PathwaysError as error:
                return f"{type(error).__name__}: {error}"
            finally:
                if agent is not None:
                    agent.close()
        return ""

    def end(self) -> bool:
        """Ends the agent and its hosts. Returns whether they are gone."""
        self._is_told_to_end.set()
        if not self._is_running.acquire(timeout=END_TIMEOUT_S):
            return False
        self._is_running.release()
        return True


def machine_name(island: int, token: str) -> str:
    """The agent's name: of this machine, with the island's number, because a machine may have several agents; and with
    that of the token, because each start has a key of its own, and a name belongs to a key.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename.partition(".")[0])
    return f"{name[:40]}-{island}-{TokenText.parse(token).number}"


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    """A folder that only this user can read, for the certificate and its key. Removed at the end.

    An actor that is killed cannot remove its folder. So the next actor of this user on the machine does. It knows the
    folder of a dead actor by its lock, which nobody holds.
    """
    prefix = f"pathways-ray-{os.getuid()}-"
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{prefix}*")):
        with contextlib.suppress(OSError), open(os.path.join(path, "lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, open(os.path.join(folder, "unlocked"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, os.path.join(folder, "lock"))  # nobody sees it without its lock
        yield folder
