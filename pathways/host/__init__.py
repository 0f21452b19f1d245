"""The host process: everything between the native executor and JAX."""
