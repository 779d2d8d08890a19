"""The gate: from an Authorization header to a Caller. The one check of tokens, for every protocol. Event loop only.

Tokens are compared as digests, all of them and each in constant time. The file is read again when it changes; one that
has become wrong changes nothing but the log.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from frontend.access.caller import Caller, GrantUse
from frontend.access.token_file import digest_of, read_token_file
from stepwire.errors import AccessError

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class Gate:
    """Open to everybody without a token file. Raises ValueError when the file is no good at the start."""

    def __init__(self, token_file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = token_file
        self._clock = clock
        self._uses: tuple[GrantUse, ...] = ()
        self._stamp: _Stamp | None = None
        # Refusals by reason.
        self.failures = {"UNAUTHENTICATED": 0, "PERMISSION_DENIED": 0}
        if token_file is not None:
            self._stamp = _stamp_of(token_file)
            self._load(token_file)

    @property
    def client_classes(self) -> frozenset[str]:
        """Those that the operator has named."""
        return frozenset(use.grant.client_class for use in self._uses if use.grant.client_class)

    def identify(self, authorization: str, client_class: str = "", *, for_admin: bool = False) -> Caller:
        """Who sends this header. `client_class` is what the caller claims; a class of its token wins.

        Raises AccessError: UNAUTHENTICATED, or PERMISSION_DENIED for the admin port.
        """
        try:
            return self._identify(authorization, client_class, for_admin=for_admin)
        except AccessError as error:
            self.failures[error.reason] += 1
            raise

    def _identify(self, authorization: str, client_class: str = "", *, for_admin: bool = False) -> Caller:
        if self._path is None:
            return Caller(authorization, client_class)
        use = self._find(_bearer_token(authorization))
        if for_admin and not use.grant.is_admin:
            raise AccessError(f"token {use.grant.name!r} is not for the admin port", reason="PERMISSION_DENIED")
        return Caller(use.grant.name, use.grant.client_class or client_class, use)

    def name_of(self, authorization: str) -> str:
        """The name of the token in this header, for logs; empty when there is none that is known."""
        try:
            return self._identify(authorization).name
        except AccessError:
            return ""

    def refresh(self) -> None:
        """Read the file again if it has changed; called regularly."""
        if self._path is None or (stamp := _stamp_of(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._load(self._path)
        except ValueError as error:
            logger.error("the tokens stay as they were: %s", error)
        else:
            logger.info("read %d tokens from %s", len(self._uses), self._path)

    def _load(self, path: Path) -> None:
        known = {use.grant.digest: use for use in self._uses}
        self._uses = tuple(
            known[grant.digest].changed_to(grant) if grant.digest in known else GrantUse(grant, self._clock)
            for grant in read_token_file(path)
        )

    def _find(self, token: str) -> GrantUse:
        digest, found = digest_of(token), None
        for use in self._uses:
            if hmac.compare_digest(use.grant.digest, digest):
                found = use
        if found is None:
            raise AccessError("the token is not known here")
        return found


def _bearer_token(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise AccessError("a token is needed: authorization: Bearer TOKEN")
    return token.strip()


def _stamp_of(path: Path) -> _Stamp | None:
    """Changes with the file; None when there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
