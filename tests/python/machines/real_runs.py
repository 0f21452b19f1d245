"""A client whose runs need two machines, again and again: test_machine_records.py starts it, and names the islands. It
prints a line per round; an error, or a wrong value, is none of its affair."""

from __future__ import annotations

import sys

import jax
import numpy as np

import pathways as pw


def main(address: str, here: int, there: int) -> None:
    """Makes transfers, branches, loops, exchanges of rows, puts and reads, until somebody kills it."""
    pw.connect(address).wait_for(4, 60)
    slices = [pw.make_virtual_device_set().add_slice(devices=1, island=island) for island in (here, there)]
    near, far = (pw.jit(lambda x, n=n: x * (n + 2) + 1, devices=each) for n, each in enumerate(slices))
    is_small = pw.jit(lambda x: x.sum() < 1e6, devices=slices[1])

    chain = pw.program(lambda x: far(near(far(x))))
    branch = pw.program(lambda p, x: near(jax.lax.cond(p, near, far, x)))
    decided = pw.program(lambda x: near(jax.lax.cond(is_small(x), near, far, x)))
    loop = pw.program(lambda x: pw.while_loop(is_small, lambda x: far(near(x)), x))
    rows = pw.program(lambda x, to: pw.exchange(x, to, to=slices[1], capacity=8).rows)
    x, to = np.ones(8, np.float32), np.zeros(8, np.int32)
    while True:
        try:
            large = pw.device_put(np.ones(50_000, np.float32), slices[1])
            made = [chain(x), branch(True, x), branch(False, x), decided(x), loop(x), far(large)]
            made.append(rows(pw.device_put(np.ones((8, 3), np.float32), slices[0]), to))
            for each in made:
                np.asarray(each)
            print("done", flush=True)
        except Exception as error:  # of any kind: the machine lies
            print(f"{type(error).__name__}: {str(error)[:200]!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
