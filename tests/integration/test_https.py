"""HTTPS and tokens of the HTTP listener: who gets which page, what a public address needs, and the rotation of
certificates."""

import base64
import contextlib
import http.client
import itertools
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import pytest
from certificate_rotation import certificate_in, install, served_certificate
from prometheus_server import PrometheusServer
from scoring_rpc import ROOT
from token_file import TokenFile

pytestmark = pytest.mark.timeout(120)

HTTPS = ("--http", "https://127.0.0.1:0")
PAGES = ("/metrics", "/", "/?format=html", "/nothing")
CONNECTIONS_MAX = 64
TIME_MAX_SECONDS = 10  # of a connection

# A ClientHello of 16 MiB, the first 60 KB of it, in records of at most 16 KiB. The server reads 64 KiB at most.
_HELLO = b"\x01\xff\xff\xff\x03\x03" + bytes(60_000)
_RECORDS = [_HELLO[at : at + 16_384] for at in range(0, len(_HELLO), 16_384)]
BEGUN_HELLO = b"".join(b"\x16\x03\x01" + len(each).to_bytes(2, "big") + each for each in _RECORDS)


@pytest.fixture
def start(start_server, model, ca):
    """Starts a server with a certificate and its key."""

    def run(pair, *options: str, **keywords):
        server = start_server(
            *("--model", str(model.path), "--tls-cert", str(pair[0]), "--tls-key", str(pair[1])),
            *options, **keywords,
        )  # fmt: skip
        server.http_ca = ca.cert
        return server

    return run


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


