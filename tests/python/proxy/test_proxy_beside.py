"""A proxy beside a controller (`pathways up --proxy`), and beside a program (`pathways.initialize`)."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from control_clusters import eventually
from doors import Door
from stock_clients import environment, serving

import pathways as pw
from pathways import _jaxlib
from pathways._jaxlib import proxy_messages
from pathways.cluster.operator import look
from pathways.cluster.proxy_process import ProxyProcess
from pathways.cluster.proxy_target import ProxyTarget
from pathways.proxy.server import Server
from pathways.proxy.service import Client, Service

PROGRAM = """
import sys
import pathways
target = pathways.initialize(*sys.argv[1:])
import jax, jax.numpy as jnp
assert jax.devices()[0].platform == "cpu" and jax.devices()[0].slice_index == 0
assert float((jnp.arange(8.0) * 2).sum()) == 56
assert pathways.initialize(*sys.argv[1:]) == target
try:
    pathways.initialize("127.0.0.1:1")
except pathways.errors.ConnectError as error:
    assert "before the first jax.devices()" in str(error), error
    print(target)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=1, devices_per_host=2)) as made:
        yield made


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process's JAX had no devices yet."""
    monkeypatch.setattr(_jaxlib, "initialized_backends", lambda: ())


def run(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment(variables),
        stdout=subprocess.PIPE,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0
    return done.stdout.strip()


def test_a_program_calls_a_proxy(cluster: Any) -> None:
    with serving(cluster.address, "--listen", "127.0.0.1:0") as variables:
        target = variables["JAX_BACKEND_TARGET"]
        where = target.removeprefix("grpc://")
        assert run(target, PATHWAYS_PROXY="127.0.0.1:1") == target
        assert run(PATHWAYS_PROXY=where, PATHWAYS_ADDRESS="unix:/nowhere", JAX_PLATFORMS="cpu") == target


def test_a_program_starts_a_proxy_of_its_own(cluster: Any) -> None:
    before = look(cluster.address).controller.live_bytes
    path = run(PATHWAYS_ADDRESS=cluster.address).removeprefix("grpc://unix:")
    eventually(lambda: not Path(path).parent.exists(), "its proxy has ended")
    eventually(lambda: len(look(cluster.address).clients) == 1, "it is no client any more")
    assert look(cluster.address).controller.live_bytes == before


def test_a_proxy_beside_a_controller(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pathways", "up", "--proxy", "0", "--checkpoint-root", f"{tmp_path}/{{client}}"]
    with subprocess.Popen(command, env=environment({}), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("unix:")
            words = process.stdout.readline().split()
            variables = dict(word.split("=", 1) for word in words)
            target = variables["JAX_BACKEND_TARGET"]
            assert re.fullmatch(r"grpc://127\.0\.0\.1:\d+", target) and len(variables) == 3
            assert run(target) == target
            (served,) = [each for each in psutil.Process(process.pid).children() if "proxy" in each.cmdline()]
            assert served.cmdline()[-2:] == ["--checkpoint-root", str(tmp_path)], "its programs may have files there"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    host, port = target.removeprefix("grpc://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_a_proxy_that_does_not_start(cluster: Any) -> None:
    for address, listen, words in (
        ("unix:/nowhere", None, "no cluster listens at unix:/nowhere"),
        (cluster.address, "0.0.0.0:0", "other machines could call there"),
        (cluster.address, "unix:/tmp/Capital", "in lower case"),
        (cluster.address, "unix:/nowhere/at/all", "cannot listen"),
    ):
        with pytest.raises(pw.errors.ConnectError, match=words):
            ProxyProcess(address, listen)


def test_a_proxy_process_ends_with_its_owner(cluster: Any) -> None:
    program = f"""
import os, signal
from pathways.cluster.proxy_process import ProxyProcess
print(ProxyProcess({cluster.address!r}).variables["JAX_BACKEND_TARGET"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=150)
    path = Path(done.stdout.strip().removeprefix("grpc://unix:"))
    assert done.returncode == -signal.SIGKILL and path.name == "sock"
    eventually(lambda: not path.parent.exists(), "it has ended")


class NoProxy(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.usefixtures("unused")
def test_nobody_or_somebody_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    with http.server.HTTPServer(("127.0.0.1", 0), NoProxy) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        for address, words in (
            (f"127.0.0.1:{free}", "no proxy answers at"),
            ("grpc://unix:/nowhere/sock", "no proxy answers at unix:/nowhere/sock"),
            (f"127.0.0.1:{other.server_port}", "no proxy answers at|is no proxy"),
            ("127.0.0.1", "expected the address of a proxy"),
            ("https://there:80", "expected the address of a proxy"),
            ("unix:/nowhere/control.sock", "no cluster listens at"),
        ):
            with pytest.raises(pw.errors.ConnectError, match=words):
                pw.initialize(address)
        other.shutdown()
    assert "JAX_BACKEND_TARGET" not in os.environ


@pytest.mark.usefixtures("unused")
def test_no_version_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door()
    try:
        ProxyTarget(door.target).check()
        monkeypatch.setattr(proxy_messages, "PROTOCOLS", (26, 30))
        with pytest.raises(pw.errors.UnsupportedVersionError, match=r"install JAX 0\.10\.2 to"):
            pw.initialize(door.target)
    finally:
        door.close()


@pytest.mark.usefixtures("unused")
def test_a_proxy_that_refuses_the_program() -> None:
    def refuse(client: Client) -> Any:
        raise pw.errors.PermissionDeniedError("not you")

    with (
        contextlib.closing(Server(Service(refuse), ["127.0.0.1:0"])) as server,
        pytest.raises(pw.errors.ConnectError, match="refuses this program: not you"),
    ):
        pw.initialize(f"127.0.0.1:{server.ports[0]}")


def test_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", raising=False)
    for address, text, is_insecure in (
        ("grpc://unix:/a/b", "grpc://unix:/a/b", True),
        ("[::1]:80", "grpc://[::1]:80", True),
        ("localhost:80", "grpc://localhost:80", True),
        ("10.0.0.1:80", "grpc://10.0.0.1:80", False),
    ):
        assert (ProxyTarget.parse(address).text, ProxyTarget.parse(address).is_insecure) == (text, is_insecure)
    monkeypatch.setenv("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", "true")
    assert ProxyTarget.parse("10.0.0.1:80").is_insecure
    clusters = ("pathways://head:7000", "unix:/a/control.sock", f"unix:{tmp_path}")
    assert all(ProxyTarget.is_of_cluster(each) for each in clusters)
    assert not any(ProxyTarget.is_of_cluster(each) for each in ("unix:/a/sock", "head:7000", "grpc://head:7000"))
