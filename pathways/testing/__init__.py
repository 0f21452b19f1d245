"""Doubles that measure or provoke: never used unless a test or a benchmark asks for them."""
