"""TLS between the server and its clients: who is let in, what a refusal says, and the rotation of certificates."""

import asyncio
import itertools
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import logprobd
import numpy as np
import pytest
from certificate_rotation import certificate_in, install, rotate, served_certificate
from logprobd import Tls
from tls_certificates import Authority, self_signed
from waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def client_tls(ca) -> Tls:
    cert, key = ca.issue("client")
    return Tls(ca=ca.cert, cert=cert, key=key)


@pytest.fixture
def start(start_server, model):
    """Starts a server whose certificate and key are given, with more options."""

    def run(pair, *options: object, **keywords):
        cert, key = pair
        return start_server(
            "--model", str(model.path), "--tls-cert", str(cert), "--tls-key", str(key),
            *map(str, options), **keywords,
        )  # fmt: skip

    return run


def client(address: str, tls: Tls | None, **keywords) -> logprobd.Client:
    retry = logprobd.RetryPolicy(attempts_max=1)
    return logprobd.Client(
        address, tls=tls, retry=retry, timeout=20, **{"transport": "tcp"} | keywords
    )


def refusal(address: str, tls: Tls | None) -> str:
    with client(address, tls) as refused, pytest.raises(logprobd.Unavailable) as error:
        refused.list_heads()
    return str(error.value)


def score(connected: logprobd.Client) -> np.ndarray:
    hidden = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    return connected.score(hidden, [1, 2, 3, 4]).logprob


