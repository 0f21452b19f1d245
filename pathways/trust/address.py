"""The address of a port on a network: `pathways://host:port`. A value; pure, looks nothing up."""

from __future__ import annotations

import dataclasses
import ipaddress
import re

from pathways import errors

_SCHEME = "pathways://"
_EXPECTED = "expected pathways://HOST:PORT, as pathways://node7:7400, pathways://10.0.0.7:7400 or pathways://[::1]:7400"
# Names as resolvers take them. An underscore is no part of a host name, but clusters use it in service names.
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_LONGEST_NAME = 253


@dataclasses.dataclass(frozen=True)
class Address:
    """A host (a name, an IPv4 or an IPv6 address without brackets) and a TCP port. Port 0 is only for listening."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str | Address, *, listens: bool = False) -> Address:
        """The address that a text means, with or without `pathways://`. `listens`: port 0 is allowed, for any free one.

        Raises:
            OptionError: the text is no address.
        """
        if isinstance(text, Address):
            return text
        if not isinstance(text, str):
            raise errors.OptionError(f"{_EXPECTED}; got {text!r:.100}")
        rest = text.strip().removeprefix(_SCHEME).removesuffix("/")
        host, colon, port = rest.rpartition(":")
        if not colon:
            raise errors.OptionError(f"{_EXPECTED}; {text!r:.100} has no port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if not _is_ipv6(host):
                raise errors.OptionError(f"{_EXPECTED}; {host!r:.100} is no IPv6 address")
        elif ":" in host and "/" not in host:
            raise errors.OptionError(f"{_EXPECTED}; an IPv6 address needs brackets, got {text!r:.100}")
        elif not _is_name(host):
            raise errors.OptionError(f"{_EXPECTED}; {host!r:.100} is neither a name nor an IP address")
        least = 0 if listens else 1
        if not re.fullmatch("[0-9]{1,5}", port) or not least <= int(port) <= 65535:
            raise errors.OptionError(f"{_EXPECTED}; a port is a number from {least} to 65535, got {port!r:.100}")
        return cls(host, int(port))

    @property
    def endpoint(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_everywhere(self) -> bool:
        """Whether it stands for all addresses of a machine: who calls from elsewhere needs another one."""
        return self.host in ("0.0.0.0", "::")

    def __str__(self) -> str:
        return _SCHEME + self.endpoint


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]{1,15})?", host) is not None


def _is_name(host: str) -> bool:
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
    return len(host) <= _LONGEST_NAME and _NAME.fullmatch(host) is not None
