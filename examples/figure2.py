"""Figure 2 of the Pathways paper (arXiv 2203.12533), nearly as printed.

    python examples/figure2.py [--cluster embedded|local|ADDRESS]

Three functions, each compiled for two virtual devices of its own; Pathways moves the values between them. Without
the tracer every call is a dispatch of its own, four in all; with `pw.program` the whole of `f` is one.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy
from jax.sharding import PartitionSpec as P
from target import add_cluster_option, cluster_target

import pathways as pw


def get_devices(n: int) -> Any:
    """Allocate `n` virtual devices on an island."""
    device_set = pw.make_virtual_device_set()
    return device_set.add_slice(shape=(n,), axis_names=("x",))


def run(cluster: Any) -> None:
    """Run the program of the figure without the tracer, then with it."""
    a = pw.jit(lambda x: x * 2.0, devices=get_devices(2), in_shardings=P("x"), out_shardings=P("x"), name="a")
    b = pw.jit(lambda x: x + 1.0, devices=get_devices(2), in_shardings=P("x"), out_shardings=P("x"), name="b")
    c = pw.jit(lambda x: x / 2.0, devices=get_devices(2), in_shardings=P("x"), out_shardings=P("x"), name="c")

    def f(v: Any) -> Any:
        x = a(v)
        y = b(x)
        z = a(c(x))
        return (y, z)

    for how, function in (("without the tracer", f), ("with pw.program", pw.program(f))):
        before = cluster.stats()["dispatches"]
        y, z = function(numpy.array([1.0, 2.0]))
        output = (numpy.asarray(y).tolist(), numpy.asarray(z).tolist())
        print(f"{how}: {output}, dispatches: {cluster.stats()['dispatches'] - before}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Figure 2 of the Pathways paper.")
    add_cluster_option(parser)
    with pw.connect(cluster_target(parser.parse_args().cluster)) as cluster:
        run(cluster)


if __name__ == "__main__":
    main()
