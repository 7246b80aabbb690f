"""Parses the addresses of servers, and keeps the results of look-ups of further ones."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from logprobd._policy import RESOLVE_PAUSE_SECONDS, RESOLVE_SECONDS
from logprobd.errors import InvalidArgument

DEFAULT_PORT = 8470

FindServers = Callable[[], str | Sequence[str]]
"""Returns the addresses of the servers that exist now. It may block."""

_DNS = "dns:///"
_PASSED_ON = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")


def parse_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parses a comma-separated list or a sequence of single addresses.

    Each is "host", "host:port", "[ipv6]:port", "unix:///path" or "dns:///name:port". The default
    port is 8470. Drops duplicates. Raises InvalidArgument, which names the invalid address.
    """
    parts = given.split(",") if isinstance(given, str) else list(given)
    addresses = dict.fromkeys(_normalise(part) for part in parts)
    if not addresses:
        raise _refuse("", 'name a server, as "host:port"')
    return tuple(addresses)


def dns_name(address: str) -> tuple[str, int] | None:
    """Returns the name and port of "dns:///name:port", or None for any other address."""
    if not address.startswith(_DNS):
        return None
    host, _, port = address[len(_DNS) :].rpartition(":")
    return host.strip("[]"), int(port)


def is_unix(address: str) -> bool:
    return address.startswith(("unix:", "unix-abstract:"))


def is_loopback(address: str) -> bool:
    host = address.rsplit(":", 1)[0].strip("[]")
    return is_unix(address) or host in ("localhost", "::1") or host.startswith("127.")


def record_addresses(records: Iterable[Any], port: int) -> tuple[str, ...]:
    """Formats the records of getaddrinfo as "ip:port", IPv6 in brackets, sorted."""
    hosts = {record[4][0] for record in records}
    return tuple(sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts))


def resolve(name: str, port: int) -> tuple[str, ...]:
    """Resolves all A and AAAA records; this blocks. Raises OSError if the name has none."""
    return record_addresses(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM), port)


class AddressBook:
    """The addresses of a client, the results of look-ups, and when to look up again.

    It does not look up by itself.

    Args:
        addresses: parsed addresses; with `find`, its name alone.
        find: takes the place of addresses.
    """

    def __init__(self, addresses: Sequence[str], find: FindServers | None = None) -> None:
        self._addresses = addresses
        self._records: dict[str, tuple[str, ...]] = {}
        self._asked_at = float("-inf")
        self.look_ups: dict[str, Callable[[], tuple[str, ...]]] = {
            address: functools.partial(resolve, *name)
            for address in addresses
            if (name := dns_name(address)) is not None
        }
        """The look-ups, by address: of DNS names, or of all servers by `find`. They block."""
        if find is not None:
            (label,) = addresses
            self.look_ups[label] = lambda: parse_addresses(find())
        self.errors: list[str] = []
        """The errors of the latest look-up."""

    @property
    def is_plain(self) -> bool:
        """True if there is exactly one server and nothing to look up."""
        return len(self._addresses) == 1 and not self.look_ups

    def take_due(self, now: float, failed_at: float) -> bool:
        """Returns whether to look up now. `failed_at` is the time of the last failure."""
        if not self.look_ups:
            return False
        age = now - self._asked_at
        pause = RESOLVE_PAUSE_SECONDS if failed_at > self._asked_at else RESOLVE_SECONDS
        if age < pause and (self._records or age < RESOLVE_PAUSE_SECONDS):
            return False
        self._asked_at = now
        return True

    def update(self, found: Mapping[str, tuple[str, ...] | Exception]) -> tuple[str, ...]:
        """Stores the results of `look_ups`. One that failed keeps its latest result. Returns all
        servers."""
        self.errors = [f"{a}: {e}" for a, e in found.items() if isinstance(e, Exception)]
        self._records |= {a: r for a, r in found.items() if not isinstance(r, Exception)}
        return self.servers()

    def servers(self) -> tuple[str, ...]:
        """Returns the currently known servers."""
        lists = (self._records.get(a, ()) if a in self.look_ups else (a,) for a in self._addresses)
        return tuple(dict.fromkeys(address for addresses in lists for address in addresses))


def _normalise(given: object) -> str:
    if not isinstance(given, str):
        raise _refuse(given, "pass a str, or a list of them")
    address = given.strip()
    if not address:
        raise _refuse(address, 'an address is missing: use "host:port,host:port"')
    if address.startswith(_DNS):
        return _DNS + _with_port(address[len(_DNS) :], address)
    if address.startswith(_PASSED_ON):
        return address
    return _with_port(address, address)


def _with_port(host: str, address: str) -> str:
    if not host or "/" in host:
        raise _refuse(address, "use host:port, unix:///path for a socket, or dns:///name:port")
    if host.startswith("["):
        return host if "]:" in host else f"{host}:{DEFAULT_PORT}"
    if host.count(":") > 1:
        raise _refuse(address, "put an IPv6 address in brackets, as [::1]:8470")
    if ":" not in host:
        return f"{host}:{DEFAULT_PORT}"
    if not host.rpartition(":")[2].isdigit():
        raise _refuse(address, "the port is not a number: use host:port")
    return host


def _refuse(address: object, advice: str) -> InvalidArgument:
    shown = f'"{address}"' if isinstance(address, str) else repr(address)
    return InvalidArgument(f"address is {shown}: {advice}", field="address")
