"""The host's side: compiled ahead and once, called as fast as jit, donation, memory, several processes, the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pathways import errors
from pathways.compiler.ir import Computation, MeshSpec
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, trace
from pathways.host import executables

ROOT = Path(__file__).resolve().parents[3]
TWO = MeshSpec("two", (("x", 2),))
CUT = P("x")
COMPILE = "/jax/core/compile/backend_compile_duration"


def computation(fun=lambda x: x + 1, mesh=TWO, shape=(8,), spec=CUT, dtype=np.float32) -> Computation:
    f = placed(fun, mesh, in_shardings=spec, out_shardings=spec, name="f")
    entries = tuple(() if e is None else (e,) for e in [*spec, *[None] * len(shape)][: len(shape)])
    (result,) = compile_traced(trace(f, [Argument(shape, dtype, False, mesh, entries)])).computations
    return result


@contextlib.contextmanager
def compiles() -> Iterator[list[str]]:
    """The compile events while inside."""
    seen: list[str] = []
    inside = [True]

    def listen(event: str, duration: float, **_: object) -> None:
        if inside[0] and event == COMPILE:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    inside[0] = False


def test_compiled_ahead_without_executing():
    c, devices = computation(), jax.devices()[:2]
    with compiles() as ahead:
        loaded = executables.load(c, devices)
    assert len(ahead) == 1
    x = jax.device_put(np.arange(8, dtype=np.float32), loaded.in_shardings[0])
    with compiles() as later:
        (y,) = loaded.call(x)
        (y,) = loaded.call(y)
    assert not later
    np.testing.assert_array_equal(y, np.arange(8) + 2)
    assert y.sharding.is_equivalent_to(loaded.out_shardings[0], 1)
    assert executables.load(c, devices).call(x)[0].shape == (8,)


def test_equal_modules_compile_once():
    cache = executables.ExecutableCache()
    with compiles() as seen:
        threads = [threading.Thread(target=lambda: cache.load(computation(), jax.devices()[:2])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one = cache.load(dataclasses.replace(computation(), name="other"), jax.devices()[:2], (False,))
        assert one is cache.load(computation(), jax.devices()[:2])
    assert len(seen) == 1 and len(cache) == 1
    cache.load(computation(), jax.devices()[2:4])
    cache.load(computation(), jax.devices()[:2], (True,))
    assert len(cache) == 3


def test_a_module_without_a_mesh_whose_arrays_are_cut():
    """jaxlib may leave the mesh out of a module. Then the slice says how its arrays lie; slices are not mixed up."""
    module = jax.export.export(jax.jit(lambda x: x + 1))(jax.ShapeDtypeStruct((8, 4), np.float32))
    cut = computation(spec=P("x", None), shape=(8, 4))
    bare = dataclasses.replace(cut, module=module.mlir_module_serialized)
    assert executables.mesh_axes(bare) == ()
    cache, devices = executables.ExecutableCache(), jax.devices()[:4]
    for axes, rows in (((("x", 4),), 2), ((("x", 2), ("y", 2)), 4)):
        loaded = cache.load(bare, devices, axes=axes)
        x = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), loaded.in_shardings[0])
        (y,) = loaded.call(x)
        assert {shard.data.shape for shard in y.addressable_shards} == {(rows, 4)}
        np.testing.assert_array_equal(y, np.asarray(x) + 1)
    assert len(cache) == 2


def test_a_module_that_does_not_compile_is_not_remembered():
    cache = executables.ExecutableCache()
    broken = dataclasses.replace(computation(), module=b"nonsense")
    for _ in range(2):
        with pytest.raises(errors.ComputationError, match="computation 'f'"):
            cache.load(broken, jax.devices()[:2])
    assert len(cache) == 0
    with pytest.raises(errors.PlanError, match="of 2 devices, but 3 devices were given"):
        executables.load(computation(), jax.devices()[:3])


def test_donation_and_aliases():
    loaded = executables.load(computation(), jax.devices()[:2], (True,))
    x = jax.device_put(np.arange(8, dtype=np.float32), loaded.in_shardings[0])
    (y,) = loaded.call(x)
    assert x.is_deleted() and not y.is_deleted()
    kept = executables.load(computation(), jax.devices()[:2])
    kept.call(y)
    assert not y.is_deleted()


def test_a_call_goes_straight_to_xla():
    """Without `jit`, which would refuse it here, and would look at each argument in each call."""
    loaded = executables.load(computation(), jax.devices()[:2])
    x = jax.device_put(np.arange(8, dtype=np.float32), loaded.in_shardings[0])
    with jax.disable_jit():
        (y,) = loaded.call(x)
    assert y.committed and y.sharding == loaded.out_shardings[0] and y.dtype == np.float32
    np.testing.assert_array_equal(y, np.arange(8) + 1)


def test_a_call_says_what_is_wrong_with_an_array():
    mesh = MeshSpec("one", (("x", 1),))
    one, taking = (executables.load(computation(mesh=mesh), jax.devices()[:1], (donate,)) for donate in (False, True))
    two = executables.load(computation(), jax.devices()[:2])
    deleted = r"Array has been deleted with shape=float32\[8\]"
    for loaded, end, words in (
        (one, taking.call, deleted),
        (one, lambda array: array.delete(), deleted),
        (two, lambda array: array.delete(), deleted),
        (taking, taking.call, "deleted or donated"),
    ):
        x = jax.device_put(np.arange(8, dtype=np.float32), loaded.in_shardings[0])
        end(x)
        with pytest.raises(RuntimeError, match=words):
            loaded.call(x)
    with pytest.raises(RuntimeError, match=r"2 shards, got: \[1\]"):
        two.call(jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[0]))
    with pytest.raises(RuntimeError, match="incompatible size"):
        one.call(jax.device_put(np.arange(16, dtype=np.float32), one.in_shardings[0]))


def test_memory_statistics():
    mesh = MeshSpec("one", (("x", 1),))
    loaded = executables.load(computation(lambda x: (x @ x.T) @ x, mesh, (256, 256)), jax.devices()[:1])
    assert loaded.memory.argument_bytes == loaded.memory.output_bytes == 256 * 256 * 4
    assert loaded.memory.temporary_bytes >= 256 * 256 * 4
    half = executables.load(computation(shape=(8,)), jax.devices()[:2])
    assert half.memory.argument_bytes == 16


def test_linear_algebra_loads_in_a_process_that_never_traced_any(tmp_path):
    c = computation(lambda a: jnp.linalg.cholesky(a), MeshSpec("one", (("x", 1),)), (3, 3), P())
    (tmp_path / "module").write_bytes(c.module)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
        import jax, numpy as np
        from pathways.compiler.ir import *
        from pathways.host import executables
        t = ArrayType((3, 3), np.dtype("float32"), 0, ((), ()))
        c = Computation("c", open({str(tmp_path / "module")!r}, "rb").read(), 0, (t,), (t,), (False,))
        (y,) = executables.load(c, jax.devices()[:1]).call(jax.numpy.eye(3) * 4)
        assert (np.asarray(y) == np.eye(3) * 2).all()
        """),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def test_persistent_cache_is_honoured(tmp_path):
    c = computation(lambda x: x * 5 + 2)
    (tmp_path / "module").write_bytes(c.module)
    code = textwrap.dedent(f"""
        import jax, numpy as np, jax.monitoring
        hits = []
        jax.monitoring.register_event_listener(lambda e, **k: hits.append(e) if "cache_hits" in e else None)
        from pathways.compiler.ir import *
        from pathways.host import executables
        t = ArrayType((8,), np.dtype("float32"), 0, (("x",),))
        c = Computation("c", open({str(tmp_path / "module")!r}, "rb").read(), 0, (t,), (t,), (False,))
        executables.load(c, jax.devices()[:2])
        print(len(hits))
        """)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], [run.stderr for run in runs]
    assert [run.stdout.strip() for run in runs] == ["0", "1"]


