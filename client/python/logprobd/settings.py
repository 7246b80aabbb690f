"""Settings of a client. An argument overrides the environment, which overrides the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from logprobd import _policy, addresses
from logprobd.addresses import FindServers
from logprobd.errors import InvalidArgument
from logprobd.retry import RetryPolicy
from logprobd.tls import Tls, tls_from_environment
from logprobd.trace import InjectTrace

DEFAULT_ADDRESS = f"127.0.0.1:{addresses.DEFAULT_PORT}"
DEFAULT_TIMEOUT_S = _policy.CALL_TIMEOUT_SECONDS
DEFAULT_MAX_INFLIGHT = _policy.INFLIGHT_MAX
DEFAULT_CHUNK_ROWS = 1024
DEFAULT_CHUNK_BYTES = 4 << 20
IDLE_TIMEOUT_MS = 5 * 60_000
"""A connection without calls is closed after this time, and opened again by the next call. The
server closes it after 10 minutes, which gRPC reports on stderr ("Got goaway") like a failure."""
CLIENT_ID_LENGTH_MAX = 64
TOKEN_LENGTH_MAX = 512
TRANSPORTS = ("auto", "tcp", "shm", "cuda-ipc")
_TRANSPORT_VARIABLE = "LOGPROBD_TRANSPORT"
_TOKEN_VARIABLE = "LOGPROBD_TOKEN"

Number = TypeVar("Number", int, float)
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Settings:
    """All settings of a client; a pickled client consists of them."""

    addresses: tuple[str, ...]
    timeout: float
    max_inflight: int
    channels: int
    chunk_rows: int
    chunk_bytes: int
    retry: RetryPolicy
    client_id: str | None
    mix_versions: bool = False
    transport: str = "auto"
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    inject_trace: InjectTrace | None = None
    find: FindServers | None = None
    """Returns the servers, if they change; `addresses` then names this function."""

    @property
    def address(self) -> str:
        """All addresses as text."""
        return ",".join(self.addresses)

    @property
    def is_one_server(self) -> bool:
        """Whether there is exactly one server, so that rows can lie in memory shared with it."""
        return addresses.AddressBook(self.addresses, self.find).is_plain

    @property
    def is_unix(self) -> bool:
        return all(map(addresses.is_unix, self.addresses))

    @property
    def metadata(self) -> Metadata | None:
        """The gRPC metadata of all calls."""
        return self.metadata_in("")

    def metadata_in(self, traceparent: str) -> Metadata | None:
        """Returns the gRPC metadata of a unary call that belongs to a trace, or to none if ""."""
        pairs = (
            ("client_id", self.client_id),
            ("authorization", None if self.token is None else f"Bearer {self.token}"),
            ("traceparent", traceparent or None),
        )
        return tuple((key, value) for key, value in pairs if value is not None) or None

    def channel_options(self, address: str, index: int) -> list[tuple[str, int | str]]:
        """Returns the gRPC options of channel `index` to a server.

        Each channel has its own connection, and messages have no size limit.
        """
        options: list[tuple[str, int | str]] = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("logprobd.channel", index),
            # This package retries by itself, with the server's hints. Reconnecting is quick, so
            # that a restarted server is found soon.
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", round(1000 * _policy.RECONNECT_FIRST_SECONDS)),
            ("grpc.max_reconnect_backoff_ms", round(1000 * _policy.RECONNECT_MAX_SECONDS)),
            # Keepalive detects a host that has vanished; its requests are then sent elsewhere.
            ("grpc.keepalive_time_ms", round(1000 * _policy.KEEPALIVE_SECONDS)),
            ("grpc.keepalive_timeout_ms", round(1000 * _policy.KEEPALIVE_TIMEOUT_SECONDS)),
            ("grpc.client_idle_timeout_ms", IDLE_TIMEOUT_MS),
        ]
        if addresses.is_loopback(address):
            options.append(("grpc.enable_http_proxy", 0))
        if self.tls is not None and (name := self.tls.server_name or self._looked_up_name):
            options.append(("grpc.ssl_target_name_override", name))
        return options

    @property
    def _looked_up_name(self) -> str | None:
        """The name of which all addresses are records, if there is one. Certificates contain it."""
        if len(self.addresses) > 1 or (name := addresses.dns_name(self.addresses[0])) is None:
            return None
        return name[0]


def make_settings(
    address: str | Sequence[str] | FindServers | None,
    *,
    timeout: float | None,
    max_inflight: int | None,
    channels: int,
    chunk_rows: int,
    chunk_bytes: int,
    retry: RetryPolicy | None,
    client_id: str | None,
    mix_versions: bool = False,
    transport: str | None = None,
    tls: Tls | Literal[False] | None = None,
    token: str | None = None,
    inject_trace: InjectTrace | None = None,
) -> Settings:
    """Makes settings from arguments and LOGPROBD_* variables.

    Raises InvalidArgument, which names the bad setting.
    """
    if address is None:
        address = os.environ.get("LOGPROBD_ADDRESS") or DEFAULT_ADDRESS
    made = Settings(
        addresses=(f"<{getattr(address, '__qualname__', type(address).__name__)}>",)
        if callable(address)
        else addresses.parse_addresses(address),
        find=address if callable(address) else None,
        timeout=_number("timeout", timeout, "LOGPROBD_TIMEOUT_S", DEFAULT_TIMEOUT_S, float),
        max_inflight=_number(
            "max_inflight", max_inflight, "LOGPROBD_MAX_INFLIGHT", DEFAULT_MAX_INFLIGHT, int
        ),
        channels=_number("channels", channels, None, 1, int),
        chunk_rows=_number("chunk_rows", chunk_rows, None, 1, int),
        chunk_bytes=_number("chunk_bytes", chunk_bytes, None, 1, int),
        retry=retry or RetryPolicy(),
        client_id=_client_id(client_id),
        mix_versions=bool(mix_versions),
        transport=_transport(transport),
        tls=_tls(tls),
        token=_token(token),
        inject_trace=inject_trace,
    )
    if not made.is_one_server and made.transport not in ("auto", "tcp"):
        name = "transport" if transport is not None else _TRANSPORT_VARIABLE
        raise InvalidArgument(
            f'{name} is "{made.transport}", but address "{made.address}" names several servers, '
            'which only accept rows inside requests: use "auto" or "tcp", or name one server',
            field=name,
        )
    return made


def _transport(given: str | None) -> str:
    value = os.environ.get(_TRANSPORT_VARIABLE, "") if given is None else given
    chosen = (value or "auto").lower().replace("_", "-")
    if chosen not in TRANSPORTS:
        name = _TRANSPORT_VARIABLE if given is None else "transport"
        raise InvalidArgument(
            f'{name} is "{value}": use one of {", ".join(TRANSPORTS)}', field=name
        )
    return chosen


def _tls(given: Tls | Literal[False] | None) -> Tls | None:
    if given is None:
        return tls_from_environment()
    if given is not False and not isinstance(given, Tls):
        raise InvalidArgument(
            f"tls is {given!r}: pass logprobd.Tls(ca=..., cert=..., key=...), or False for "
            "plaintext",
            field="tls",
        )
    return given or None


def _token(given: str | None) -> str | None:
    """Checks that the token can travel as gRPC metadata. Errors do not repeat it."""
    token = os.environ.get(_TOKEN_VARIABLE) or None if given is None else given
    if token is not None and not (
        0 < len(token) <= TOKEN_LENGTH_MAX and token.isascii() and token.isprintable()
    ):
        raise InvalidArgument(
            f"token has {len(token)} characters: use 1 to {TOKEN_LENGTH_MAX} printable ASCII "
            "characters",
            field="token" if given is not None else _TOKEN_VARIABLE,
        )
    return token


def _client_id(client_id: str | None) -> str | None:
    """Checks that the name can travel as gRPC metadata."""
    if client_id is not None and not (
        0 < len(client_id) <= CLIENT_ID_LENGTH_MAX
        and client_id.isascii()
        and client_id.isprintable()
    ):
        raise InvalidArgument(
            f"client_id is {client_id!r}: "
            f"use 1 to {CLIENT_ID_LENGTH_MAX} printable ASCII characters",
            field="client_id",
        )
    return client_id


def _number(
    name: str,
    given: Number | None,
    variable: str | None,
    default: Number,
    convert: Callable[[str], Number],
) -> Number:
    text = os.environ.get(variable, "") if variable is not None else ""
    value = default
    if given is not None:
        value = given
    elif text:
        name = variable or name
        try:
            value = convert(text)
        except ValueError:
            raise InvalidArgument(f'{name} is "{text}": set a number', field=name) from None
    if not value > 0:
        raise InvalidArgument(f"{name} is {value}: it must be above 0", field=name)
    return value
