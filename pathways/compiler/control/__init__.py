"""Loops and branches of JAX that have placed calls inside.

`inlining` meets them. A scan of few iterations is unrolled into the program (`unrolling`); a branch that is known when
the program is traced is taken (`folding` finds out). All others become control steps. `assembling` compiles the steps
between them and their bodies one by one, and `splicing` makes one program of these parts; `counting` writes out the
body of a scan. The API refuses what hosts do not run yet: loops inside branches, and exchanges.

Pure: works on jaxprs only.
"""
