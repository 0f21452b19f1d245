"""Each function of the one door to jaxlib's private parts, on the jaxlib that is installed.

Map: versions; no backend for a client; quiet compiler; portable modules; fast calls.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.extend
import numpy as np
import pytest
from jax._src.interpreters import mlir as jax_mlir
from jax.sharding import PartitionSpec as P

from pathways import _jaxlib, errors
from pathways._jaxlib import mlir_modules
from pathways.compiler.ir import MeshSpec
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, trace

ROOT = Path(__file__).resolve().parents[3]
MESH = MeshSpec("m", (("x", 2),))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("version", ["0.10.1", "0.13.0", "0.9", "1.0.0", "0.4.38"])
def test_unknown_versions_are_refused(version):
    with pytest.raises(
        errors.UnsupportedVersionError, match=re.escape(f"knows jaxlib >=0.10.2,<0.13, but jaxlib {version}")
    ):
        _jaxlib.check_versions("0.10.2", version)
    with pytest.raises(errors.UnsupportedVersionError, match="knows jax >=0"):
        _jaxlib.check_versions(version, "0.10.2")


@pytest.mark.parametrize("version", ["0.10.2", "0.10.3.dev20260101", "0.11.0", "0.12.0.1", "0.12.9"])
def test_known_versions(version):
    _jaxlib.check_versions(version, version)


def test_a_client_initialises_no_backend_and_hears_nothing():
    done = python("""
        import numpy as np
        from jax.sharding import PartitionSpec as P
        import jax, jax.numpy as jnp
        from pathways import _jaxlib
        from pathways.compiler.ir import MeshSpec
        from pathways.compiler.pipeline import compile_traced
        from pathways.compiler.placed import TaggedFunction as placed
        from pathways.compiler.trace import trace
        mesh = MeshSpec("m", (("x", 4),))
        other = MeshSpec("n", (("y", 2),))
        f = placed(lambda x, k: x @ x.T + jax.random.normal(k, (4, 4)) + jnp.arange(4.0), mesh)
        total = lambda x: jax.shard_map(lambda y: jax.lax.psum(y, "y"), in_specs=P("y"), out_specs=P())(x)
        g = placed(lambda x: total(x).sum(), other)
        key = jax.eval_shape(lambda: jax.random.key(0))
        program = compile_traced(trace(jax.grad(lambda x, k: g(f(x, k)) + 1), [np.ones((4, 4), "f"), key]),
                                 {"platforms": ("tpu", "cuda")[:1]})
        assert program.nodes, program
        assert _jaxlib.initialized_backends() == (), _jaxlib.initialized_backends()
        from jax._src import xla_bridge
        assert not xla_bridge._backends
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


def test_quiet_passes_on_what_others_print(capfd):
    with _jaxlib.quiet():
        os.write(1, b"I1121 00:16:1795220192.630874 3335 a/file.cc:186] Importing.\n")
        os.write(1, b"I1121 00:16:1795220192.630874 3335 a/file.cc:88] Introduced 0 control dependencies\n\n")
        os.write(1, b"a user's line\n")
        thread = threading.Thread(target=lambda: os.write(1, b"another thread's line\n"))
        thread.start()
        thread.join()
        os.write(1, b"I1121 00:16:1795220192.630874 3335 a/file.cc:186] More.\n")
    assert capfd.readouterr().out == "a user's line\nanother thread's line\n"


def test_quiet_lets_errors_through(capfd):
    with pytest.raises(ZeroDivisionError), _jaxlib.quiet():
        os.write(1, b"kept\n")
        raise ZeroDivisionError
    assert capfd.readouterr().out == "kept\n"
    print("still works")
    assert capfd.readouterr().out == "still works\n"


def test_the_compiler_is_quiet(capfd):
    f = placed(lambda x: x + 1, MESH, in_shardings=P("x"))
    compile_traced(trace(f, [np.ones(4, np.float32)]))
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_a_program_against_the_order_of_its_slices_is_quiet_too(capfd):
    f, g = (placed(lambda x: x + 1, MeshSpec(name, (("x", 2),)), in_shardings=P("x")) for name in "ab")
    compile_traced(trace(lambda x: f(g(f(x))), [np.ones(4, np.float32)]))
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_a_compiler_that_dies_still_says_where():
    done = python("""
        import os
        from pathways import _jaxlib
        with _jaxlib.quiet():
            os.abort()
    """)
    assert done.returncode == -6 and "Fatal Python error: Aborted" in done.stderr and "<string>" in done.stderr


