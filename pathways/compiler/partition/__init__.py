"""From a flat program to StableHLO + `mpmd`, through jaxlib's partitioner, and from there to a `LogicalProgram`."""
