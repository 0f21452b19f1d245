"""The process of a proxy beside another one: a controller's, or the program's that uses it. It ends with that one."""

from __future__ import annotations

from pathways.cluster.beside_process import BesideProcess


class ProxyProcess(BesideProcess):
    """A `pathways proxy` for programs of this machine. `variables` are those that a program of JAX is started with."""

    def __init__(
        self,
        address: str | None,
        listen: str | None = None,
        shared_directory: str | None = None,
        checkpoint_root: str | None = None,
    ) -> None:
        """Waits until it listens.

        Args:
            address: of the cluster; this user's cluster on this machine when None.
            listen: HOST:PORT, or unix:PATH; a socket that only this user can reach when None.
            shared_directory: for the large arrays of one program.
            checkpoint_root: the only folder in which programs may have hosts write and read files.

        Raises:
            ConnectError: it did not start; with what it said.
        """
        arguments = [address] if address else []
        arguments += ["--listen", listen] if listen else []
        arguments += ["--shared-directory", shared_directory] if shared_directory else []
        arguments += ["--checkpoint-root", checkpoint_root] if checkpoint_root else []
        super().__init__("proxy", arguments, 2)
        self.variables = dict(word.split("=", 1) for line in self.lines for word in line.split())