def test_portable_modules_round_trip_and_are_deterministic():
    def modules():
        f = placed(lambda x: jax.lax.with_sharding_constraint(x + 1, P("x")), MESH, in_shardings=P("x"))
        (computation,) = compile_traced(trace(f, [np.ones(4, np.float32)])).computations
        return computation

    one, two = modules(), modules()
    assert one.module == two.module and one.fingerprint == two.fingerprint
    with _jaxlib.mlir_context():
        text = str(_jaxlib.parse_portable(one.module))
        assert "stablehlo.add" in text and '@mesh, [{"x"}]' in text and "loc(" not in text
        assert _jaxlib.mesh_axes(_jaxlib.parse_portable(one.module)) == (("x", 2),)


def test_a_program_needs_no_context_per_module_and_leaves_its_own_to_the_next(monkeypatch):
    made = []
    maker = "_create_ir_context" if hasattr(jax_mlir, "_create_ir_context") else "make_ir_context"
    plain = getattr(jax_mlir, maker)
    mlir_modules._element_types()  # makes one, once
    monkeypatch.setattr(jax_mlir, maker, lambda: made.append(1) or plain())
    monkeypatch.setattr(mlir_modules, "_spare", [])

    def compile_two(shift: float, big: np.ndarray | None = None) -> None:
        f = placed(lambda x: jax.numpy.sin(x) + (shift if big is None else big), MESH, name="f")
        g = placed(lambda x: x * shift, MeshSpec("other", (("x", 2),)), name="g")
        x = np.ones(8 if big is None else big.size, np.float32)
        assert len(compile_traced(trace(lambda x: g(f(x)), [x])).computations) == 2

    compile_two(2.0)
    assert len(made) == 1
    compile_two(3.0)
    assert len(made) == 1
    compile_two(4.0, np.arange(1 << 19, dtype=np.float32))  # its context keeps 2 MiB of constants
    assert len(made) == 1 and not mlir_modules._spare
    with pytest.raises(ZeroDivisionError), _jaxlib.mlir_context():
        _ = 1 // 0
    assert len(made) == 2 and not mlir_modules._spare
    with _jaxlib.mlir_context() as outer, _jaxlib.mlir_context() as inner:
        assert inner is not outer
    assert len(mlir_modules._spare) == 1


def test_a_compiler_that_refuses_raises_its_message():
    with _jaxlib.mlir_context():
        module = _jaxlib.parse(
            "module { func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
            '%0 = mpmd.named_computation<"f"> (%a) (%p: tensor<4xf32>) {\n'
            "%q = stablehlo.add %p, %p : tensor<4xf32>\n mpmd.return %q : tensor<4xf32> } "
            ": (tensor<4xf32>) -> tensor<4xf32>\n"
            "%1 = stablehlo.add %0, %a : tensor<4xf32>\n return %1 : tensor<4xf32> } }"
        )
        with pytest.raises(RuntimeError, match="not assigned to a mesh"):
            _jaxlib.partition(
                module,
                meshes=[("m", [("x", 2)])],
                assignment={"g": ("m", 0)},
                input_meshes=[None],
                output_meshes=[None],
                options={},
            )


