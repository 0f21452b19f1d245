"""`pw.nn`: parts of neural networks: mixtures of experts, and their gates.

Gates are plain JAX; a mixture is called in a program. Parameters are dictionaries of arrays, so optax and orbax take
them as they are.
"""

from pathways.api.nn.gates import DSelectKGate, Gating, TopKGate
from pathways.api.nn.mixture import Mixed, MixtureOfExperts

__all__ = ["DSelectKGate", "Gating", "Mixed", "MixtureOfExperts", "TopKGate"]
