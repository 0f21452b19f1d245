"""Checkpoints with orbax."""
