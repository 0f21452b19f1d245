"""Tokens: who has one may trade it for a certificate of its role, a bounded number of times, until it expires.

The controller takes tokens while `pathways token` makes and revokes them, in another process. Both work on one file in
the authority's folder, under a lock. Any thread may call.

A token's text is `pathways1.<role>.<number>.<secret>.<fingerprint>`. The fingerprint is the authority's, by which who
joins knows the cluster. The file has only a hash of the secret.

CERT-3 (once): a use of a token is counted, on disk, before anything is given for it. One for n uses serves n holders.
CERT-6 (names): a name of a role belongs to the key that had it first, and to the keys of its renewals, until the
operator makes a token for that name. No other key gets a certificate of it; a certificate of its owner before lets
nobody in any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pathways import errors
from pathways.trust.authority import fingerprint_of, load_certificate
from pathways.trust.files import check_private_folder, locked, read_private, write_private
from pathways.trust.identity import TOKEN_PREFIX, Identity, Role, check_name

_FILE, _LOCK = "tokens.json", "tokens.lock"
_VERSION = 1
_TEXT = re.compile(r"pathways1\.(client|host|operator)\.([0-9]{1,9})\.([A-Za-z0-9_-]{43})\.([0-9a-f]{64})")
_LONGEST_FILE = 4096
_LONGEST_TTL_S = 366 * 24 * 3600.0
# How long an expired token stays in the list, and a client's name after its last certificate.
_KEPT_S = 7 * 24 * 3600.0
_MOST_NAMES = 1000  # of clients or operators that came in by one token
_NEW = "make a new one with `pathways token` on the controller's machine"
_BY_ROLE = -1
# A name that is taken gets so many digits of the key behind it; a name has 64 characters at most.
_MORE_OF_NAME = 8
_MOST_OF_NAME = 64 - 1 - _MORE_OF_NAME
_BEARERS = {Role.HOST: "machine", Role.CLIENT: "client", Role.OPERATOR: "operator"}


@dataclasses.dataclass(frozen=True)
class TokenText:
    """The parts of a token's text."""

    role: Role
    number: int
    secret: str = dataclasses.field(repr=False)
    fingerprint: str

    @classmethod
    def parse(cls, text: Any) -> TokenText:
        """Raises:
        PermissionDeniedError: the text is no token. The message does not have the text.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            size = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise errors.PermissionDeniedError(
                f"this is no token: expected pathways1.ROLE.NUMBER.SECRET.FINGERPRINT in one line, got {size}; {_NEW}"
            )
        return cls(Role(match[1]), int(match[2]), match[3], match[4])


@dataclasses.dataclass(frozen=True)
class TokenRecord:
    """What is known of a token. Moments are seconds since the epoch. `uses`: None is without bound. `holders`: who
    used a token with a bound, so that a holder whose connection broke may come again. `name`: the only one that it is
    for, whoever had that name before; empty: any name that is free.
    """

    number: int
    role: Role
    sha256: str = dataclasses.field(repr=False)
    created: float
    expires: float
    uses: int | None
    used: int = 0
    is_revoked: bool = False
    holders: tuple[str, ...] = ()
    name: str = ""

    def state(self, now: float) -> str:
        """ "valid", "revoked", "expired" or "used"."""
        if self.is_revoked:
            return "revoked"
        if now >= self.expires:
            return "expired"
        return "used" if self.uses is not None and self.used >= self.uses else "valid"


@dataclasses.dataclass(frozen=True)
class _Owner:
    """Whose a name is. `keys`: the owner's, and the one before its last renewal, whose answer may be lost. `token`: the
    number of that by which it came in. `seen`: when it last got a certificate, seconds since the epoch. `given`: the
    number of the last token for this name that was traded; 0: there was none.
    """

    keys: tuple[str, ...]
    token: int | None
    seen: float
    given: int = 0


@dataclasses.dataclass
class _State:
    """The file. `next`: the number of the next token; no number comes twice. `revoked`: also of tokens that have left
    the list. `names`: by role and name, "host m0".
    """

    next: int
    tokens: dict[int, TokenRecord]
    revoked: set[int]
    names: dict[str, _Owner]


class Taken(NamedTuple):
    """What a token was taken for."""

    role: Role
    number: int
    name: str


class Tokens:
    """The tokens of the authority in a folder."""

    def __init__(self, folder: str, clock: Callable[[], float] = time.time) -> None:
        """Raises as `Authority.open`, except for the key, which is not read."""
        check_private_folder(folder)
        self._folder = folder
        self._clock = clock
        self._path = os.path.join(folder, _FILE)
        self._fingerprint = fingerprint_of(load_certificate(folder))
        self._seen: tuple[tuple[int, int, int], _State] | None = None  # replaced as a whole

    def make(self, role: Role | str, ttl_s: float, uses: int | None = _BY_ROLE, name: str = "") -> str:
        """A new token's text, which is nowhere else.

        Args:
            role: client, host or operator.
            ttl_s: seconds until it expires.
            uses: how many holders may trade it; None: any number. If not given, one for a host or a name, else any
                number.
            name: the only one that it is for, which is its holder's then, whoever had it before; empty: any free one.

        Raises:
            OptionError: one of them is out of range.
        """
        role = Role.parse(role)
        if role is Role.CONTROLLER:
            raise errors.OptionError("a token is for a client, a host or an operator: no token makes a controller")
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= _LONGEST_TTL_S:
            raise errors.OptionError(f"a token lives for more than 0 s and at most 366 days, got {ttl_s!r:.50} s")
        if uses == _BY_ROLE:
            uses = 1 if role is Role.HOST or name else None
        if uses is not None and (isinstance(uses, bool) or not isinstance(uses, int) or not 1 <= uses <= 1 << 20):
            raise errors.OptionError(f"a token has from 1 to {1 << 20} uses, or None for any number; got {uses!r:.50}")
        if name:
            check_name(name)
        secret, now = secrets.token_urlsafe(32), self._clock()
        with self._changing() as state:
            number = state.next
            state.next += 1
            state.tokens = {each: record for each, record in state.tokens.items() if record.expires + _KEPT_S > now}
            state.tokens[number] = TokenRecord(number, role, _digest(secret), now, now + ttl_s, uses, name=name)
        return f"{TOKEN_PREFIX}{role}.{number}.{secret}.{self._fingerprint}"

    def take(self, text: str, holder: str = "") -> Role:
        """Counts a use of a token. `holder` names who holds what is given for it: the same one comes again for free.

        Raises:
            PermissionDeniedError: it is unknown, expired, used up or revoked, or another cluster's.
        """
        return self.take_for(text, holder).role

    def take_for(self, text: str, holder: str, name: str = "", key: str = "") -> Taken:
        """As `take`, for a name. With a `key`, the name is that key's from now on; CERT-6 says when it may be. If the
        name is another one's, a machine is refused; a client or an operator gets the name with a part of the key.
        """
        token = TokenText.parse(text)
        if token.fingerprint != self._fingerprint:
            raise errors.PermissionDeniedError(
                f"token {token.number} is of another cluster, or of this one before it got a new authority; {_NEW}"
            )
        with self._changing() as state:
            record = state.tokens.get(token.number)
            known = record.sha256 if record else "0" * 64
            if not hmac.compare_digest(known, _digest(token.secret)) or record is None or record.role != token.role:
                raise errors.PermissionDeniedError(f"token {token.number} is unknown to this cluster; {_NEW}")
            now = self._clock()
            what = record.state(now)
            has_come_before = bool(holder) and holder in record.holders
            if what != "valid" and not (what == "used" and has_come_before):
                raise errors.PermissionDeniedError(f"token {token.number} {_reason(record, what, now)}; {_NEW}")
            if record.name and name != record.name:
                raise errors.PermissionDeniedError(
                    f"token {token.number} is for the name {record.name!r} alone; {_NEW}"
                )
            if key:
                name = _claim(state, record, name, key, now, has_come_before)
            if not has_come_before:
                is_bounded = record.uses is not None and bool(holder)
                holders = (*record.holders, holder) if is_bounded else record.holders
                state.tokens[record.number] = dataclasses.replace(record, used=record.used + 1, holders=holders)
        return Taken(record.role, record.number, name)

    def renew(self, identity: Identity, key: str) -> None:
        """The owner of a name has a new key from now on. `belongs` has said that it is the owner."""
        with self._changing() as state:
            name = f"{identity.role} {identity.name}"
            given = state.names[name].given if name in state.names else 0
            state.names[name] = _Owner((identity.key, key), identity.token, self._clock(), given)

    def belongs(self, identity: Identity) -> bool:
        """Whether the name of a certificate is still its key's (CERT-6)."""
        owner = self._cached().names.get(f"{identity.role} {identity.name}")
        return owner is None or identity.key in owner.keys

    def revoke(self, number: int) -> None:
        """Nobody may trade the token any more, and who has a certificate for it gets no new connection with it.

        Raises:
            OptionError: there was no such token.
        """
        with self._changing() as state:
            if not 0 < number < state.next:
                raise errors.OptionError(f"there is no token {number}: `pathways token list` shows them")
            state.revoked.add(number)
            if number in state.tokens:
                state.tokens[number] = dataclasses.replace(state.tokens[number], is_revoked=True)

    def is_revoked(self, number: int | None) -> bool:
        """Whether a token was revoked. None is no token: not revoked."""
        return number is not None and number in self._cached().revoked

    def list(self) -> list[TokenRecord]:
        """All tokens, but those that expired a week ago or earlier."""
        return [record for _, record in sorted(self._read().tokens.items())]

    def _cached(self) -> _State:
        """The state, to read. It reads the file only when it has changed."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return _State(1, {}, set(), {})
        key = (status.st_ino, status.st_mtime_ns, status.st_size)
        seen = self._seen
        if seen is None or seen[0] != key:
            self._seen = seen = (key, self._read())
        return seen[1]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_State]:
        """The state under the lock; what the block changes is written at its end."""
        with locked(os.path.join(self._folder, _LOCK)):
            state = self._read()
            before = _as_json(state)
            yield state
            after = _as_json(state)
            if after != before:
                write_private(self._path, after)

    def _read(self) -> _State:
        try:
            return _from_json(read_private(self._path))
        except FileNotFoundError:
            return _State(1, {}, set(), {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise errors.OptionError(
                f"{self._path} is damaged ({type(error).__name__}): remove it and make new tokens; certificates hold"
            ) from None


def read_token(path: str) -> str:
    """The token in a file, checked for its form only.

    Raises:
        OptionError: the file cannot be read.
        PermissionDeniedError: there is no token in it.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST_FILE)
    except OSError as error:
        raise errors.OptionError(f"the token file {path} cannot be read: {error.strerror}") from None
    text = content.decode("ascii", "replace").strip()
    try:
        TokenText.parse(text)
    except errors.PermissionDeniedError as error:
        raise errors.PermissionDeniedError(f"{path}: {error}") from None
    return text


