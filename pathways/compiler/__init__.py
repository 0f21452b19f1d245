"""Traces a user's Python with JAX, partitions it with jaxlib's MPMD compiler, lowers it to a logical program.

The steps, in order: `placed` tags functions, `trace` runs the user's Python once, `flatten` reads the jaxpr,
`schedule` puts the steps of a pipeline in order, `emit` writes StableHLO + `mpmd`, `pipeline` sends it through jaxlib's
compiler, `lower` reads the result into a `LogicalProgram`, `donation` decides which inputs each node may overwrite. No
step needs a device or initialises a backend.

`partition/` is what goes through jaxlib's compiler, `added_primitives/` what Pathways adds to JAX, `schedule/` the
order of pipelines, `control/` the bodies of loops and branches and the cuts at exchanges.
"""