def test_a_mesh_of_two_processes(tmp_path):
    def body(x):
        return jax.shard_map(lambda y: jax.lax.psum(y, "x"), in_specs=P("x"), out_specs=P())(x)

    f = placed(body, TWO, in_shardings=P("x"), out_shardings=P(), name="f")
    (c,) = compile_traced(trace(f, [Argument((4,), np.float32, False, TWO, (("x",),))])).computations
    (tmp_path / "module").write_bytes(c.module)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = textwrap.dedent(f"""
        import sys, jax, numpy as np
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        rank = int(sys.argv[1])
        jax.distributed.initialize("127.0.0.1:{port}", 2, rank)
        from pathways.compiler.ir import *
        from pathways.host import executables
        t = ArrayType((4,), np.dtype("float32"), 0, (("x",),))
        r = ArrayType((2,), np.dtype("float32"), 0, ((),))
        c = Computation("c", open({str(tmp_path / "module")!r}, "rb").read(), 0, (t,), (r,), (False,))
        loaded = executables.load(c, jax.devices())
        mine = jax.device_put(np.full(2, rank + 1.0, np.float32), jax.local_devices()[0])
        x = jax.make_array_from_single_device_arrays((4,), loaded.in_shardings[0], [mine])
        (y,) = loaded.call(x)
        assert (np.asarray(y.addressable_data(0)) == 3).all(), y
        jax.distributed.shutdown()
        """)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in both:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out


def test_calls_cost_what_jit_costs():
    """Printed, never asserted: time per chained call against plain jit on the same devices."""
    for count in (1, 2):
        mesh = MeshSpec("m", (("x", count),))
        loaded = executables.load(computation(mesh=mesh), jax.devices()[:count])
        plain = jax.jit(lambda x: (x + 1,), in_shardings=loaded.in_shardings, out_shardings=loaded.out_shardings)
        start = jax.device_put(np.zeros(8, np.float32), loaded.in_shardings[0])
        best = {}
        for _ in range(3):
            for name, call in (("loaded", loaded.call), ("jit", plain)):
                x, begin = start, time.perf_counter()
                for _ in range(300):
                    (x,) = call(x)
                x.block_until_ready()
                best[name] = min(best.get(name, 1.0), (time.perf_counter() - begin) / 300)
        print(f"{count} devices: loaded {best['loaded'] * 1e6:.1f} us, jit {best['jit'] * 1e6:.1f} us a call")