def given_token(path: str | None, environment: Mapping[str, str]) -> str:
    """The token that a process was given: that in the file `path`, or in the file that PATHWAYS_TOKEN_FILE names; else
    the text in PATHWAYS_TOKEN. Empty: none.

    Raises:
        OptionError, PermissionDeniedError: see `read_token`.
    """
    if path := path or environment.get("PATHWAYS_TOKEN_FILE"):
        return read_token(path)
    return environment.get("PATHWAYS_TOKEN", "").strip()


def _claim(state: _State, record: TokenRecord, name: str, key: str, now: float, has_come_before: bool) -> str:
    """Gives the name to the key. Returns the name that it gets. `has_come_before`: it has used this token already.

    Raises:
        PermissionDeniedError: it is another machine's, or there are too many names.
    """
    _forget_names(state, now)
    owner = state.names.get(f"{record.role} {name}")
    # A token for the name takes it once, and not from who got it by a later one: else who had it before would take it
    # back.
    takes = bool(record.name) and not has_come_before and (owner is None or owner.given <= record.number)
    if owner is not None and key not in owner.keys and not takes:
        if record.role is Role.HOST or record.name:
            raise errors.PermissionDeniedError(
                f"the name {name!r} belongs to another {_BEARERS[record.role]} of this cluster, which has another key: "
                "choose one by --name, or, if this one takes its place, make a token for the name on the controller's "
                f"machine: `pathways token --role {record.role} --name {name}`"
            )
        name = f"{name[:_MOST_OF_NAME]}.{key[:_MORE_OF_NAME]}"
        owner = state.names.get(f"{record.role} {name}")
        if owner is not None and key not in owner.keys:  # a part of a key can be hit by trying many
            raise errors.PermissionDeniedError(
                f"the name that was asked for is taken, and {name!r} as well, by others with other keys: ask for "
                "another name"
            )
    came = sum(each.token == record.number for each in state.names.values())
    if owner is None and record.role is not Role.HOST and came >= _MOST_NAMES:
        raise errors.PermissionDeniedError(
            f"{_MOST_NAMES} names came in by token {record.number}, which is the most for one; {_NEW}"
        )
    keys = owner.keys if owner is not None and key in owner.keys else (key,)
    given = max(record.number if record.name else 0, owner.given if owner is not None else 0)
    state.names[f"{record.role} {name}"] = _Owner(keys, record.number, now, given)
    return name


