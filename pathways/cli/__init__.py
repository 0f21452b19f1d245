"""The `pathways` command: `up` starts a cluster, `status` shows one, `top` shows it live, `trace` records what it does,
`bench` measures; `clients` shows its clients, `limit` changes what a client may have, `suspend` and `resume` take a
client off the devices and back. `token` makes what other machines, clients and operators come in with.

This room only reads arguments and prints tables; `pathways.cluster` does the work. An error of Pathways ends the
command with status 1 and its message.
"""

from pathways.cli.command import main

__all__ = ["main"]
