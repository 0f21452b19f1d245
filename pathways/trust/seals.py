"""The keys and the cipher of a link that a relay carries: AES-256-GCM (CARRY-1). Each end counts the messages of each
direction; the number is the nonce, so a key is for one direction of one link. `csrc/bind/relays.cc` calls the cipher.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def new_seal_key() -> str:
    """A key of 256 bits, as text. It goes to the machine over TLS, and nowhere else."""
    return AESGCM.generate_key(256).hex()


def seal_cipher(key: str) -> AESGCM:
    """The cipher of a key."""
    return AESGCM(bytes.fromhex(key))
