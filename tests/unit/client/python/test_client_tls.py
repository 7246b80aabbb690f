"""Tls: the files of a client, and the advice when a connection is refused."""

import pickle

import logprobd
import pytest
from logprobd import InvalidArgument, Tls
from logprobd.errors import refuses_tls, tls_hint
from tls_certificates import Authority


@pytest.fixture(scope="module")
def ca(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def wrong(tls: Tls | None) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as error:
        logprobd.Client("127.0.0.1:1", tls=tls)
    return error.value


def test_valid_files_make_a_client_that_can_be_pickled(ca) -> None:
    cert, key = ca.issue("client")
    with logprobd.Client("127.0.0.1:1", tls=Tls(ca=ca.cert, cert=cert, key=key)) as client:
        data = pickle.dumps(client)
    assert b"PRIVATE KEY" not in data
    pickle.loads(data).close()


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    error = wrong(Tls(ca=tmp_path / "nothing.pem"))
    assert error.field == "tls.ca"
    assert f"{tmp_path}/nothing.pem cannot be read: No such file" in str(error)


def test_files_that_are_not_pem_are_refused(ca, tmp_path) -> None:
    text = tmp_path / "text"
    text.write_text("text")
    cert, key = ca.issue("client")
    assert "contains no usable PEM certificate" in str(wrong(Tls(ca=text)))
    assert "not a PEM certificate and a PEM private key" in str(wrong(Tls(cert=text, key=key)))
    assert "not a PEM certificate and a PEM private key" in str(wrong(Tls(cert=cert, key=text)))


def test_a_certificate_and_its_key_belong_together(ca) -> None:
    (cert, key), (_, other_key) = ca.issue("client"), ca.issue("other")
    assert "tls.cert needs tls.key" in str(wrong(Tls(cert=cert)))
    assert "tls.key needs tls.cert" in str(wrong(Tls(key=key)))
    assert "is not the key of the certificate" in str(wrong(Tls(cert=cert, key=other_key)))


@pytest.fixture
def variables(monkeypatch):
    """Sets variables LOGPROBD_TLS_*, of which no others are set."""

    def set_variables(**values: object) -> None:
        for name in ("CA", "CERT", "KEY", "SERVER_NAME"):
            monkeypatch.delenv(f"LOGPROBD_TLS_{name}", raising=False)
        for name, value in values.items():
            monkeypatch.setenv(f"LOGPROBD_TLS_{name}", str(value))

    return set_variables


def test_the_environment_sets_tls_and_an_argument_replaces_all_of_it(ca, variables) -> None:
    cert, key = ca.issue("client")
    variables(CA=ca.cert, CERT=cert, KEY=key, SERVER_NAME="scorer")
    whole = Tls(ca=str(ca.cert), cert=str(cert), key=str(key), server_name="scorer")

    for make in (logprobd.Client, logprobd.AsyncClient):
        assert make("scorer:1")._settings.tls == whole
        assert make("scorer:1", tls=Tls(ca=ca.cert))._settings.tls == Tls(ca=ca.cert)
        assert make("scorer:1", tls=False)._settings.tls is None
    variables(SERVER_NAME="scorer")
    assert logprobd.Client("scorer:1")._settings.tls == Tls(server_name="scorer")
    variables(CA="")
    assert logprobd.Client("scorer:1")._settings.tls is None


def test_a_wrong_file_of_the_environment_is_named(ca, variables, tmp_path) -> None:
    variables(CA=tmp_path / "nothing.pem")
    assert "nothing.pem cannot be read" in str(wrong(None))
    with pytest.raises(InvalidArgument, match="nothing.pem cannot be read"):
        logprobd.WeightsClient("127.0.0.1:1")
    variables(CERT=ca.issue("client")[0])
    assert "tls.cert needs tls.key (LOGPROBD_TLS_KEY), too" in str(wrong(None))


def test_tls_must_be_a_tls() -> None:
    assert wrong(True).field == "tls"  # type: ignore[arg-type]


def test_an_async_client_checks_the_files_when_it_is_made(tmp_path) -> None:
    with pytest.raises(InvalidArgument):
        logprobd.AsyncClient("127.0.0.1:1", tls=Tls(ca=tmp_path / "nothing.pem"))


def test_only_a_failure_to_connect_gets_advice_about_tls() -> None:
    assert tls_hint("Socket closed") == ""
    assert tls_hint(None) == ""
    assert "--tls-cert" in tls_hint("failed to connect to all addresses; Socket closed")


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (None, False),
        ("CERTIFICATE_VERIFY_FAILED", False),
        ("failed to connect to all addresses; Connection refused", False),
        ("failed to connect to all addresses; Socket closed", False),
        ("failed to connect to all addresses; Connection reset by peer", False),
        ("failed to connect to all addresses; SSL: CERTIFICATE_VERIFY_FAILED", True),
        ("failed to connect to all addresses; Hostname Verification Check failed", True),
        ("failed to connect to all addresses; WRONG_VERSION_NUMBER", True),
    ],
)
def test_only_a_handshake_that_failed_for_good_is_a_refusal(details, expected) -> None:
    assert refuses_tls(details) == expected
