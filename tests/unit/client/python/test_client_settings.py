"""Arguments override the environment, which overrides the defaults."""

import queue
import re
from pathlib import Path

import grpc
import pytest
from logprobd import Client, InvalidArgument
from logprobd import settings as settings_module

ROOT = Path(__file__).resolve().parents[4]


def settings(*args, **kwargs):
    return Client(*args, **kwargs)._settings


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("ADDRESS", "TIMEOUT_S", "MAX_INFLIGHT", "TRANSPORT", "TOKEN"):
        monkeypatch.delenv(f"LOGPROBD_{name}", raising=False)


def test_defaults():
    chosen = settings()

    assert (chosen.address, chosen.timeout, chosen.max_inflight) == ("127.0.0.1:8470", 300.0, 8)


def test_the_environment_is_read_and_arguments_win(monkeypatch):
    monkeypatch.setenv("LOGPROBD_ADDRESS", "scorer:9000")
    monkeypatch.setenv("LOGPROBD_TIMEOUT_S", "2.5")
    monkeypatch.setenv("LOGPROBD_MAX_INFLIGHT", "3")

    chosen, given = settings(), settings("other:1", timeout=7, max_inflight=1)

    assert (chosen.address, chosen.timeout, chosen.max_inflight) == ("scorer:9000", 2.5, 3)
    assert (given.address, given.timeout, given.max_inflight) == ("other:1", 7, 1)


@pytest.mark.parametrize(
    ("name", "value"), [("TIMEOUT_S", "soon"), ("TIMEOUT_S", "-1"), ("MAX_INFLIGHT", "0")]
)
def test_a_bad_variable_is_named(monkeypatch, name, value):
    monkeypatch.setenv(f"LOGPROBD_{name}", value)

    with pytest.raises(InvalidArgument, match=f"LOGPROBD_{name} is "):
        Client()


@pytest.mark.parametrize("name", ["timeout", "max_inflight", "channels", "chunk_rows"])
def test_a_bad_argument_is_named(name):
    with pytest.raises(InvalidArgument, match=name):
        Client(**{name: 0})


@pytest.mark.parametrize("client_id", ["", "a\nb", "ü", "x" * 65])
def test_a_client_id_that_cannot_travel_is_refused(client_id):
    with pytest.raises(InvalidArgument, match="client_id"):
        Client(client_id=client_id)


def test_the_longest_client_id_is_accepted():
    client_id = "x" * settings_module.CLIENT_ID_LENGTH_MAX

    assert settings(client_id=client_id).metadata == (("client_id", client_id),)


def test_the_longest_token_is_accepted_and_a_longer_one_is_refused():
    token = "x" * settings_module.TOKEN_LENGTH_MAX

    assert settings(token=token).metadata == (("authorization", f"Bearer {token}"),)
    with pytest.raises(InvalidArgument, match="token has"):
        Client(token=token + "x")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("scorer", "scorer:8470"),
        ("scorer:1", "scorer:1"),
        ("[::1]:2", "[::1]:2"),
        ("[::1]", "[::1]:8470"),
        ("unix:/run/l.sock", "unix:/run/l.sock"),
        ("dns:///scorer:3", "dns:///scorer:3"),
    ],
)
def test_addresses(given, used):
    assert settings(given).address == used


@pytest.mark.parametrize(
    ("given", "variable", "chosen"),
    [
        (None, "", "auto"),
        (None, "shm", "shm"),
        ("tcp", "shm", "tcp"),
        ("cuda_ipc", "", "cuda-ipc"),
        ("CUDA-IPC", "", "cuda-ipc"),
    ],
)
def test_transports(monkeypatch, given, variable, chosen):
    monkeypatch.setenv("LOGPROBD_TRANSPORT", variable)

    assert settings(transport=given).transport == chosen


def test_an_unknown_transport_is_refused_by_the_name_it_was_given_under(monkeypatch):
    with pytest.raises(InvalidArgument, match='transport is "rdma": use one of auto, tcp'):
        Client(transport="rdma")

    monkeypatch.setenv("LOGPROBD_TRANSPORT", "fast")
    with pytest.raises(InvalidArgument, match='LOGPROBD_TRANSPORT is "fast"'):
        Client()


@pytest.mark.parametrize("address", ["a:1,b:1", "dns:///a:1"])
@pytest.mark.parametrize("transport", ["shm", "cuda-ipc"])
def test_a_same_host_transport_cannot_be_forced_for_several_servers(
    monkeypatch, address, transport
):
    with pytest.raises(InvalidArgument, match=f'transport is "{transport}".*several servers'):
        Client(address, transport=transport)

    monkeypatch.setenv("LOGPROBD_TRANSPORT", transport)
    with pytest.raises(InvalidArgument, match=f'LOGPROBD_TRANSPORT is "{transport}"'):
        Client(address)
    assert settings(address=address, transport="tcp").transport == "tcp"


@pytest.mark.parametrize("address", ["", []])
def test_no_address_is_not_the_default_one(monkeypatch, address):
    # Regression: an empty list of addresses meant the default server.
    with pytest.raises(InvalidArgument, match="address"):
        Client(address)

    monkeypatch.setenv("LOGPROBD_ADDRESS", "")
    assert settings().address == "127.0.0.1:8470"


def test_a_url_is_refused():
    with pytest.raises(InvalidArgument, match="host:port"):
        Client("http://scorer:1")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("localhost:1", True),
        ("127.0.0.2:1", True),
        ("[::1]:1", True),
        ("unix:/a", True),
        ("scorer:1", False),
    ],
)
def test_proxies_are_bypassed_on_loopback(address, loopback):
    assert (
        ("grpc.enable_http_proxy", 0) in settings(address).channel_options(address, 0)
    ) == loopback


def test_a_proxy_in_the_environment_does_not_break_loopback(server, rows, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    with Client(server.address, timeout=5) as client:
        assert client.score(*rows).logprob.shape == (10,)


def test_a_host_that_vanished_is_noticed():
    # Regression: requests to such a host waited until the timeout of their call.
    options = dict(settings("scorer:1").channel_options("scorer:1", 0))

    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == 40_000


# Regression: the server closed such connections, and gRPC wrote "Got goaway" to stderr.
def test_an_idle_connection_is_closed_by_the_client_before_the_server_does(
    server, rows, monkeypatch
):
    header = (ROOT / "server" / "transport" / "grpc_server.h").read_text()
    (minutes,) = re.findall(r"connection_idle_ms_max = (\d+) \* 60'000;", header)
    assert settings_module.IDLE_TIMEOUT_MS < int(minutes) * 60_000
    monkeypatch.setattr(settings_module, "IDLE_TIMEOUT_MS", 1_000)  # the least that gRPC takes
    states = queue.Queue()

    with Client(server.address, timeout=20) as client:
        client.score(*rows)
        (channels,) = client._pool._channels.values()
        channels.opened[0].subscribe(states.put)
        while states.get(timeout=60) != grpc.ChannelConnectivity.IDLE:
            pass

        assert client.score(*rows).logprob.shape == (10,)


def test_channels_differ_so_that_each_has_its_connection():
    options = [tuple(settings().channel_options("scorer:1", index)) for index in range(4)]

    assert len(set(options)) == 4
