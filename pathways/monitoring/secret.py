"""The secret of a port on this machine: every user of the machine can call there, and only who knows it gets an answer.

It is new with each start, unless it lies in a file, which programs such as Prometheus read, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat

from pathways import errors

_BYTES = 24
_LEAST_CHARS = 16


def new_secret() -> str:
    """A secret that nobody guesses."""
    return secrets.token_urlsafe(_BYTES)


def secret_in(path: str) -> str:
    """The secret in a file; the file is made, with mode 0600, if it is not there. A group may be let read it.

    Raises:
        OptionError: it cannot be made or read, or holds no secret.
        PermissionDeniedError: it is another user's, or others may read it.
    """
    try:
        with (
            contextlib.suppress(FileExistsError),
            open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
        ):
            file.write(new_secret())
        with open(path, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            text = file.read(1024).strip()
    except OSError as error:
        raise errors.OptionError(f"the secret cannot be kept in {path}: {error.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o027:
        raise errors.PermissionDeniedError(
            f"{path} (user {status.st_uid}, mode {mode:o}) holds a secret: it must belong to user {os.geteuid()}, and "
            f"others may not read it, nor a group change it: see who has read it, remove it, and start again"
        )
    if not re.fullmatch(f"[A-Za-z0-9._~+/=-]{{{_LEAST_CHARS},}}", text):
        raise errors.OptionError(
            f"{path} holds no secret: expected one line of at least {_LEAST_CHARS} letters, digits or ._~+/=-; remove "
            "it, and one is made"
        )
    return text
