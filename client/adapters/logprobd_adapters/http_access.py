"""Access to an HTTP listener: its certificate, and the tokens that callers need."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import hmac
import ipaddress
import os
import pathlib
import re
import ssl
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from logprobd.errors import InvalidArgument

_SCOPE = "score"
_SCOPES = (_SCOPE, "verify", "admin", "metrics")
_KEYS = ("id", "sha256", "tenant", "scopes", "not_after", "share", "priority_max")
_TOKEN_LENGTH_MAX = 512

FilePath = str | os.PathLike[str]


class AccessError(Exception):
    """A caller may not use the listener.

    Args:
        status: 401 for a missing, unknown or expired token, 403 for one that lacks the scope.
        message: what the caller should change.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class _Token:
    id: str
    digest: bytes
    may_score: bool
    not_after: datetime.datetime | None


class Tokens:
    """The tokens of a file of the server's --tokens. Callers need one with the scope score.

    Shares, tenants and priorities have no effect here, and neither have entries of certificates,
    since the listener asks for none.

    Args:
        path: TOML file that `logprobctl token new` writes.

    Raises InvalidArgument, which names the entry, if the file is not one of the server's.
    """

    def __init__(self, path: FilePath) -> None:
        self._path = path
        self._tokens = _read(path)

    def reload(self) -> None:
        """Reads the file again. If it raises InvalidArgument, the tokens stay as they were."""
        self._tokens = _read(self._path)

    def check(self, authorization: str | None) -> None:
        """Checks the value of the header of that name: "Bearer TOKEN", or "Basic" with the token as
        the password, which clients take from a URL or a .netrc file.

        Its digest is compared with those of all tokens in the same time. Raises AccessError.
        """
        if not authorization:
            raise AccessError(401, 'a token is needed: send "Authorization: Bearer TOKEN"')
        text = _text_of(authorization).encode(errors="surrogateescape")
        digest = hashlib.sha256(text).digest()
        found = None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise AccessError(401, "the token is unknown")
        if found.not_after and datetime.datetime.now(datetime.timezone.utc) >= found.not_after:
            raise AccessError(
                401, f'the token "{found.id}" expired at {found.not_after.isoformat()}'
            )
        if not found.may_score:
            raise AccessError(403, f'the token "{found.id}" lacks the scope {_SCOPE}')


def _text_of(authorization: str) -> str:
    """Returns the token in a header. Raises AccessError for another form."""
    scheme, _, text = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            text = base64.b64decode(text, validate=True).decode().partition(":")[2]
        except ValueError:
            text = ""
    elif scheme.lower() != "bearer":
        text = ""
    if not 0 < len(text) <= _TOKEN_LENGTH_MAX:
        raise AccessError(401, 'the header must be "Authorization: Bearer TOKEN"')
    return text


def _read(path: FilePath) -> list[_Token]:
    what = f"file of tokens {os.fspath(path)}"
    try:
        content = tomllib.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise InvalidArgument(f"{what} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{what}: {error}") from error
    except RecursionError:
        raise InvalidArgument(f"{what}: arrays or tables are nested too deeply") from None
    entries = content.pop("token", None)
    content.pop("certificate", None)
    if content or not isinstance(entries, list) or not entries:
        raise InvalidArgument(f"{what}: expected entries [[token]], beside [[certificate]] only")
    tokens: list[_Token] = []
    for number, entry in enumerate(entries, 1):
        try:
            tokens.append(_token_of(entry))
        except ValueError as error:
            raise InvalidArgument(f"{what}: token {number}: {error}") from None
    if min(len({t.id for t in tokens}), len({t.digest for t in tokens})) < len(tokens):
        raise InvalidArgument(f"{what}: two tokens have the same id or sha256")
    return tokens


def _token_of(entry: Any) -> _Token:
    """Raises ValueError for an entry that the server refuses too, as far as it matters here."""
    if not isinstance(entry, dict):
        raise ValueError("must be a table")
    if unknown := entry.keys() - _KEYS:
        raise ValueError(f"{min(unknown)} is unknown; the keys are {', '.join(_KEYS)}")
    name, sha256, scopes = (entry.get(key) for key in ("id", "sha256", "scopes"))
    if not (isinstance(name, str) and name):
        raise ValueError("id must be a string")
    if not (isinstance(sha256, str) and re.fullmatch(r"[0-9a-fA-F]{64}", sha256)):
        raise ValueError("sha256 must be 64 hexadecimal digits")
    if not (isinstance(scopes, list) and scopes and all(scope in _SCOPES for scope in scopes)):
        raise ValueError("scopes must be an array of score, verify, admin and metrics")
    not_after = entry.get("not_after")
    if not_after is not None and not (
        isinstance(not_after, datetime.datetime) and not_after.tzinfo is not None
    ):
        raise ValueError("not_after must be a time with its zone, such as 2027-01-31T00:00:00Z")
    return _Token(name, bytes.fromhex(sha256), _SCOPE in scopes, not_after)


class Certificate:
    """The certificate and the key of a listener, for TLS 1.2 and 1.3.

    Args:
        cert: PEM file of the certificate, followed by its chain.
        key: PEM file of its private key, without a passphrase.

    Raises InvalidArgument if the files cannot be read or do not belong together.
    """

    def __init__(self, cert: FilePath, key: FilePath) -> None:
        self._paths = (cert, key)
        self.context = self._load()
        """The context of the listener. It takes the pair of the latest reload."""
        self._latest = self.context
        self.context.sni_callback = self._use_latest

    def reload(self) -> None:
        """Reads the files again, for new connections. If it raises InvalidArgument, the pair stays
        as it was."""
        self._latest = self._load()

    def _use_latest(self, connection: ssl.SSLObject, *_: object) -> None:
        # Loading a pair into a context in use would leave it without a key if that is a wrong one.
        connection.context = self._latest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        cert, key = self._paths
        try:
            # The empty passphrase is wrong for a key that has one; without it OpenSSL would ask.
            context.load_cert_chain(cert, key, password="")
        except OSError as error:  # ssl.SSLError is one
            raise InvalidArgument(
                f"{os.fspath(cert)}, {os.fspath(key)}: expected a PEM certificate and its private "
                f"key without a passphrase: {error}"
            ) from error
        return context


def check_reachable(host: str, *, has_tls: bool, has_tokens: bool, insecure: bool) -> None:
    """Raises InvalidArgument if other hosts could use an address without TLS and a token, or if
    tokens would cross the network in the clear, which `insecure` does not allow either."""
    if _is_loopback(host):
        return
    if has_tokens and not has_tls:
        raise InvalidArgument(
            f"{host} is not a loopback address, and tokens would cross the network unencrypted: "
            "give --https-cert and --https-key"
        )
    if not (insecure or (has_tls and has_tokens)):
        raise InvalidArgument(
            f"{host} can be reached from other hosts without authentication: give --https-cert, "
            "--https-key and --tokens, pass --insecure to allow that, or use a loopback address "
            "such as 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
