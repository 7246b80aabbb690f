"""Ports for servers that cannot choose one themselves."""

import pathlib
import random
import socket

_FIRST = 20_000
_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")


def unused_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface where nothing listens. They are below those that the system gives to
    connections and to port 0, so no test that runs at the same time gets one of them by chance before its server does.
    """
    end = int(_RANGE.read_text().split()[0])
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST, end), 1_000):
        with socket.socket() as probe:
            # A server listens where an earlier connection has ended, too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"no {count} ports between {_FIRST} and {end} are free")
