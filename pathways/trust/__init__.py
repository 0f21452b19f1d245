"""Who may come in from another machine, and with what rights: the cluster's authority, tokens, certificates, and the
ports and connections that ask for them.

A token is traded for a certificate at the first contact (`join`). After that, each connection is TLS 1.3, and both ends
show a certificate of the cluster's authority (`Port`, `dial`). docs/security.md is the page for operators.
"""

from pathways.trust.address import Address
from pathways.trust.authority import Authority
from pathways.trust.credentials import Credentials
from pathways.trust.dialing import ask, closed_by_port, dial, dial_answered
from pathways.trust.identity import Identity, Role, check_name, server_name
from pathways.trust.joining import certificate_in, join, renewed_at
from pathways.trust.port import Port
from pathways.trust.renewal import Renewal
from pathways.trust.seals import new_seal_key, seal_cipher
from pathways.trust.tokens import TokenRecord, Tokens, given_token, read_token

__all__ = [
    "Address",
    "Authority",
    "Credentials",
    "Identity",
    "Port",
    "Renewal",
    "Role",
    "TokenRecord",
    "Tokens",
    "ask",
    "certificate_in",
    "check_name",
    "closed_by_port",
    "dial",
    "dial_answered",
    "given_token",
    "join",
    "new_seal_key",
    "read_token",
    "renewed_at",
    "seal_cipher",
    "server_name",
]