def test_tracebacks_are_dropped():
    script = """
import jax, jaxlib._jax
from pathways import _jaxlib
assert jaxlib._jax.tracebacks_enabled()
_jaxlib.drop_tracebacks()
assert not jaxlib._jax.tracebacks_enabled()
assert jax.jit(lambda x: x + 1)(1) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_keys_and_physical_types():
    key = jax.random.key(1)
    assert _jaxlib.is_key(key.dtype) and not _jaxlib.is_key(np.float32) and not _jaxlib.is_key(None)
    assert _jaxlib.physical(jax.typeof(key)) == ((2,), np.dtype(np.uint32))
    words = jax.random.key_data(key)
    assert _jaxlib.from_physical(words, key.dtype) == key
    assert Argument((), key.dtype).struct().dtype == key.dtype


def test_shards_are_assembled_without_a_copy() -> None:
    devices = jax.devices()[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    value = jax.device_put(np.arange(8, dtype=np.float32), sharding)
    shards = _jaxlib.shards_of(value)
    assert [list(shard.devices()) for shard in shards] == [[device] for device in devices]
    address = _jaxlib.address_of(shards[1])
    assert ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0] == 4.0
    raw = np.zeros(4 + 16, np.float32)
    at = -raw.ctypes.data % 64 // 4
    memory = raw[at : at + 4]
    mixed = _jaxlib.assemble(
        _jaxlib.shaped_array((8,), np.dtype(np.float32), False), sharding, [shards[0], memory], devices
    )
    parts = _jaxlib.shards_of(mixed)
    assert _jaxlib.address_of(parts[0]) == _jaxlib.address_of(shards[0])
    assert _jaxlib.address_of(parts[1]) == memory.ctypes.data
    crossed = _jaxlib.assemble(mixed.aval, sharding, [shards[1], shards[0]], devices)
    np.testing.assert_array_equal(np.asarray(crossed), [4, 5, 6, 7, 0, 1, 2, 3])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 6)])
def test_complex_numbers_as_their_parts(shape: tuple[int, ...], dtype: str) -> None:
    with jax.enable_x64(True):
        value = (np.arange(math.prod(shape)).reshape(shape) * (1 - 2j)).astype(dtype)
        parts = _jaxlib.to_physical(value, value.dtype)
        assert (parts.shape, parts.dtype) == _jaxlib.physical_struct(shape, value.dtype)
        back = _jaxlib.from_physical(parts, value.dtype)
        assert back.dtype == dtype and back.tobytes() == value.tobytes()
        closed = jax.make_jaxpr(lambda x: (x * 2, jax.numpy.abs(x)))(value)
        jaxpr = getattr(closed, "jaxpr", closed)
        ends = _jaxlib.cross_physically(jaxpr.invars, jaxpr.outvars, jaxpr.eqns)
        fun = _jaxlib.as_function(_jaxlib.new_jaxpr({}, *ends, like=jaxpr))
        double, size = fun(parts)
        np.testing.assert_array_equal(_jaxlib.from_physical(double, value.dtype), value * 2)
        np.testing.assert_allclose(size, np.abs(value))


def test_what_is_live_in_a_jaxpr_and_one_equation_of_it():
    table = np.arange(4.0, dtype=np.float32)

    def fun(x, unread, y):
        return jax.numpy.sin(x) * table, x + unread

    closed = jax.make_jaxpr(lambda *args: jax.jit(fun)(*args)[0])(*np.ones((3, 4), np.float32))
    smaller, reads = _jaxlib.live(closed)
    assert reads == [True, False, False]
    assert len(_jaxlib.opened(smaller)[0].invars) == 3
    np.testing.assert_allclose(_jaxlib.as_function(smaller)(table, 0, 0)[0], np.sin(table) * table, rtol=1e-6)
    jaxpr = _jaxlib.opened(jax.make_jaxpr(lambda x: 2 - x)(table))[0]
    values = [v.val if isinstance(v, _jaxlib.Literal) else table for v in jaxpr.eqns[0].invars]
    np.testing.assert_array_equal(_jaxlib.evaluated(jaxpr.eqns[0], values, jaxpr)[0], 2 - table)


def test_a_primitive_that_runs_alone():
    twice = jax.extend.core.Primitive("twice")
    twice.def_abstract_eval(lambda x: x)
    jax.interpreters.mlir.register_lowering(
        twice, jax.interpreters.mlir.lower_fun(lambda x: x * 2, multiple_results=False)
    )
    with pytest.raises(NotImplementedError):
        twice.bind(np.float32(3))
    _jaxlib.run_alone(twice)
    assert twice.bind(np.float32(3)) == 6


def test_the_filter_of_tracebacks_asks_once_for_each_file() -> None:
    """JAX's frames go from a traceback as before; a library that registers itself later is heard."""
    script = """
        import os, tempfile, traceback
        import jax
        from jax._src import traceback_util
        from pathways import _jaxlib

        asked = []
        plain = traceback_util._path_starts_with
        traceback_util._path_starts_with = lambda *paths: asked.append(paths) or plain(*paths)
        _jaxlib.keep_filter_answers()

        def files():
            before = len(asked)
            try:
                jax.jit(lambda x: x @ x)(jax.numpy.ones((2, 3)))
            except TypeError as error:
                frames = traceback.extract_tb(error.__traceback__)
            return {frame.filename for frame in frames}, len(asked) - before

        first, second = files(), files()
        assert first[0] == second[0] and first[1] > 0 and second[1] == 0, (first, second)
        assert traceback_util.include_filename(tempfile.gettempdir() + "/library/a.py")
        traceback_util.register_exclusion(tempfile.gettempdir() + "/library")
        assert not traceback_util.include_filename(tempfile.gettempdir() + "/library/a.py")
    """
    ran = python(script)
    assert ran.returncode == 0, ran.stderr


