"""Primitives that Pathways adds to JAX: transfers, fan-outs, loops with a bound, exchanges of rows, grouped blocks."""
