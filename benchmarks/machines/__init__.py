"""Calls and transfers between machines, which agents stand for."""
