"""The agent of a machine: starts the hosts of an island there, and carries what crosses between machines."""
