"""`pathways proxy`: lets unmodified JAX use a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import os
import tempfile
from typing import TYPE_CHECKING, Any

import click

from pathways import errors
from pathways.cli.clients import named_clusters
from pathways.cli.log_options import log_options
from pathways.cli.running import until_told_to_end
from pathways.cli.text import SIZE
from pathways.process import log_lines
from pathways.process.client_terms import AT_LIMIT, ClientTerms

if TYPE_CHECKING:
    import ssl


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
@click.option("--group", default=None, help="With unix:PATH: users of this group can call there.")
@click.option("--name", default=None, help="What `pathways status` calls the programs.")
@click.option("--weight", type=float, default=None, help="The weight of a program, and the most that it may ask for.")
@click.option("--priority", type=int, default=None, help="Its priority, likewise.")
@click.option("--memory", type=SIZE, default=None, help="What one program may use of each device, as 1GiB.")
@click.option("--runs", type=click.IntRange(1), default=None, help="Runs that one program may have under way.")
@click.option(
    "--at-limit",
    type=click.Choice(AT_LIMIT),
    default=None,
    help="What becomes of work that a program's own arrays leave no room for, if it does not say.",
)
@click.option(
    "--functions",
    is_flag=True,
    help="With --listen: callers may run Python on hosts, as the hosts' user (jax.experimental.colocated_python).",
)
@click.option(
    "--function-seconds",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="So long may a call of a program's Python function on hosts take.",
)
@click.option(
    "--checkpoint-root",
    metavar="FOLDER",
    default=None,
    help="Hosts write and read the files of programs only in this folder (pathwaysutils.persistence). With --listen, "
    "they do so only if it is given, or --functions.",
)
@click.option("--programs", type=click.IntRange(1), default=None, help="So many programs at a time at most.")
@click.option("--until-input-ends", is_flag=True, hidden=True, help="End with standard input: with who started it.")
@log_options
def proxy(
    address: str | None,
    listen: str | None,
    certificate: str | None,
    key: str | None,
    callers: str | None,
    shared_directory: str | None,
    group: str | None,
    functions: bool,
    function_seconds: float,
    checkpoint_root: str | None,
    programs: int | None,
    until_input_ends: bool,
    **terms: Any,
) -> None:
    """Serve XLA's IFRT proxy protocol for the cluster at ADDRESS, in the foreground, until Ctrl-C or SIGTERM.

    A JAX program that does not know of Pathways uses the cluster when it is started with JAX_PLATFORMS=proxy and
    JAX_BACKEND_TARGET=grpc://HOST:PORT. Each of them is a client of the cluster, with its own place in `pathways top`.

    ADDRESS is what `pathways up` printed. When it is not given, that in PATHWAYS_ADDRESS; else this user's cluster on
    this machine.

    Callers are asked for nothing at a Unix socket, nor on the loopback interface, where every user of this machine can
    call. Anywhere else, --certificate, --key and --callers say who may.

    --name to --programs are the terms of all programs that call here. Run a proxy for each tenant, at a socket that no
    other can reach.
    """
    from pathways.api.connect import connect_apart
    from pathways.proxy.cluster_devices import open_session
    from pathways.proxy.limits import Limits
    from pathways.proxy.server import Server
    from pathways.proxy.service import Service
    from pathways.proxy.shared_directory import SharedDirectory
    from pathways.proxy.terms import Allowed

    log_lines.check(os.environ)
    log_lines.begin_in_foreground("proxy")
    number = _group_number(listen, group)
    offered = {what: value for what, value in terms.items() if value is not None}
    checked = ClientTerms.checked(**offered)
    limits = Limits() if programs is None else Limits(sessions=programs)
    if checkpoint_root is not None and not os.path.isabs(checkpoint_root):
        raise errors.OptionError(f"--checkpoint-root {checkpoint_root}: give an absolute path, as the hosts see it")
    is_own = functions or listen is None
    allowed = Allowed(function_seconds if is_own else None, is_own or checkpoint_root is not None, checkpoint_root)
    target = address or _only(named_clusters())
    with contextlib.ExitStack() as stack:
        if listen is None:
            base = tempfile.gettempdir()
            folder = tempfile.TemporaryDirectory(prefix="pathways-proxy-", dir=base if base.islower() else "/tmp")
            listen = f"unix:{stack.enter_context(folder)}/sock"
        if listen != listen.lower():
            raise errors.OptionError(
                f"--listen {listen}: JAX reads JAX_BACKEND_TARGET as if it were in lower case, and would look elsewhere"
            )
        credentials = _credentials(listen, certificate, key, callers)
        # A program would wait for a cluster that is not there, or refuses it.
        connect_apart(target, dataclasses.replace(checked, name="pathways proxy")).close()
        directory = None if shared_directory is None else SharedDirectory(shared_directory)
        service = Service(lambda client: open_session(target, client, offered, allowed), limits, directory)
        stack.enter_context(contextlib.closing(service.reader)).start()
        try:
            server = stack.enter_context(contextlib.closing(Server(service, [listen], credentials)))
            if number is not None:
                os.chown(listen.removeprefix("unix:"), -1, number)
                os.chmod(listen.removeprefix("unix:"), 0o660)
        except OSError as error:
            raise click.ClickException(str(error)) from None
        over = until_told_to_end(until_input_ends)  # before it says that it is there
        where = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{server.ports[0]}"
        click.echo(f"JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://{where}")
        if credentials is None:
            click.echo("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true")
        over.wait()


def _group_number(listen: str | None, group: str | None) -> int | None:
    """The number of a group that may call at a Unix socket.

    Raises:
        OptionError: there is no such group, or no Unix socket.
    """
    if group is None:
        return None
    if listen is None or not listen.startswith("unix:"):
        raise errors.OptionError(f"--group {group} goes with --listen unix:PATH")
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise errors.OptionError(f"--group {group}: this machine has no such group") from None


def _only(addresses: list[str]) -> str:
    if not addresses:
        raise click.ClickException("no cluster of yours runs on this machine; `pathways up` starts one")
    if len(addresses) > 1:
        raise click.ClickException(f"which cluster? Give one of: {', '.join(addresses)}")
    return addresses[0]


def _credentials(listen: str, certificate: str | None, key: str | None, callers: str | None) -> ssl.SSLContext | None:
    """None: the proxy is for this machine only.

    Raises:
        OptionError: other machines could call, and nothing says which may.
    """
    import ssl

    from pathways.cluster.proxy_target import is_of_this_machine

    if certificate is None and key is None and callers is None:
        if not is_of_this_machine(listen):
            raise errors.OptionError(
                f"--listen {listen}: other machines could call there, and run programs on the cluster. Give "
                "--certificate, --key and --callers, or listen at 127.0.0.1 or at unix:PATH"
            )
        return None
    if certificate is None or key is None or callers is None:
        raise errors.OptionError("--certificate, --key and --callers are given together, or none of them")
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=callers)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key, password=lambda: "")  # without one, ssl would ask at the terminal
    except OSError as error:  # of ssl, too
        raise errors.OptionError(f"--certificate, --key or --callers cannot be used: {error}") from None
    return context