def logprobctl(binaries, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(binaries / "logprobctl"), *map(str, arguments)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def flags(tls: Tls) -> list[object]:
    found = [("--tls-ca", tls.ca), ("--tls-cert", tls.cert), ("--tls-key", tls.key)]
    found.append(("--tls-server-name", tls.server_name))
    return [part for flag, value in found if value is not None for part in (flag, value)]


def test_weights_are_changed_over_tls(ca, pair, start) -> None:
    server = start(pair, "--admin", "127.0.0.1:0", "--insecure")
    with (
        logprobd.WeightsClient(server.admin, tls=Tls(ca=ca.cert), timeout=20) as trusting,
        logprobd.WeightsClient(server.admin, timeout=20) as plain,
    ):
        assert trusting.list()[0].live.version == 1
        with pytest.raises(logprobd.Unavailable):
            plain.list()


def test_clients_score_over_tls_and_get_the_bits_of_plaintext(start, start_server, model, ca, pair):
    plain = start_server("--model", str(model.path))
    secure = start(pair)
    with client(plain.grpc, None) as unprotected, client(secure.grpc, Tls(ca=ca.cert)) as protected:
        np.testing.assert_array_equal(score(protected), score(unprotected))

    async def from_asyncio() -> str:
        async with logprobd.AsyncClient(secure.grpc, tls=Tls(ca=ca.cert), timeout=20) as other:
            return (await other.list_heads())[0].name

    assert asyncio.run(from_asyncio())


def test_logprobctl_takes_the_same_files(binaries, start, ca, pair, client_tls) -> None:
    server = start(pair, "--tls-client-ca", ca.cert, "--admin", "127.0.0.1:0")
    ping = logprobctl(binaries, "ping", "--address", server.grpc, *flags(client_tls))
    assert ping.returncode == 0, ping.stderr
    from_environment = subprocess.run(
        [str(binaries / "logprobctl"), "ping", "--address", server.grpc],
        env={
            "LOGPROBD_TLS_CA": str(client_tls.ca),
            "LOGPROBD_TLS_CERT": str(client_tls.cert),
            "LOGPROBD_TLS_KEY": str(client_tls.key),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert from_environment.returncode == 0, from_environment.stderr
    listed = logprobctl(
        binaries, "weights", "list", "--json", "--admin", server.admin, *flags(client_tls)
    )
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)
    no_certificate = Tls(ca=ca.cert)
    for command in (
        ["ping", "--address", server.grpc],
        ["weights", "list", "--admin", server.admin],
    ):
        refused = logprobctl(binaries, *command, *flags(no_certificate))
        assert refused.returncode == 1
        assert "--tls-client-ca" in refused.stderr, refused.stderr


def test_same_host_transports_work_beside_tls(start, ca, pair) -> None:
    server = start(pair)
    with client(server.grpc, Tls(ca=ca.cert), transport="shm") as connected:
        score(connected)
        assert connected.transport == "shm"
    path = re.search(r"\blocal=(\S+)", "".join(server.log))[1]
    with client(f"unix://{path}", Tls(ca=ca.cert)) as connected:
        score(connected)


def test_a_server_with_a_client_ca_lets_in_its_clients_only(start, ca, pair, client_tls, tmp_path):
    server = start(pair, "--tls-client-ca", ca.cert)
    with client(server.grpc, client_tls) as connected:
        score(connected)
    assert "--tls-client-ca" in refusal(server.grpc, Tls(ca=ca.cert))
    for cert, key in (
        Authority(tmp_path, "stranger").issue("client"),
        self_signed(tmp_path, "self"),
        ca.issue("expired", end="20210101000000Z"),
    ):
        assert "--tls-client-ca" in refusal(server.grpc, Tls(ca=ca.cert, cert=cert, key=key))
    with client(server.grpc, client_tls) as connected:
        score(connected)


def is_refused(server, tls: Tls) -> bool:
    with client(server.grpc, tls) as connected:
        try:
            connected.list_heads()
        except logprobd.Unavailable:
            return True
    return False


@pytest.fixture
def revocation(start, pair, tmp_path):
    """A server, its own CA of clients with an empty list, and a certificate of a client of the CA."""

    class Revocation:
        ca = Authority(tmp_path, "clients")
        folder = tmp_path / "crl"
        cert, key = ca.issue("leaver")

        def start(self, server_ca) -> None:
            self.leaver = Tls(ca=server_ca.cert, cert=self.cert, key=self.key)
            stayer, key = self.ca.issue("stayer")
            self.stayer = Tls(ca=server_ca.cert, cert=stayer, key=key)
            self.server = start(pair, "--tls-client-ca", self.ca.cert, "--tls-crl-dir", self.folder)

        def await_refusal(self) -> None:
            wait_until(lambda: is_refused(self.server, self.leaver), "still accepted")
            assert not is_refused(self.server, self.stayer)

    found = Revocation()
    found.ca.write_revocations(found.folder)
    return found


# Regression: a list that was written in place, or through the link of `openssl rehash`, never took effect.
@pytest.mark.parametrize("way", ["in place", "new folder", "renamed", "behind the link", "SIGHUP"])
def test_a_revoked_client_is_refused(revocation, ca, tmp_path, way) -> None:
    listed = revocation.folder / "crl.pem"
    if way == "behind the link":
        elsewhere = tmp_path / "elsewhere.pem"
        listed.rename(elsewhere)
        next(revocation.folder.glob("*.r0")).unlink()
        (revocation.folder / "0123abcd.r0").symlink_to(elsewhere)
        listed = elsewhere
    revocation.start(ca)
    assert not is_refused(revocation.server, revocation.leaver)

    if way == "new folder":
        shutil.rmtree(revocation.folder)
        revocation.ca.write_revocations(revocation.folder, revocation.cert)
    elif way == "renamed":
        revocation.ca.write_list(tmp_path / "new.pem", revocation.cert)
        (tmp_path / "new.pem").rename(listed)
    else:
        revocation.ca.write_list(listed, revocation.cert)
        if way == "SIGHUP":
            revocation.server.signal(signal.SIGHUP)

    revocation.await_refusal()
    assert (
        revocation.server.metric("logprobd_tls_refused_certificates_total", reason="revoked") >= 1
    )
    assert 'a client\'s certificate was refused certificate="/CN=leaver"' in "".join(
        revocation.server.log
    )


# Regression: the files were read once they had stayed the same for a second.
def test_a_busy_folder_keeps_out_no_revocation(revocation, ca) -> None:
    revocation.start(ca)
    is_over = threading.Event()

    def write() -> None:
        for number in itertools.count(1):
            if is_over.wait(0.2):
                return
            (revocation.folder / "fetch.log").write_text(f"{number}\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        revocation.ca.write_list(revocation.folder / "crl.pem", revocation.cert)
        revocation.await_refusal()
    finally:
        is_over.set()
        writer.join()


# Regression: OpenSSL takes a list for none that names another certificate of its CA.
def test_a_ca_whose_certificate_is_issued_again_revives_no_client(revocation, ca) -> None:
    revocation.ca.write_list(revocation.folder / "crl.pem", revocation.cert)
    revocation.ca.renew()

    revocation.start(ca)

    revocation.await_refusal()


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_a_revoked_client_cannot_resume_a_session(revocation, ca, version) -> None:
    revocation.start(ca)
    context = ssl.create_default_context(cafile=ca.cert)
    context.load_cert_chain(revocation.cert, revocation.key)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, port = revocation.server.grpc.split(":")

    def connect(session=None):
        """Returns whether the server speaks HTTP/2, whether the session was resumed, and the session."""
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname=host, session=session) as connected,
        ):
            try:
                answer = connected.recv(9)  # the head of a SETTINGS frame
            except (ssl.SSLError, ConnectionError):
                answer = b""
            return len(answer) == 9, connected.session_reused, connected.session

    speaks, _, session = connect()
    assert speaks
    assert connect(session)[:2] == (True, True)

    revocation.ca.write_list(revocation.folder / "crl.pem", revocation.cert)
    revocation.await_refusal()

    assert not connect(session)[0]


def test_a_ca_beside_the_lists_is_not_trusted(revocation, ca, tmp_path) -> None:
    # Regression: gRPC trusted every CA whose certificate lies in the folder under its hash.
    (tmp_path / "stranger").mkdir()
    stranger = Authority(tmp_path / "stranger", "stranger")
    cert, key = stranger.issue("guest")
    shutil.copy(stranger.cert, revocation.folder)
    subprocess.run(["openssl", "rehash", revocation.folder], check=True, timeout=30)

    revocation.start(ca)

    assert is_refused(revocation.server, Tls(ca=ca.cert, cert=cert, key=key))
    assert not is_refused(revocation.server, revocation.leaver)


def test_a_damaged_list_keeps_the_last_one_in_force(revocation, ca) -> None:
    revocation.start(ca)
    listed = revocation.folder / "crl.pem"
    revocation.ca.write_list(listed, revocation.cert)
    revocation.await_refusal()

    listed.write_text("garbage")
    server = revocation.server
    wait_until(lambda: server.metric("logprobd_tls_revocation_problems") > 0, "not counted")

    revocation.await_refusal()
    assert "crl.pem" in "".join(server.log) or ".r0" in "".join(server.log)
    revocation.ca.write_list(listed)
    wait_until(lambda: server.metric("logprobd_tls_revocation_problems") == 0, "not mended")


def test_an_expired_list_refuses_the_clients_of_its_ca_and_says_so(revocation, ca) -> None:
    revocation.ca.write_list(revocation.folder / "crl.pem", is_expired=True)
    revocation.start(ca)
    server = revocation.server
    assert is_refused(server, revocation.stayer)
    assert "a revocation list has expired, so all clients of its CA are refused" in "".join(
        server.log
    )
    assert server.metric("logprobd_tls_revocation_expiry_timestamp_seconds") < time.time()
    assert server.metric("logprobd_tls_refused_certificates_total", reason="list_expired") >= 1

    revocation.ca.write_list(revocation.folder / "crl.pem")
    wait_until(lambda: not is_refused(server, revocation.leaver), "a new list has no effect")


def test_a_server_that_cannot_be_trusted_is_refused_with_a_reason(
    binaries, start, ca, pair, tmp_path
) -> None:
    server = start(pair)
    other = Authority(tmp_path, "other")
    elsewhere = start(ca.issue("elsewhere", hosts="DNS:elsewhere.example"))
    alone = start(self_signed(tmp_path, "alone"))
    for address, tls, reason in (
        (server.grpc, Tls(ca=other.cert), "is not trusted"),
        (alone.grpc, Tls(ca=ca.cert), "is not trusted"),
        (elsewhere.grpc, Tls(ca=ca.cert), "does not contain the host"),
    ):
        assert reason in refusal(address, tls)
        cli = logprobctl(binaries, "ping", "--address", address, *flags(tls))
        assert cli.returncode == 1
        assert reason in cli.stderr, cli.stderr
    named = Tls(ca=ca.cert, server_name="elsewhere.example")
    with client(elsewhere.grpc, named) as connected:
        score(connected)
    assert logprobctl(binaries, "ping", "--address", elsewhere.grpc, *flags(named)).returncode == 0


def test_a_looked_up_name_is_that_of_the_certificate(start, ca) -> None:
    server = start(ca.issue("named", hosts="DNS:localhost"))
    port = server.grpc.rpartition(":")[2]
    address = f"dns:///localhost:{port}"
    with client(address, Tls(ca=ca.cert)) as connected:
        score(connected)
    assert "does not contain the host" in refusal(f"127.0.0.1:{port}", Tls(ca=ca.cert))
    with client(address, Tls(ca=ca.cert, server_name="elsewhere")) as connected:
        with pytest.raises(logprobd.LogprobdError, match="does not contain the host"):
            connected.list_heads()


def test_tls_at_one_side_only_is_refused_with_a_reason(
    binaries, start, start_server, model, ca, pair
) -> None:
    secure = start(pair)
    plain = start_server("--model", str(model.path))
    assert "--tls-cert" in refusal(secure.grpc, None)
    assert "speaks no TLS" in refusal(plain.grpc, Tls(ca=ca.cert))
    for address, tls in ((secure.grpc, Tls()), (plain.grpc, Tls(ca=ca.cert))):
        cli = logprobctl(binaries, "ping", "--address", address, *flags(tls))
        assert cli.returncode == 1
        assert "--tls-cert" in cli.stderr, cli.stderr
    with client(secure.grpc, Tls(ca=ca.cert)) as one, client(plain.grpc, None) as other:
        np.testing.assert_array_equal(score(one), score(other))


def test_versions_before_tls_1_2_are_refused(start, pair) -> None:
    server = start(pair)

    def handshake(*options: str) -> str:
        return subprocess.run(
            ["openssl", "s_client", "-connect", server.grpc, "-alpn", "h2",
             "-cipher", "DEFAULT@SECLEVEL=0", *options],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=20,
        ).stdout.decode(errors="replace")  # fmt: skip

    assert "Protocol  : TLSv1.2" in handshake("-tls1_2")
    assert "New, TLSv1.3" in handshake()
    assert "Cipher is (NONE)" in handshake("-tls1_1")


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        ({"cert": "missing"}, r"--tls-cert: \S+ cannot be read: No such file"),
        ({"key": "missing"}, r"--tls-key: \S+ cannot be read: No such file"),
        ({"key": "other.key"}, r"--tls-key: \S+ is not the key of the certificate"),
        ({"cert": "expired.pem", "key": "expired.key"}, r"expired at 2021"),
        ({"cert": "server.key"}, r"contains no PEM certificate"),
    ],
)
def test_a_server_without_a_usable_certificate_does_not_start(
    binaries, model, ca, pair, replace, reason
) -> None:
    ca.issue("other")
    ca.issue("expired", end="20210101000000Z")
    names = {"cert": "server.pem", "key": "server.key"} | replace
    result = subprocess.run(
        [
            str(binaries / "logprobd"), "--model", str(model.path), "--device", "cpu",
            "--listen", "127.0.0.1:0", "--http", "none",
            "--tls-cert", str(ca.folder / names["cert"]), "--tls-key", str(ca.folder / names["key"]),
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1
    assert re.search(f"logprobd: error: .*{reason}", result.stderr), result.stderr


def test_a_public_address_needs_client_certificates(binaries, start, ca, pair, client_tls) -> None:
    start(pair, "--tls-client-ca", ca.cert, "--listen", "0.0.0.0:0", "--admin", "0.0.0.0:0")
    for option in ("--listen", "--admin"):
        result = subprocess.run(
            [str(binaries / "logprobd"), "--model", "x", "--tls-cert", str(pair[0]), "--tls-key",
             str(pair[1]), option, "0.0.0.0:0"],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert result.returncode == 2
        assert option in result.stderr and "--tls-client-ca" in result.stderr


def test_certificates_rotate_under_load_without_a_failed_call(start, ca, tmp_path) -> None:
    live = (tmp_path / "live.pem", tmp_path / "live.key")
    install(ca.issue("first"), live)
    server = start(live)

    rotation = rotate(server, ca, live, count=24, await_every=6)

    assert not rotation.failures
    assert min(rotation.calls) > 24
    assert server.metric("logprobd_tls_reloads_total", result="ok") >= 4


def test_a_bad_pair_leaves_the_old_one_in_use(start, ca, tmp_path) -> None:
    first, second = ca.issue("before"), ca.issue("after")
    live = (tmp_path / "live.pem", tmp_path / "live.key")
    for source, target in zip(first, live, strict=True):
        shutil.copy(source, target)
    server = start(live)

    shutil.copy(second[1], live[1])  # a key without its certificate
    wait_until(
        lambda: server.metric("logprobd_tls_reloads_total", result="failed") == 1, "not counted"
    )

    assert served_certificate(server.grpc) == certificate_in(first[0])
    assert "is not the key of the certificate" in "".join(server.log)
    with client(server.grpc, Tls(ca=ca.cert)) as connected:
        score(connected)
    shutil.copy(second[0], live[0])
    wait_until(lambda: served_certificate(server.grpc) == certificate_in(second[0]), "not served")
    assert server.metric("logprobd_tls_reloads_total", result="failed") == 1
