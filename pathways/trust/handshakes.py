"""What went wrong in a TLS handshake, in words, for the end that listens and for the end that calls. Pure."""

from __future__ import annotations

import ssl

from pathways import errors

# Codes of X509_verify_cert (openssl's x509_vfy.h).
_NOT_YET_VALID, _EXPIRED, _HOST_NAME = 9, 10, 62
_FOREIGN = (7, 18, 19, 20, 21)

_JOIN_AGAIN = "join again with a new token (`pathways token`)"


def describe_handshake_error(error: OSError) -> str:
    """Why the listening end did not finish a handshake; the caller's fault, as a clause behind its address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _FOREIGN:
            return "showed a certificate of another cluster's authority"
        if error.verify_code == _EXPIRED:
            return f"showed a certificate that has expired; it must {_JOIN_AGAIN}"
        if error.verify_code == _NOT_YET_VALID:
            return "showed a certificate that is not valid yet; the clocks of the two machines differ by minutes"
        return f"showed a certificate that does not hold: {error.verify_message}"
    reason = getattr(error, "reason", None) or ""
    if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason or "CERTIFICATE_UNKNOWN" in reason:
        return "does not accept this cluster's certificate: it holds another cluster's, or expects another role here"
    if "CERTIFICATE_EXPIRED" in reason:
        return "finds this cluster's certificate expired: look at the clocks of both machines"
    if reason in ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "TLSV1_ALERT_PROTOCOL_VERSION"):
        return "does not speak TLS 1.3"
    if isinstance(error, TimeoutError):
        return "did not finish the handshake and its first line in time"
    if isinstance(error, ssl.SSLEOFError | ConnectionError) or not reason:
        return "broke off during the handshake"
    return f"does not speak TLS as expected ({reason.lower().replace('_', ' ')})"


def fault_of_listener(error: OSError, where: str) -> errors.PathwaysError:
    """The error of a caller, when the handshake failed, or when the other end ended the connection right after it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _FOREIGN:
            return errors.ConnectError(
                f"what answers at {where} is not of this cluster: its certificate is another authority's. Is the "
                f"address right? If the cluster was made anew, {_JOIN_AGAIN}"
            )
        if error.verify_code == _HOST_NAME:
            return errors.ConnectError(
                f"what answers at {where} is of this cluster, but has another role: is the address right?"
            )
        if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
            return errors.ConnectError(
                f"the certificate of {where} is not valid now ({error.verify_message}): look at the clocks of "
                "both machines"
            )
        return errors.ConnectError(f"the certificate of {where} does not hold: {error.verify_message}")
    reason = getattr(error, "reason", None) or ""
    if "UNKNOWN_CA" in reason:
        return errors.PermissionDeniedError(
            f"the cluster at {where} does not accept this certificate: it is another authority's; {_JOIN_AGAIN}"
        )
    if "CERTIFICATE_EXPIRED" in reason:
        return errors.PermissionDeniedError(f"the cluster at {where} finds this certificate expired: {_JOIN_AGAIN}")
    if "BAD_CERTIFICATE" in reason or "CERTIFICATE_UNKNOWN" in reason:
        return errors.PermissionDeniedError(f"the cluster at {where} does not accept this certificate: {_JOIN_AGAIN}")
    if "CERTIFICATE_REQUIRED" in reason:
        return errors.PermissionDeniedError(f"the cluster at {where} wants a certificate: {_JOIN_AGAIN}")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return errors.ConnectError(
            f"what answers at {where} does not speak TLS: it is no port of Pathways, or one with --insecure-plaintext"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"):
        return errors.ConnectError(f"what answers at {where} does not speak TLS 1.3: it is no port of Pathways")
    if isinstance(error, TimeoutError):
        return errors.ConnectError(
            f"{where} took the connection and then said nothing: is it a port of Pathways, and does a firewall let "
            "both directions through?"
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        return errors.ConnectError(
            f"{where} closed the connection before it answered: it is no port of Pathways, or has too many "
            "callers; try again"
        )
    return errors.ConnectError(f"the connection to {where} failed: {reason or error.strerror or error}")