class Asker:
    """Sends requests with chosen headers to a server's HTTP listener, over TLS where that has it."""

    def __init__(self, server) -> None:
        self._is_https = server.http.startswith("https://")
        self._address = server.http.removeprefix("https://")
        self._context = ssl.create_default_context(cafile=server.http_ca)

    def ask(self, path: str, authorization: str | None = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        more = {"context": self._context} if self._is_https else {}
        connection = kind(self._address, timeout=20, **more)
        connection.request(
            "GET", path, headers={"Authorization": authorization} if authorization else {}
        )
        response = connection.getresponse()
        response.text = response.read().decode()
        connection.close()
        return response


@pytest.mark.parametrize("address", ["https://127.0.0.1:0", "127.0.0.1:0"])
def test_pages_need_a_token_with_the_scope_metrics_and_health_needs_none(
    start, pair, tokens, address: str
) -> None:
    scrape, score = tokens.add("monitor", "metrics"), tokens.add("trainer", "score")
    old = tokens.add("old", "metrics", not_after="2020-01-01T00:00:00Z")
    server = start(pair, "--tokens", str(tokens.path), "--http", address)
    asker = Asker(server)

    refused = itertools.count()
    for path in PAGES:
        for wrong in (None, "Bearer wrong", f"Bearer {old}", basic("x", "wrong"), scrape, "Basic"):
            response = asker.ask(path, wrong)
            assert response.status == 401, (path, wrong)
            assert response.headers.get_all("WWW-Authenticate") == [
                "Bearer",
                'Basic realm="logprobd"',
            ]
            next(refused)
        for lacking in (f"Bearer {score}", basic("x", score)):
            response = asker.ask(path, lacking)
            assert response.status == 403, path
            assert 'token "trainer" lacks the scope metrics' in response.text
        expected = 404 if path == "/nothing" else 200
        for right in (f"Bearer {scrape}", basic("prometheus", scrape), basic("", scrape)):
            assert asker.ask(path, right).status == expected, path
    for path in ("/healthz", "/readyz"):
        for anything in (None, "Bearer wrong"):
            assert asker.ask(path, anything).status == 200

    server.http_token = scrape
    counted = server.metric("logprobd_rejected_total", reason="unauthenticated")
    assert counted == next(refused)
    lacking = server.metric("logprobd_rejected_total", reason="permission_denied")
    assert lacking == 2 * len(PAGES)
    lines = [line for line in server.log if "a call was refused" in line]
    assert all(" certificate=none peer=ipv4:127.0.0.1:" in line for line in lines)
    assert 1 <= len(lines) <= 21  # 20 in 10 s
    assert not any(secret in line for secret in (scrape, score, old) for line in server.log)


def test_sighup_reads_the_tokens_of_pages_again(start, pair, tokens) -> None:
    first = tokens.add("first", "metrics")
    server = start(pair, "--tokens", str(tokens.path), *HTTPS)
    asker = Asker(server)
    later = TokenFile(tokens.path)
    second = later.add("second", "metrics")

    server.signal(signal.SIGHUP)

    assert server.eventually(lambda: asker.ask("/metrics", f"Bearer {second}").status == 200)
    assert asker.ask("/metrics", f"Bearer {first}").status == 401


def test_without_tokens_https_is_open_and_needs_no_client_certificate(start, ca, pair) -> None:
    server = start(pair, "--tls-client-ca", str(ca.cert), *HTTPS)

    for path in ("/metrics", "/", "/healthz"):
        assert server.get(path)[0] == 200
    assert f"http={server.http}" in "".join(server.log)
    assert server.http.startswith("https://127.0.0.1:")


def test_http_on_loopback_stays_plain_beside_tls(start, pair) -> None:
    server = start(pair)

    assert not server.http.startswith("https")
    assert server.get("/metrics")[0] == 200


def test_versions_before_tls_1_2_are_refused(start, pair) -> None:
    server = start(pair, *HTTPS)

    def handshake(*options: str) -> str:
        address = server.http.removeprefix("https://")
        return subprocess.run(
            ["openssl", "s_client", "-connect", address, "-cipher", "DEFAULT@SECLEVEL=0", *options],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=20,
        ).stdout.decode(errors="replace")  # fmt: skip

    assert "Protocol  : TLSv1.2" in handshake("-tls1_2")
    assert "New, TLSv1.3" in handshake()
    assert "Cipher is (NONE)" in handshake("-tls1_1")


def test_a_public_address_needs_https_and_tokens_or_insecure(binaries, start, pair, tokens) -> None:
    tokens.add("monitor", "metrics")
    with_tls = ("--tls-cert", str(pair[0]), "--tls-key", str(pair[1]))
    with_tokens = ("--tokens", str(tokens.path))
    way_out = "pass --insecure to allow that, or use a loopback address such as 127.0.0.1"
    for options, reason in (
        (
            ("--http", "0.0.0.0:0"),
            "can be reached from other hosts without authentication over TLS; write "
            f"https://0.0.0.0:0 and give --tls-cert, --tls-key and --tokens, {way_out}",
        ),
        (
            ("--http", "https://0.0.0.0:0", *with_tls),
            "can be reached from other hosts without authentication over TLS; give --tls-cert, "
            f"--tls-key and --tokens, {way_out}",
        ),
        (
            ("--http", "0.0.0.0:0", *with_tls, *with_tokens, "--insecure"),
            "tokens would cross the network unencrypted; write https://0.0.0.0:0 and give --tls-cert",
        ),
        (("--http", "https://127.0.0.1:0"), "needs --tls-cert and --tls-key, too"),
    ):
        result = subprocess.run(
            [str(binaries / "logprobd"), "--model", "x", *options],
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert result.returncode == 2, options
        assert f"--http: {options[1]} " in result.stderr
        assert reason in result.stderr, result.stderr
    server = start(pair, *with_tokens, "--http", "https://0.0.0.0:0", "--listen", "0.0.0.0:0")
    assert not any("--insecure" in line for line in server.log)
    for options in (("--http", "0.0.0.0:0"), ("--http", "https://0.0.0.0:0")):
        server = start(pair, *options, "--insecure")
        server.http_ca = None  # the certificate does not contain 0.0.0.0
        assert server.metric("logprobd_insecure_listener", flag="--http") == 1
        assert any("--http is open to everyone who reaches it" in line for line in server.log)


def open_silent(address: tuple[str, int], index: int) -> socket.socket:
    """Opens a connection that never finishes its handshake, from one of several addresses."""
    connection = socket.create_connection(
        address, timeout=20, source_address=(f"127.0.0.{2 + index % 2}", 0)
    )
    connection.sendall(BEGUN_HELLO[: (0, 6, 3_000, len(BEGUN_HELLO))[index % 4]])
    return connection


def test_g116_handshakes_that_never_end_are_cut_and_delay_no_probe(start, pair) -> None:
    server = start(pair, *HTTPS)
    host, port = server.http.removeprefix("https://").rsplit(":", 1)
    server.get("/metrics")
    before = server.reset_peak_memory()

    begun = time.monotonic()
    silent = [open_silent((host, int(port)), index) for index in range(CONNECTIONS_MAX)]
    try:
        while time.monotonic() < begun + 3:
            asked = time.monotonic()
            assert server.get("/healthz")[0] == 200
            assert server.get("/readyz")[0] == 200
            assert time.monotonic() - asked < 2
        for connection in silent:
            # What probes did not displace is cut when its time is over.
            connection.settimeout(begun + TIME_MAX_SECONDS + 10 - time.monotonic())
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert time.monotonic() - begun > TIME_MAX_SECONDS - 1
    finally:
        for connection in silent:
            connection.close()
    # server/http/README.md has measured 5.4 MiB.
    assert server.peak_memory_bytes() - before < 16 << 20


def test_g116_a_handshake_without_end_is_cut_in_bounded_memory(start, pair) -> None:
    server = start(pair, *HTTPS)
    host, port = server.http.removeprefix("https://").rsplit(":", 1)
    record = b"\x16\x03\x01\x40\x00" + bytes(16_384)
    server.get("/metrics")
    before = server.reset_peak_memory()

    for _ in range(CONNECTIONS_MAX):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            with pytest.raises(OSError, match="reset|Broken pipe"):
                connection.sendall(BEGUN_HELLO)
                for _ in range(1_000):  # up to the 16 MiB that the ClientHello announces
                    connection.sendall(record)

    assert server.get("/healthz")[0] == 200
    assert server.peak_memory_bytes() - before < 16 << 20


def test_g117_certificates_rotate_under_probes_without_a_failed_one(start, ca, tmp_path) -> None:
    live = (tmp_path / "live.pem", tmp_path / "live.key")
    install(ca.issue("first"), live)
    server = start(live, *HTTPS)
    host, port = server.http.removeprefix("https://").rsplit(":", 1)
    stop = threading.Event()
    failures: list[str] = []
    answered = itertools.count()

    def probe() -> None:
        while not stop.is_set():
            try:
                assert server.get("/healthz")[0] == 200
                assert server.get("/metrics")[0] == 200
                next(answered)
            except (AssertionError, OSError) as error:
                failures.append(repr(error))
                return

    threads = [threading.Thread(target=probe) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for rotation in range(12):
            cert, key = ca.issue(f"rotation-{rotation}")
            install((cert, key), live)
            if rotation % 2:
                server.signal(signal.SIGHUP)
            if rotation % 4 == 3:
                expected = cert.read_text()
                assert server.eventually(
                    lambda: ssl.get_server_certificate((host, int(port)), timeout=20) == expected,  # noqa: B023
                    seconds=30,
                )
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert next(answered) > 12
    # A connection that an earlier certificate protects has ended, and so have its files.
    assert server.eventually(lambda: server.metric("process_open_fds") < 100, seconds=20)


def test_g117_a_pair_that_https_alone_refuses_changes_neither_listener(start, ca, tmp_path) -> None:
    live = (tmp_path / "live.pem", tmp_path / "live.key")
    first, odd, good = ca.issue("first"), ca.issue("odd", curve="secp256k1"), ca.issue("good")
    install(first, live)
    server = start(live, *HTTPS)
    listeners = (server.grpc, server.http.removeprefix("https://"))

    def all_serve(pair) -> bool:
        return all(served_certificate(each) == certificate_in(pair[0]) for each in listeners)

    install(odd, live)  # OpenSSL knows its curve, and GnuTLS does not
    assert server.eventually(
        lambda: server.metric("logprobd_tls_reloads_total", result="failed") == 1
    )
    server.wait_for_log("--http: TLS cannot use the certificate")
    assert all_serve(first)
    install(good, live)
    assert server.eventually(lambda: all_serve(good), seconds=30)

    assert server.metric("logprobd_tls_reloads_total", result="ok") == 1
    assert server.metric("logprobd_tls_reloads_total", result="failed") == 1


def test_a_killed_server_leaves_no_copy_of_its_key(start, pair, tmp_path) -> None:
    server = start(pair, *HTTPS, environment={"TMPDIR": str(tmp_path)})
    assert server.get("/healthz")[0] == 200

    server.signal(signal.SIGKILL)
    server.wait()

    assert list(tmp_path.iterdir()) == []


def test_prometheus_scrapes_over_https_with_a_token(start, ca, pair, tokens, tmp_path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is missing: install the package prometheus")
    (tmp_path / "token").write_text(tokens.add("monitor", "metrics"))
    server = start(pair, "--tokens", str(tokens.path), *HTTPS)
    rules = ROOT / "deploy" / "monitoring" / "prometheus" / "logprobd.rules.yml"
    target = server.http.removeprefix("https://")
    tls = {"scheme": "https", "tls_config": {"ca_file": str(ca.cert)}}
    for name, scrape, is_up in (
        ("bearer", {"authorization": {"credentials_file": str(tmp_path / "token")}}, 1),
        ("none", {}, 0),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with PrometheusServer(folder, {"logprobd": [target]}, rules, **tls, **scrape) as scraping:
            values = scraping.wait_for_values("up", 20, above_zero=bool(is_up))
            assert values == [is_up], name
