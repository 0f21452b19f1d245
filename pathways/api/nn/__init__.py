"""`pw.nn`: parts of neural networks. So far the gates of mixtures of experts.

Everything here is plain JAX. Parameters are dictionaries of arrays, so optax and orbax take them as they are.
"""

from pathways.api.nn.gates import DSelectKGate, Gating, TopKGate

__all__ = ["DSelectKGate", "Gating", "TopKGate"]
