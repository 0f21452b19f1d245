"""`pathways proxy`: lets unmodified JAX use a cluster."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pathways import errors
from pathways.cli.clients import named_clusters

if TYPE_CHECKING:
    import grpc


@click.command(short_help="Let unmodified JAX use a cluster.")
@click.argument("address", required=False)
@click.option(
    "--listen",
    metavar="WHERE",
    default=None,
    help="HOST:PORT, port 0 for any free one, or unix:PATH; a socket that only this user can reach if not given.",
)
@click.option(
    "--certificate",
    type=click.Path(dir_okay=False, exists=True),
    default=None,
    help="A PEM file with the certificate that callers from other machines check; with --key.",
)
@click.option("--key", type=click.Path(dir_okay=False, exists=True), default=None, help="A PEM file with its key.")
@click.option(
    "--callers",
    type=click.Path(dir_okay=False, exists=True),
    default=None,
    help="A PEM file with the authority whose certificates callers from other machines must show.",
)
@click.option(
    "--shared-directory",
    type=click.Path(file_okay=False, exists=True),
    default=None,
    help="For big arrays of one JAX process on this machine, which names it in "
    "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY.",
)
def proxy(
    address: str | None,
    listen: str | None,
    certificate: str | None,
    key: str | None,
    callers: str | None,
    shared_directory: str | None,
) -> None:
    """Serve XLA's IFRT proxy protocol for the cluster at ADDRESS, in the foreground, until Ctrl-C or SIGTERM.

    A JAX program that does not know of Pathways uses the cluster when it is started with JAX_PLATFORMS=proxy and
    JAX_BACKEND_TARGET=grpc://HOST:PORT. Each of them is a client of the cluster, with its own place in `pathways top`.

    ADDRESS is what `pathways up` printed. When it is not given, that in PATHWAYS_ADDRESS; else this user's cluster on
    this machine.

    Callers are asked for nothing at a Unix socket, nor on the loopback interface, where every user of this machine can
    call. Anywhere else, --certificate, --key and --callers say who may.
    """
    from pathways.proxy.cluster_devices import open_session
    from pathways.proxy.server import Server
    from pathways.proxy.service import Service
    from pathways.proxy.shared_directory import SharedDirectory

    folder = contextlib.ExitStack()
    if listen is None:
        listen = f"unix:{folder.enter_context(tempfile.TemporaryDirectory(prefix='pathways-proxy-'))}/sock"
    target = address or _only(named_clusters())
    credentials = _credentials(listen, certificate, key, callers)
    directory = None if shared_directory is None else SharedDirectory(shared_directory)
    service = Service(lambda client: open_session(target, client), shared_directory=directory)
    try:
        server = Server(service, [listen], credentials)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    where = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{server.ports[0]}"
    click.echo(f"JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://{where}")
    if credentials is None:
        click.echo("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true")
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    with folder, contextlib.closing(server):
        over.wait()


def _only(addresses: list[str]) -> str:
    if not addresses:
        raise click.ClickException("no cluster of yours runs on this machine; `pathways up` starts one")
    if len(addresses) > 1:
        raise click.ClickException(f"which cluster? Give one of: {', '.join(addresses)}")
    return addresses[0]


def _credentials(
    listen: str, certificate: str | None, key: str | None, callers: str | None
) -> grpc.ServerCredentials | None:
    """None: the proxy is for this machine only.

    Raises:
        OptionError: other machines could call, and nothing says which may.
    """
    import grpc

    if certificate is None and key is None and callers is None:
        if not _is_local(listen):
            raise errors.OptionError(
                f"--listen {listen}: other machines could call there, and run programs on the cluster. Give "
                "--certificate, --key and --callers, or listen at 127.0.0.1 or at unix:PATH"
            )
        return None
    if certificate is None or key is None or callers is None:
        raise errors.OptionError("--certificate, --key and --callers are given together, or none of them")
    pair = Path(key).read_bytes(), Path(certificate).read_bytes()
    return grpc.ssl_server_credentials([pair], Path(callers).read_bytes(), require_client_auth=True)


def _is_local(listen: str) -> bool:
    if listen.startswith("unix:"):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
