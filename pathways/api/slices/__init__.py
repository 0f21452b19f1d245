"""Virtual devices, and how a slice moves or gets another shape."""
