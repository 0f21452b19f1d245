"""Benchmarks: the paper's figures, rivals, and what only this repository measures. README.md says how to run them."""
