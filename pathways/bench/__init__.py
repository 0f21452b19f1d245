"""`pathways bench`: what the runtime costs, measured beside its rivals.

The room has three instruments, each a module with its own command:

- ``dispatch``: the paper's Figure 5. Every system runs the same JAX function; runs are interleaved.
- ``scale``: the control path over modelled devices, up to 65,536 shards and 16,384 hosts.
- ``micro``: single costs: a future, a ring hop, a call, a plan, a transfer.

Nothing here is imported by the runtime, and importing it starts no work.
"""
