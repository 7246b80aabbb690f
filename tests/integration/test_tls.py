"""TLS between the server and its clients: who is let in, what a refusal says, and the rotation of certificates."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import time

import logprobd
import numpy as np
import pytest
from certificate_rotation import certificate_in, install, rotate, served_certificate
from logprobd import Tls
from tls_certificates import Authority, self_signed

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


def await_true(condition, what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


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


def test_a_revoked_client_is_refused(start, ca, pair, client_tls, tmp_path) -> None:
    revoked, key = ca.issue("revoked")
    ca.write_revocations(tmp_path / "crl")
    server = start(pair, "--tls-client-ca", ca.cert, "--tls-crl-dir", tmp_path / "crl")
    with client(server.grpc, Tls(ca=ca.cert, cert=revoked, key=key)) as connected:
        score(connected)

    shutil.rmtree(tmp_path / "crl")
    ca.write_revocations(tmp_path / "crl", revoked)
    server.signal(signal.SIGHUP)

    def is_refused() -> bool:
        with client(server.grpc, Tls(ca=ca.cert, cert=revoked, key=key)) as connected:
            try:
                connected.list_heads()
            except logprobd.Unavailable:
                return True
        return False

    await_true(is_refused, "the revoked certificate is still accepted")
    with client(server.grpc, client_tls) as connected:
        score(connected)


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
    await_true(
        lambda: server.metric("logprobd_tls_reloads_total", result="failed") == 1, "not counted"
    )

    assert served_certificate(server.grpc) == certificate_in(first[0])
    assert "is not the key of the certificate" in "".join(server.log)
    with client(server.grpc, Tls(ca=ca.cert)) as connected:
        score(connected)
    shutil.copy(second[0], live[0])
    await_true(lambda: served_certificate(server.grpc) == certificate_in(second[0]), "not served")
    assert server.metric("logprobd_tls_reloads_total", result="failed") == 1