def _forget_names(state: _State, now: float) -> None:
    """Those whose owner came in by a revoked token, and those of clients and operators that have been away for long: so
    a token for any number of uses does not fill the file. A machine's name stays until the operator gives it away.
    """
    machine, oldest = f"{Role.HOST} ", now - _KEPT_S
    for name, owner in list(state.names.items()):
        if owner.token in state.revoked or (owner.seen < oldest and not name.startswith(machine)):
            del state.names[name]


def is_name_of(got: str, asked: str) -> bool:
    """Whether a cluster gives the name `got` to who asks for `asked`."""
    return (
        got == asked
        or re.fullmatch(re.escape(asked[:_MOST_OF_NAME]) + rf"\.[0-9a-f]{{{_MORE_OF_NAME}}}", got) is not None
    )


def _reason(record: TokenRecord, what: str, now: float) -> str:
    if what == "expired":
        return f"has expired {math.ceil(now - record.expires)} s ago"
    return "was revoked" if what == "revoked" else f"was used {record.used} of {record.uses} times"


def _digest(secret: str) -> str:
    # The secret has 256 random bits: nobody finds it from its hash, and the hash need not be slow.
    return hashlib.sha256(secret.encode("ascii")).hexdigest()


def _as_json(state: _State) -> bytes:
    tokens = [dataclasses.asdict(record) for record in state.tokens.values()]
    content = {"version": _VERSION, "next": state.next, "revoked": sorted(state.revoked), "tokens": tokens}
    content["names"] = {name: dataclasses.asdict(owner) for name, owner in state.names.items()}
    return json.dumps(content, indent=1).encode("ascii")


def _from_json(content: bytes) -> _State:
    read = json.loads(content)
    if read["version"] != _VERSION:
        raise ValueError("another version")
    records = [
        TokenRecord(**{**each, "role": Role(each["role"]), "holders": tuple(each["holders"])})
        for each in read["tokens"]
    ]
    names = {name: _Owner(**{**each, "keys": tuple(each["keys"])}) for name, each in read.get("names", {}).items()}
    numbered = {record.number: record for record in records}
    return _State(int(read["next"]), numbered, set(map(int, read["revoked"])), names)
