"""The process that reads modules of clients: what is malformed ends that process at most, and then the request that
brought it is refused (FAULT-1)."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways import _jaxlib
from pathways.proxy.errors import Refused
from pathways.proxy.module_reader import ModuleReader

MPMD = """
func.func public @main(%a: !mpmd.mesh_tensor<"m", tensor<4x8xf32>>) -> !mpmd.mesh_tensor<"m", tensor<4x8xf32>>
    attributes {topology = #mpmd.topology<<"m" : <["x"=2, "y"=2]>>>} {
  %0 = mpmd.fragment_call<mesh="m", origin=[]> @double(%a)
    : (!mpmd.mesh_tensor<"m", tensor<4x8xf32>>) -> !mpmd.mesh_tensor<"m", tensor<4x8xf32>>
  return %0 : !mpmd.mesh_tensor<"m", tensor<4x8xf32>>
}
func.func @double(%a: tensor<4x8xf32>) -> tensor<4x8xf32> attributes {mesh_shape = #sdy.mesh<["x"=2, "y"=2]>} {
  %0 = stablehlo.add %a, %a : tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}
"""
#: Calls of `module.mutated` per kind of module.
MUTATIONS = int(os.environ.get("PATHWAYS_MUTATIONS", "15"))


@pytest.fixture(scope="module")
def reader() -> Iterator[ModuleReader]:
    made = ModuleReader()
    yield made
    made.close()


def stablehlo() -> bytes:
    lowered = jax.jit(lambda x, y: (x @ y, jnp.sum(x))).lower(np.ones((4, 8), "f"), np.ones((8, 2), "f"))
    return _jaxlib.portable_bytecode(lowered.compiler_ir("stablehlo"))


def ifrt_ir() -> bytes:
    with _jaxlib.mlir_context():
        module = _jaxlib.parse(MPMD)
        _jaxlib.lower_to_ifrt(module)
        written = io.BytesIO()
        module.operation.write_bytecode(written)
    return written.getvalue()


def test_modules_are_read(reader: ModuleReader) -> None:
    module, parameter_layouts, result_layouts = reader.stablehlo(stablehlo())
    assert [shape for shape, _ in module.parameters] == [(4, 8), (8, 2)] and not parameter_layouts + result_layouts
    assert module.results == (((4, 2), np.dtype("float32")), ((), np.dtype("float32")))
    program, modules = reader.ifrt_ir(ifrt_ir())
    (step,) = program.steps
    assert program.arguments == 1 and program.results == step.outputs and step.devices == (0, 1, 2, 3)
    assert modules[step.program].parameters == (((4, 8), np.dtype("float32")),)


def test_what_cannot_be_read(reader: ModuleReader) -> None:
    for read in (reader.stablehlo, reader.ifrt_ir):
        for data in (b"", b"nonsense", b"ML\xefR", stablehlo()[:100], ifrt_ir()[:200]):
            with pytest.raises((ValueError, Refused)):
                read(data)
    with pytest.raises(ValueError, match=r"ifrt\.function"):
        reader.ifrt_ir(b"func.func @main() { return }")


def test_its_process_is_lost(reader: ModuleReader) -> None:
    reader.start()
    process = reader._process
    assert process is not None
    process.kill()
    process.wait()
    assert reader.stablehlo(stablehlo())[0].name


@pytest.mark.parametrize("kind", ["stablehlo", "ifrt_ir"])
def test_mutated_modules(reader: ModuleReader, kind: str) -> None:
    seed = int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"PATHWAYS_SEED={seed}")
    generator, whole = random.Random(seed), {"stablehlo": stablehlo, "ifrt_ir": ifrt_ir}[kind]()
    read = getattr(reader, kind)
    ended = refused = 0
    for _ in range(MUTATIONS):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 5))):
            at = generator.randrange(len(data))
            data[at : at + generator.choice((0, 1, 1, 1, 4))] = generator.randbytes(generator.choice((0, 1, 1, 1, 4)))
        try:
            read(bytes(data))
        except Refused:
            ended += 1
        except (ValueError, NotImplementedError):
            refused += 1
    print(f"{MUTATIONS} mutated: {refused} refused, {ended} ended the process that read them")
    assert read(whole)


def test_a_module_that_takes_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some bytes are read for ever. The kernel ends that."""
    slow = (
        "import pathways._jaxlib.door as door\ndef forever(data):\n    while True: pass\ndoor.signature_of = forever\n"
    )
    (tmp_path / "sitecustomize.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reader = ModuleReader()
    try:
        with pytest.raises(Refused, match="took more than 5 s"):
            reader.stablehlo(stablehlo())
        monkeypatch.delenv("PYTHONPATH")
        assert reader.stablehlo(stablehlo())[0].name
    finally:
        reader.close()
