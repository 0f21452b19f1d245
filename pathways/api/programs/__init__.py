"""`pw.jit` and `pw.program`: from a user's Python to one message per call."""
