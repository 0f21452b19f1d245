"""Who does the same work without Pathways, beside plain JAX."""
