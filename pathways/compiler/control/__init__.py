"""Loops and branches of JAX that have placed calls inside.

`inlining` meets them. A scan of few iterations is unrolled into the program (`unrolling`); a branch that is known when
the program is traced is taken (`folding` finds out); a `pw.while_loop` is opened into JAX's (`compiler.loops`). All
others become control steps. `assembling` compiles the steps between them and their bodies one by one, and `splicing`
makes one program of these parts; `counting` writes out the body of a scan. A branch with a loop or an exchange inside
becomes loops of at most one iteration.

Pure: works on jaxprs only.
"""
