"""Replaces the certificate of a server over and over while clients make new connections."""

import dataclasses
import pathlib
import shutil
import signal
import socket
import ssl
import threading

import logprobd
import numpy as np
from server_process import ServerProcess
from tls_certificates import Authority
from waiting import wait_until

CLIENTS = 2
SERVED_WITHIN_S = 60


@dataclasses.dataclass
class Rotation:
    """What happened during the rotations."""

    installed: int = 0  # certificates that were put in place
    served: int = 0  # certificates that the server was seen to show
    calls: list[int] = dataclasses.field(default_factory=lambda: [0] * CLIENTS)  # by client
    failures: list[str] = dataclasses.field(default_factory=list)


def scored(address: str, authority: Authority) -> np.ndarray:
    """Returns the logprobs of four rows, scored over a new connection."""
    hidden = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    retry = logprobd.RetryPolicy(attempts_max=1)
    with logprobd.Client(
        address,
        tls=logprobd.Tls(ca=authority.cert),
        retry=retry,
        timeout=20,
        transport="tcp",
        channels=1,
    ) as client:
        return client.score(hidden, [1, 2, 3, 4]).logprob


def served_certificate(address: str) -> bytes:
    """Returns the certificate that the server shows to a new connection, as DER."""
    host, port = address.rsplit(":", 1)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=20) as connection,
        context.wrap_socket(connection) as tls,
    ):
        return tls.getpeercert(binary_form=True)


def certificate_in(path: pathlib.Path) -> bytes:
    """Returns the certificate of a PEM file, as DER."""
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def install(issued: tuple[pathlib.Path, pathlib.Path], live: tuple[pathlib.Path, pathlib.Path]):
    """Replaces the files `live`, each at once, but not both at the same time."""
    for source, target in zip(issued, live, strict=True):
        new = target.with_suffix(".new")
        shutil.copy(source, new)
        new.rename(target)


def rotate(
    server: ServerProcess,
    authority: Authority,
    live: tuple[pathlib.Path, pathlib.Path],
    *,
    count: int,
    await_every: int,
) -> Rotation:
    """Replaces the certificate and the key `live` of the server `count` times while clients connect and score.

    Waits until the server shows each `await_every`th certificate. The others are replaced at once, so that the server
    may read half of a pair. Raises AssertionError if a certificate is not served in time.
    """
    rotation = Rotation()
    stop = threading.Event()

    def load(index: int) -> None:
        while not stop.is_set():
            try:
                scored(server.grpc, authority)
                rotation.calls[index] += 1
            except logprobd.LogprobdError as error:
                rotation.failures.append(str(error))

    threads = [threading.Thread(target=load, args=(index,)) for index in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, count + 1):
            issued = authority.issue("rotated")
            install(issued, live)
            rotation.installed += 1
            server.signal(signal.SIGHUP)
            if number % await_every == 0:
                _await_served(server, certificate_in(issued[0]), number)
                rotation.served += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    return rotation


def _await_served(server: ServerProcess, certificate: bytes, number: int) -> None:
    wait_until(
        lambda: served_certificate(server.grpc) == certificate,
        f"certificate {number} is not served",
        SERVED_WITHIN_S,
    )
