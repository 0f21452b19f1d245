"""What the controller makes for a call that waits for it no longer, because of a deadline or Ctrl-C, is undone as soon
as the controller says that it is there: programs, programs with loops, and slices.

  END-1    a call ends at its deadline, and leaves nothing behind
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from control_clusters import eventually

import pathways as pw
from pathways.host.programs import Programs

pytestmark = pytest.mark.slow
X = np.float32(1)


def test_what_comes_late_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pw.connect(pw.LocalCluster(1, 1, 2)) as cluster:
        control: Any = cluster._control
        controller = psutil.Process(control.controller_pid)
        is_tidy: list[bool] = []

        def kept() -> tuple[int, int, int]:
            """Programs at the controller and at the host, and slices."""
            if is_tidy:
                gc.collect()
                cluster.sweep()
            stats = control.cluster_stats()
            (client,) = stats["clients"]
            return client["programs"], stats["hosts"][0]["programs"], client["slices"]

        def stopped_after(
            name: str, call: Callable[[], object], error: type[BaseException], match: str | None = None
        ) -> None:
            """The controller stops when it has answered request `name` of the call, which therefore ends by `error`.
            Then it goes on."""
            answer = getattr(control, name)

            def stop(*args: Any) -> Any:
                result = answer(*args)
                controller.suspend()
                if error is KeyboardInterrupt:
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                return result

            with monkeypatch.context() as patch:
                patch.setattr(control, name, stop)
                with pytest.raises(error, match=match):
                    call()
            controller.resume()
            eventually(lambda: kept() == before, f"what comes late after {name} is gone: {before}", 20)

        devices = pw.make_virtual_device_set(cluster)
        slice_ = devices.add_slice(devices=1)
        step = pw.jit(lambda x: x + 2, devices=slice_)
        loop = pw.program(lambda x: jax.lax.fori_loop(0, 1000, lambda _, x: step(x), x))
        other_loop = pw.program(lambda x: jax.lax.fori_loop(0, 999, lambda _, x: step(x), x))
        first, second = (pw.jit(lambda x, n=n: x * n, devices=slice_) for n in (3, 4))
        x = step(np.float32(1)).block_until_ready()
        assert float(loop(x)) == 2003
        before = kept()
        late = pw.errors.DeadlineExceededError, "waiting for the controller"
        stopped_after("group", lambda: first.with_timeout(0.5)(x), *late)
        stopped_after("group", lambda: second(x), KeyboardInterrupt)
        # What Ctrl-C leaves of a loop's own programs is garbage, and is tidied up with other garbage.
        is_tidy.append(True)
        stopped_after("wait_compiled", lambda: other_loop(x), KeyboardInterrupt)
        stopped_after(
            "cluster_stats", lambda: (control.cluster_stats(), devices.add_slice(devices=1)), KeyboardInterrupt
        )
        assert (float(first(x)), float(second(x)), float(other_loop(x))) == (9, 12, 2001)


def test_a_removal_that_comes_before_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's command may reach a host before the request that stores the program. Another client's says nothing."""
    register = Programs.register
    stored: list[int] = []

    def overtaken_by(who: int) -> None:
        def late(self: Programs, client: int, number: int, *rest: Any) -> None:
            self.remove(client + who, number)
            register(self, client, number, *rest)
            stored.append(number)

        monkeypatch.setattr(Programs, "register", late)

    with pw.connect() as cluster:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
        control: Any = cluster._control
        overtaken_by(1)
        kept = pw.jit(lambda x: x * 3, devices=slice_)
        assert float(kept(X)) == 3
        overtaken_by(0)
        removed = pw.jit(lambda x: x * 4, devices=slice_)
        with pytest.raises(pw.errors.PathwaysError, match="not known on host 0"):
            np.asarray(removed(X))
        programs = control.driver.programs.by_number
        eventually(lambda: stored[0] in programs and stored[1] not in programs, "it is not kept", 20)
