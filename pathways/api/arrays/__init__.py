"""`pw.Array` and `pw.Variable`: how they come to a slice and back, and how JAX and NumPy use them."""
