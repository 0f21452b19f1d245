"""The speed of what SPMD cannot say."""
