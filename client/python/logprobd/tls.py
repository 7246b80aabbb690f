"""TLS of a client: which files it uses, and what is wrong when a connection is refused."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import ssl

import grpc

from logprobd.errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Tls:
    """TLS for all TCP connections of a client; a Unix socket stays plaintext.

    Every argument but `server_name` is the path of a PEM file, which is read when a client is made
    or unpickled.

    Args:
        ca: certificates that the client trusts to have issued the server's certificate. Default:
            the roots that gRPC contains, or those of GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
        cert: certificate of this client, followed by its chain, for servers that demand one
            (--tls-client-ca). Needs `key`.
        key: private key of `cert`, without a passphrase.
        server_name: name that the server's certificate must contain. Default: the host of the
            address, also that of one dns:/// address; the servers of several are checked by their
            IP addresses.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None


def tls_from_environment() -> Tls | None:
    """Returns what the variables LOGPROBD_TLS_CA, _CERT, _KEY and _SERVER_NAME say, or None if all
    are unset or empty."""
    values = {
        field.name: os.environ.get(f"LOGPROBD_TLS_{field.name.upper()}") or None
        for field in dataclasses.fields(Tls)
    }
    return Tls(**values) if any(values.values()) else None


class TlsFiles:
    """The checked content of the files of a Tls. Raises InvalidArgument, which names the file."""

    def __init__(self, tls: Tls) -> None:
        if (tls.cert is None) != (tls.key is None):
            given, missing = ("cert", "key") if tls.key is None else ("key", "cert")
            raise InvalidArgument(
                f"tls.{given} needs tls.{missing} (LOGPROBD_TLS_{missing.upper()}), too",
                field=f"tls.{missing}",
            )
        self._ca = self._cert = self._key = None
        if tls.ca is not None:
            self._ca = _read("ca", tls.ca)
            _check_ca(tls.ca)
        if tls.cert is not None and tls.key is not None:
            self._cert, self._key = _read("cert", tls.cert), _read("key", tls.key)
            _check_pair(tls.cert, tls.key)

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)


def _read(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"tls.{name}: {os.fspath(path)} cannot be read: {error.strerror}", field=f"tls.{name}"
        ) from error


def _check_ca(path: str | os.PathLike[str]) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidArgument(
            f"tls.ca: {os.fspath(path)} contains no usable PEM certificate "
            f"(-----BEGIN CERTIFICATE-----): {error.reason or error}",
            field="tls.ca",
        ) from error


def _refuse_passphrase() -> bytes:
    raise ValueError("the key has a passphrase")


def _check_pair(cert: str | os.PathLike[str], key: str | os.PathLike[str]) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, _refuse_passphrase)
    except (ssl.SSLError, ValueError) as error:
        is_mismatch = "MISMATCH" in str(getattr(error, "reason", ""))
        what = (
            "the key is not the key of the certificate"
            if is_mismatch
            else f"not a PEM certificate and a PEM private key without a passphrase: {error}"
        )
        raise InvalidArgument(
            f"tls.cert {os.fspath(cert)}, tls.key {os.fspath(key)}: {what}", field="tls.key"
        ) from error
