"""The resource manager, the host process, cluster launchers, and the side of a run that faces XLA."""
