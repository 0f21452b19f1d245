"""Trace a user's Python with JAX, partition it with jaxlib's MPMD compiler, lower it to a logical program."""
