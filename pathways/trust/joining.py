"""How a machine, a client or an operator comes in: it trades a token for a certificate, and later an old one for a new.

CERT-5 (pinned): a token goes only to who has proved to hold a key of the authority whose fingerprint the token carries.
So who pretends to be the cluster learns nothing.
"""

from __future__ import annotations

import os
import time

from cryptography import x509

from pathways import errors
from pathways.trust.address import Address
from pathways.trust.authority import fingerprint_of
from pathways.trust.credentials import (
    Credentials,
    anonymous_context,
    key_pem,
    load_key,
    new_key,
    new_request,
    unverified_context,
)
from pathways.trust.dialing import ask, call
from pathways.trust.files import check_writable
from pathways.trust.first_line import field, hello
from pathways.trust.identity import Role, check_name
from pathways.trust.tokens import TokenText, is_name_of

_TIMEOUT_S = 10.0
_TRIES = 3


def join(address: Address | str, token: str, name: str, *, key: str = "", timeout_s: float = _TIMEOUT_S) -> Credentials:
    """Trades a token for a certificate of the token's role, at the controller's port.

    Args:
        address: of the controller's port.
        token: its text.
        name: of this machine, client or operator: 1 to 64 letters, digits and `._-`. If a client's or an operator's is
            taken, the certificate has it with a part of the key.
        key: that of an earlier certificate, as PEM, to which the name may belong; empty: a new one.
        timeout_s: seconds for each of the two connections.

    Raises:
        ConnectError: there is no connection to be had, or another cluster answers.
        PermissionDeniedError: the token is no good, or the name is another machine's.
        OptionError: the name or the address is none.
    """
    where, parsed = Address.parse(address), TokenText.parse(token)
    check_name(name)
    sock, answer = call(where, unverified_context(), Role.CONTROLLER, hello("authority", {}), timeout_s)
    sock.close()
    authority = _checked_authority(field(answer, "authority"), parsed, where)
    own = load_key(key) if key else new_key()
    line = hello("join", {"token": token, "name": name, "request": new_request(own)})
    for left in reversed(range(_TRIES)):
        try:
            sock, answer = call(where, anonymous_context(authority), Role.CONTROLLER, line, timeout_s)
            sock.close()
            break
        except errors.ConnectError:
            # The use of the token may be counted, and the answer lost. The cluster lets the same key come again.
            if not left:
                raise
            time.sleep(0.1)
    credentials = Credentials.of(field(answer, "certificate"), key_pem(own).decode("ascii"))
    is_ours = credentials.role == parsed.role and is_name_of(credentials.name, name)
    if credentials.fingerprint != parsed.fingerprint or not is_ours:
        raise errors.ConnectError(f"{where.endpoint} gave a certificate that was not asked for")
    return credentials


def certificate_in(path: str, address: Address | str, token: str, name: str, role: str) -> Credentials:
    """The certificate in a file: the one that is there, if it is still good, or one for the token, which is kept there.

    Args:
        path: of the file, which only this user can read.
        address: of the controller's port.
        token: its text; empty: the certificate in the file is good.
        name: see `join`.
        role: what the token should be for, for people.

    Raises:
        PermissionDeniedError: there is neither a token nor a good certificate.
        OptionError: no file can be written there; the token was not used. And all that `join` raises.
    """
    wanted = TokenText.parse(token) if token else None
    key = ""
    if os.path.exists(path):
        there = Credentials.load(path)
        if wanted is not None and there.fingerprint == wanted.fingerprint:
            key = there.key  # the name belongs to it
        is_of_token = wanted is None or (there.identity.token, there.fingerprint) == (wanted.number, wanted.fingerprint)
        if is_of_token and is_name_of(there.name, name) and not there.is_expired:
            return there
    if not token:
        raise errors.PermissionDeniedError(
            f"there is no token, and no good certificate in {path}: set PATHWAYS_TOKEN_FILE to a file with what "
            f"`pathways token --role {role}` printed on the controller's machine, or PATHWAYS_TOKEN to that text"
        )
    check_writable(path)  # before a token that can be used once is used
    got = join(address, token, name, key=key)
    got.save(path)
    return got


def renewed_at(address: Address | str, credentials: Credentials, *, timeout_s: float = _TIMEOUT_S) -> Credentials:
    """The same identity with a new key and a new life, from the controller's port. Raises as `dial`."""
    key = new_key()
    answer = ask(address, credentials, "renew", timeout_s=timeout_s, request=new_request(key))
    renewed = Credentials.of(field(answer, "certificate"), key_pem(key).decode("ascii"))
    if renewed.fingerprint != credentials.fingerprint or (renewed.role, renewed.name) != (
        credentials.role,
        credentials.name,
    ):
        raise errors.ConnectError(f"{Address.parse(address).endpoint} gave a certificate that was not asked for")
    return renewed


def _checked_authority(pem: str, token: TokenText, where: Address) -> str:
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode("ascii"))
    except ValueError:
        raise errors.ConnectError(f"what answers at {where.endpoint} is no port of Pathways") from None
    if fingerprint_of(certificate) != token.fingerprint:
        raise errors.ConnectError(
            f"the cluster at {where.endpoint} is not the one that token {token.number} is for; nothing was sent to it. "
            "Is the address right? If the cluster was made anew, make a new token with `pathways token`"
        )
    return pem
