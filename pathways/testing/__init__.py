"""Test doubles, to measure or to provoke faults. Nothing uses them unless a test or a benchmark asks for them."""
