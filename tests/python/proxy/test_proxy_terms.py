"""Who the programs of a proxy are: its operator says on which terms they use the cluster."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from control_clusters import eventually
from doors import Wire, start
from stock_clients import serving

import pathways as pw
from pathways.cli import main
from pathways.cluster.operator import look
from pathways.process.client_terms import ClientTerms
from pathways.proxy.errors import Code
from pathways.proxy.service import Client
from pathways.proxy.terms import terms_of
from pathways.proxy.versions import Version

MIB = 1 << 20


def client(**said: Any) -> Client:
    return Client("there", Version(25, 3), said)


@pytest.mark.parametrize(
    ("offered", "asked", "granted"),
    [
        ({}, {}, ClientTerms(name="JAX at there")),
        ({}, {"name": "bob", "weight": 3.0}, ClientTerms(name="bob", weight=3)),
        ({"name": "alice", "weight": 2.0, "memory": MIB}, {}, ClientTerms(name="alice", weight=2, memory=MIB)),
        ({"name": "alice"}, {"name": "root", "runs": 4}, ClientTerms(name="alice", runs=4)),
        ({"weight": 2.0, "runs": 8}, {"weight": 0.5, "runs": 8}, ClientTerms(name="JAX at there", weight=0.5, runs=8)),
        ({"at_limit": "wait"}, {"at_limit": "error"}, ClientTerms(name="JAX at there")),
        ({"at_limit": "wait"}, {}, ClientTerms(name="JAX at there", at_limit="wait")),
    ],
)
def test_what_a_program_gets(offered: dict[str, Any], asked: dict[str, Any], granted: ClientTerms) -> None:
    assert terms_of(client(**asked), offered) == granted


@pytest.mark.parametrize(
    ("offered", "asked", "words"),
    [
        ({"weight": 2.0}, {"weight": 2.5}, r"weight=2.0 at most, and it asks for weight=2\.5"),
        ({"priority": -1}, {"priority": 0}, "priority=-1 at most"),
        ({"memory": MIB}, {"memory": MIB + 1}, "memory=1048576 at most, and it asks for memory=1048577"),
        ({"runs": 8}, {"runs": 9}, "runs=8 at most"),
        ({"weight": 2.0}, {"weight": "2"}, "a number from"),
        ({}, {"memory": 0}, "a number of bytes"),
    ],
)
def test_what_a_program_does_not_get(offered: dict[str, Any], asked: dict[str, Any], words: str) -> None:
    with pytest.raises(pw.errors.OptionError, match=words):
        terms_of(client(**asked), offered)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=1)) as made:
        yield made


def test_programs_of_a_tenant(cluster: Any, tmp_path: Path) -> None:
    terms = ["--name", "alice", "--weight", "2", "--memory", "32MiB", "--runs", "7", "--programs", "1"]
    own_group = grp.getgrgid(os.getgid()).gr_name
    socket = tmp_path / "alice"
    with serving(cluster.address, "--listen", f"unix:{socket}", "--group", own_group, *terms) as variables:
        assert stat.S_IMODE(socket.stat().st_mode) == 0o660 and socket.stat().st_gid == os.getgid()
        program = """
        print(error_of(lambda: jnp.zeros(16 << 20).block_until_ready()), flush=True)
        import time; time.sleep(600)
        """
        first = start(program, **variables)
        try:
            assert first.stdout is not None
            said = next(line for line in first.stdout if "Error: " in line or "no error" in line)
            assert "RESOURCE_EXHAUSTED" in said
            (known,) = [each for each in look(cluster.address).clients if each.name == "alice"]
            assert (known.limits.weight, known.limits.memory, known.limits.runs) == (2, 32 * MIB, 7)
            assert refusal(socket) == (Code.RESOURCE_EXHAUSTED, "this proxy has 1 clients, which is its limit")
        finally:
            first.kill()
            first.communicate()
        eventually(lambda: len(look(cluster.address).clients) == 1, "the first program is gone")
        code, text = refusal(socket, weight=3.0)
        assert code is Code.INVALID_ARGUMENT and "gives a program weight=2.0 at most" in text


def refusal(socket: Path, **said: Any) -> tuple[Code, str]:
    """What a program is told that may not begin."""
    wire = Wire(SimpleNamespace(target=f"unix:{socket}"), said=said)  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as refused:
        wire.begin()
    wire.close()
    return Code(refused.value.code().value[0]), refused.value.details()


def test_options_that_make_no_sense() -> None:
    for options, words in (
        (["--weight", "-1"], "a number from"),
        (["--group", "root"], "goes with --listen unix:PATH"),
        (["--group", "root", "--listen", "127.0.0.1:0"], "goes with --listen unix:PATH"),
        (["--group", "nobody-has-this", "--listen", "unix:/nowhere/x"], "no such group"),
    ):
        refused = CliRunner().invoke(main, ["proxy", "unix:/nowhere", *options])
        assert refused.exit_code != 0 and words in refused.output, refused.output
