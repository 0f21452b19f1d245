"""Loops and branches of JAX that have placed calls inside.

`flatten` meets them. A scan of few iterations is unrolled into the program (`unrolling`); a branch that is known when
the program is traced is taken (`folding` finds out).

Pure: works on jaxprs only.
"""