def test_what_is_compiled_goes_into_a_store_and_comes_from_there() -> None:
    script = """
        import jax
        import numpy as np
        from pathways import _jaxlib

        class Store(dict):
            def put(self, key, value):
                self[key] = value
                return True

        store, said, hits = Store(), [], []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
        assert not _jaxlib.has_compile_cache()
        _jaxlib.keep_executables(store, said.append)

        def compiled():
            jax.clear_caches()
            assert np.asarray(jax.jit(lambda x: x * 3)(np.float32(2))) == 6
            return len(store), len(hits)

        assert compiled() == (1, 0)
        assert compiled() == (1, 1)
        with _jaxlib.compile_anew():
            assert compiled() == (1, 1)
            store.clear()
            assert compiled() == (0, 1)
        Store.put = lambda self, key, value: 1 / 0
        assert compiled() == (0, 1)
        assert len(said) == 1 and "is not kept: ZeroDivisionError" in said[0], said
        jax.config.update("jax_compilation_cache_dir", "/somewhere")
        assert _jaxlib.has_compile_cache()
    """
    ran = python(script)
    assert ran.returncode == 0, ran.stderr


def test_layouts_are_taken_out_of_a_module() -> None:
    """PROXY-6: what a client asks of the memory of arrays is told apart from what they are."""
    text = (
        'module @m { func.func public @main(%a: tensor<2x3xf32> {mhlo.layout_mode = "{0,1}"}, %b: tensor<f32>) -> '
        '(tensor<2x3xf32> {mhlo.layout_mode = "auto", jax.result_info = "r"}) { return %a : tensor<2x3xf32> } }'
    )
    with mlir_modules.mlir_context():
        module = mlir_modules.portable_bytecode(mlir_modules.parse(text))
        plain = mlir_modules.portable_bytecode(mlir_modules.parse(re.sub(r'mhlo.layout_mode = "\S*",?', "", text)))
    made, parameters, results = _jaxlib.by_default_layouts(module)
    assert (parameters, results) == (("{0,1}", ""), ("",))
    with mlir_modules.mlir_context():
        assert "layout" not in str(mlir_modules.parse_portable(made))
        assert "jax.result_info" in str(mlir_modules.parse_portable(made))
    assert _jaxlib.by_default_layouts(plain) == (plain, (), ())
    with pytest.raises(ValueError, match="cannot be read"):
        _jaxlib.by_default_layouts(b"mhlo.layout_mode")


def test_modules_that_call_python_are_refused() -> None:
    """TRUST-1: the addresses in such a call are those of another process. XLA would use them."""
    call = 'stablehlo.custom_call @"{}"() {{has_side_effect = true}} : () -> ()'
    text = f"module @m {{{{ func.func public @main() {{{{ {call} return }}}} }}}}"

    def module(target: str) -> bytes:
        with mlir_modules.mlir_context():
            return mlir_modules.portable_bytecode(mlir_modules.parse(text.format(target)))

    for target in ("InspectSharding", "CustomSPMDPartitioning", "xla_ffi_python_cpu_callback"):
        escaped = text.format(f"\\{ord(target[0]):x}{target[1:]}")
        for each in (module(target), text.format(target).encode(), escaped.encode()):
            with pytest.raises(NotImplementedError, match=f"calls a Python function .*{target}"):
                _jaxlib.refuse_calls_of_python(each)
            with pytest.raises(NotImplementedError, match=target):
                _jaxlib.compile_raw(each, b"", jax.devices()[:1])
    _jaxlib.refuse_calls_of_python(module("lapack_sgeqrf"))


def test_a_profile_of_this_process_has_its_computations() -> None:
    square = jax.jit(lambda x: jax.numpy.sin(x @ x))
    x = np.ones((32, 32), np.float32)
    square(x).block_until_ready()
    _jaxlib.start_profile(python=False)
    with pytest.raises(RuntimeError, match="records a profile already"):
        _jaxlib.start_profile(python=True)
    square(x).block_until_ready()
    profile = jax.profiler.ProfileData.from_serialized_xspace(_jaxlib.stop_profile())
    names = {event.name for plane in profile.planes for line in plane.lines for event in line.events}
    assert any("sine" in name for name in names)
    assert _jaxlib.stop_profile() == b""
