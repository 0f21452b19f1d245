"""`pathways bench`: what the runtime costs, measured beside plain JAX; and the harness of all benches.

Four instruments, each a module with its own command:

- ``dispatch``: the paper's Figure 5. Every system runs the same JAX function; runs are interleaved.
- ``transfer``: bytes between two host processes.
- ``proxy``: programs of plain JAX by the proxy: steps, puts, gets.
- ``micro``: single costs: a future, a ring hop, a call, a plan, a transfer.

The harness, which the benches of the repository's folder ``benchmarks`` use, too: ``command`` (settings are options,
a report is shown and written), ``turns`` and ``processes`` (systems in processes of their own), ``stats``, ``goals``,
``report``, ``plot``, ``machine``.

Nothing here is imported by the runtime, and importing it starts no work.
"""
