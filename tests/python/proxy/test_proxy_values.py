"""Unmodified JAX computes the same through a proxy as on eight CPU devices of its own, bit by bit.

Each program runs in two processes at the same time, and leaves arrays in `results`, or texts of errors.
"""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from doors import Door, run_beside_plain_jax

pytestmark = pytest.mark.slow  # each case starts two programs

MESH = """
mesh = jax.make_mesh((4, 2), ("a", "b"))
def placed(x, *axes):
    return jax.device_put(x, NamedSharding(mesh, P(*axes)))
x = placed(np.arange(64.0, dtype=np.float32).reshape(8, 8), "a", "b")
"""


def on_mesh(program: str) -> str:
    """`program` after MESH."""
    return MESH + textwrap.dedent(program)


PROGRAMS = {
    "jit": """
        f = jax.jit(lambda a, b: {"sum": a @ b + 1, "other": (a - b.T).astype(jnp.bfloat16).astype(jnp.float32)})
        results |= f(jnp.ones((3, 4)), jnp.arange(12.0).reshape(4, 3))
        for step in range(20):  # the first call makes the client learn the results; later ones name them
            results["loop"] = results.get("loop", 0.5) * jnp.float32(1.25) + step
        results["nothing"] = jax.jit(lambda a: a)(jnp.zeros((0, 3))).shape
        results["scalar"] = jnp.float32(3) ** 2
        results["svd"] = jnp.linalg.svd(jnp.arange(6.0).reshape(2, 3))[1]
    """,
    "named_sharding": on_mesh("""
        results["computed"] = jax.jit(lambda v: (v * 2).sum(0))(x)
        results["transposed"] = jax.jit(lambda v: v.T + 1, out_shardings=NamedSharding(mesh, P("b")))(x)
        results["moved"] = jax.device_put(x, NamedSharding(mesh, P("b", None)))
        results["to_one"] = jax.device_put(x, jax.devices()[5])
        small = jax.make_mesh((2,), ("c",), devices=jax.devices()[6:])
        results["across"] = jax.device_put(x, NamedSharding(small, P("c")))
        results["shards"] = np.stack([np.asarray(shard.data) for shard in x.addressable_shards])
        results["made"] = jax.make_array_from_callback((8, 8), x.sharding, lambda i: np.arange(64.0).reshape(8, 8)[i])
        parts = [jax.device_put(np.full(2, d.id, np.float32), d) for d in mesh.devices.flat]
        results["joined"] = jax.make_array_from_single_device_arrays((16,), NamedSharding(mesh, P(("a", "b"))), parts)
    """),
    "shard_map": on_mesh("""
        def body(v):
            return jax.lax.psum(v, "a") + jax.lax.ppermute(v, "b", [(0, 1), (1, 0)])
        results["psum"] = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b")))(x)
        results["gathered"] = jax.shard_map(
            lambda v: jax.lax.all_gather(v, "a", tiled=True), mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False
        )(placed(np.arange(8.0, dtype=np.float32), "a"))
        results["pmap"] = jax.pmap(lambda v: jax.lax.psum(v, "i"), axis_name="i")(jnp.arange(8.0))
    """),
    "random_and_scan": """
        key = jax.random.key(7)
        results["normal"] = jax.random.normal(key, (5,))
        results["bits"] = jax.random.bits(jax.random.split(key, 3)[2], (4,))
        results["keys"] = jax.random.key_data(jax.random.split(key, 4))
        carry, ys = jax.lax.scan(lambda c, v: (c * 0.5 + v, c), 0.0, jnp.arange(9.0))
        results["carry"], results["ys"] = carry, ys
        results["while"] = jax.lax.while_loop(lambda v: v < 100, lambda v: v * 3, 1)
        results["cond"] = jax.jit(lambda p: jax.lax.cond(p, lambda: 1.0, lambda: 2.0))(True)
        results["grad"] = jax.grad(lambda v: jnp.sin(v).sum())(jnp.arange(3.0))
        results["vmap"] = jax.vmap(lambda v: v @ v)(jnp.arange(12.0).reshape(3, 4))
    """,
    "donation": on_mesh("""
        add = jax.jit(lambda v: v + 1, donate_argnums=0)
        y = add(x)
        results["added"], results["is_deleted"] = np.asarray(y), x.is_deleted()
        results["reason"] = error_of(lambda: x + 1)
        for _ in range(5):
            y = add(y)
        results["again"] = y
        one = jnp.arange(3.0)
        alias = jax.device_put(one, one.sharding)  # may share memory
        results["one"] = add(one)
        results["one_is_deleted"] = one.is_deleted()
        z = jnp.ones(3)
        twice = jax.jit(lambda a, b: a + b, donate_argnums=0)
        results["both"] = error_of(lambda: twice(z, z)) != "no error"
        kept = jnp.ones(3)
        kept.delete()
        results["deleted"] = error_of(lambda: kept + 1)
    """),
    "ahead_of_time": on_mesh("""
        lowered = jax.jit(lambda a, b: a @ b, in_shardings=NamedSharding(mesh, P("a", None))).lower(
            jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
        )
        compiled = lowered.compile()
        left = placed(np.arange(64.0, dtype=np.float32).reshape(8, 8), "a", None)
        results["product"] = compiled(left, left)
        results["specs"] = [str(sharding.spec) for sharding in compiled.input_shardings[0]]
        results["out"] = str(compiled.output_shardings.spec)
        results["flops"] = compiled.cost_analysis()["flops"]
        results["bytes"] = compiled.memory_analysis().argument_size_in_bytes
        results["text"] = compiled.as_text().count("dot(")
        results["layout"] = str(left.format.layout)
    """),
    "dtypes": """
        import ml_dtypes
        jax.config.update("jax_enable_x64", True)
        everywhere = NamedSharding(jax.make_mesh((8,), ("a",)), P())
        for name in (
            "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 float16 bfloat16 float32 "
            "float64 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e3m4 float8_e4m3 float4_e2m1fn"
        ).split():
            values = (np.arange(6) % 2).reshape(2, 3).astype(np.dtype(getattr(ml_dtypes, name, name)))
            for where in (None, everywhere):
                there = jax.device_put(values, where)
                back = np.asarray(jax.jit(lambda v: v.T)(there)).T if where is None else np.asarray(there)
                assert back.dtype == values.dtype == there.dtype and (back == values).all(), name
                results[f"{name}{where is None}"] = np.asarray(there).astype(np.float32).real
    """,
    "strides": """
        whole = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
        views = {"t": whole.T, "step": whole[:, ::2], "part": whole[..., 1:3], "fortran": np.asfortranarray(whole),
                 "empty": whole[:, :0], "scalar": whole[0, 0, 0], "one": whole[:, :1].T}
        for name, view in views.items():
            results[name] = jax.device_put(view)
            assert (np.asarray(results[name]) == view).all(), name
            results[f"{name}_transposed"] = np.asarray(jax.device_put(view)).T
    """,
    "strings": """
        words = np.array([["ab", "c"], ["", "d\\u00e9f"]], np.dtypes.StringDType())
        first = jax.device_put(words, jax.devices()[0])
        results["first"] = np.asarray(first).astype("U9")
        results["moved"] = np.asarray(jax.device_put(first, jax.devices()[3])).astype("U9")
    """,
    "export": """
        from jax import export
        exported = export.export(jax.jit(lambda v: jnp.sin(v) * 2))(jax.ShapeDtypeStruct((4,), jnp.float32))
        results["called"] = export.deserialize(exported.serialize()).call(jnp.arange(4.0))
        results["platforms"] = exported.platforms
    """,
    "memories": on_mesh("""
        kinds = sorted(memory.kind for memory in jax.devices()[0].addressable_memories())
        results["kinds"], results["default"] = kinds, jax.devices()[0].default_memory().kind
        host = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        results["host"], results["kind"] = host, host.sharding.memory_kind
        results["back"] = jax.device_put(host, x.sharding)
    """),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_the_same_as_plain_jax(door: Door, name: str) -> None:
    proxied, plain = run_beside_plain_jax(door, PROGRAMS[name])
    assert plain.returncode == 0, plain.printed
    assert proxied.returncode == 0, proxied.printed
    assert proxied.results.keys() == plain.results.keys() and plain.results
    for key, value in plain.results.items():
        np.testing.assert_array_equal(proxied.results[key], value, err_msg=key, strict=True)


def test_arrays_are_cut_anew_by_pathways_own_transfers(door: Door) -> None:
    """ReshardArrays, as pathwaysutils asks for it."""
    ended = door.run(
        on_mesh("""
        from jaxlib import _pathways
        y = placed(np.arange(72.0, dtype=np.float32).reshape(24, 3), "a")
        target = NamedSharding(jax.make_mesh((2, 3), ("c", "d"), devices=jax.devices()[:6]), P("d"))
        results["target"] = _pathways._transfer_to_shardings([y], [target], False)[0]
        results["source"] = np.asarray(y)
        turned = NamedSharding(mesh, P(("b", "a"), None))
        results["turned"] = _pathways._transfer_to_shardings([y], [turned], True)[0]
        results["is_deleted"] = y.is_deleted()
        """)
    )
    assert ended.returncode == 0, ended.printed
    for name in ("target", "source", "turned"):
        np.testing.assert_array_equal(ended.results[name], np.arange(72.0).reshape(24, 3), err_msg=name)
    assert ended.results["is_deleted"]  # it was to be donated
    assert "reshard" in door.stats()["calls"]
