"""serve starts a server, waits until it is ready, and stops it."""

import importlib
import os
import sys
from pathlib import Path

import logprobd
import pytest
from logprobd.testing import FakeServer

serve_module = importlib.import_module("logprobd.serve")

# Takes the place of the server's program. Its first lines say what it does.
PROGRAM = """#!{python}
import os, pathlib, signal, sys, time
pathlib.Path({folder!r}, "arguments").write_text("\\n".join(sys.argv[1:]))
def stop(*_):
    pathlib.Path({folder!r}, "stopped").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
print("2026-01-01T00:00:00.000Z info starting version=0.2.0", file=sys.stderr, flush=True)
{action}
"""
READY = """
print("2026-01-01T00:00:00.000Z info ready head=default grpc={address} http=none", file=sys.stderr, flush=True)
"""
READY_AS_JSON = """
print('{{"level":"info","message":"ready","head":"default","grpc":"{address}"}}', file=sys.stderr, flush=True)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Returns a function that replaces the server's program by one that performs an action."""

    def replace(action: str) -> Path:
        path = tmp_path / "logprobd"
        path.write_text(PROGRAM.format(python=sys.executable, folder=str(tmp_path), action=action))
        path.chmod(0o755)
        monkeypatch.setitem(sys.modules, "logprobd_server", None)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    return replace


def test_the_block_gets_a_client_of_the_server_which_stops_after_it(program):
    with FakeServer() as fake:
        folder = program(READY.format(address=fake.address) + "\nwhile True: time.sleep(60)")
        with logprobd.serve("model", device="cpu", flags=["--cpu-threads", "1"]) as client:
            assert client.info().hidden_size > 0
            assert not (folder / "stopped").exists()

    assert (folder / "stopped").exists()
    arguments = (folder / "arguments").read_text().split("\n")
    assert arguments[:4] == ["--model", "model", "--device", "cpu"]
    assert arguments[-2:] == ["--cpu-threads", "1"]
    assert "127.0.0.1:0" in arguments


def test_the_server_takes_no_tls_and_no_token_from_the_variables_of_clients(program, monkeypatch):
    for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME", "TOKEN"):
        monkeypatch.setenv(f"LOGPROBD_{name}", "of-a-client")
    monkeypatch.setenv("LOGPROBD_BATCH_ROWS", "64")
    note = 'pathlib.Path({!r}, "variables").write_text("\\n".join(os.environ))'
    with FakeServer() as fake:
        folder = program("")
        ready = READY.format(address=fake.address) + "\nwhile True: time.sleep(60)"
        program(note.format(str(folder)) + ready)
        with logprobd.serve("model") as client:
            assert client.info().hidden_size > 0  # over plaintext

    ours = {name for name in (folder / "variables").read_text().split() if "LOGPROBD_" in name}
    assert "LOGPROBD_BATCH_ROWS" in ours
    assert not {name for name in ours if "TLS" in name or "TOKEN" in name}


def test_the_log_may_be_json(program):
    with FakeServer() as fake:
        program(READY_AS_JSON.format(address=fake.address) + "\nwhile True: time.sleep(60)")
        with logprobd.serve("model", flags=["--log-format", "json"], timeout=30) as client:
            assert client.info().hidden_size > 0


def test_without_a_model_a_demo_model_is_served_and_removed(program):
    folder = program(READY.format(address="127.0.0.1:1") + "\nwhile True: time.sleep(60)")

    with logprobd.serve():
        model = Path((folder / "arguments").read_text().split("\n")[1])
        assert (model / "config.json").exists()

    assert not model.exists()


def test_a_server_that_exits_is_an_error_with_its_log(program):
    program("print('logprobd: error: no such model', file=sys.stderr)\nsys.exit(3)")

    with (
        pytest.raises(RuntimeError, match="exited with status 3") as caught,
        logprobd.serve("model"),
    ):
        pass

    assert "starting version=0.2.0" in str(caught.value)
    assert "no such model" in str(caught.value)


def test_a_server_that_is_not_ready_in_time_is_stopped(program):
    folder = program("while True: time.sleep(60)")

    with (
        pytest.raises(TimeoutError, match=r"not ready after 0\.5 s"),
        logprobd.serve("model", timeout=0.5),
    ):
        pass

    assert (folder / "arguments").exists() <= (folder / "stopped").exists()


def test_a_server_that_does_not_stop_is_killed(program, monkeypatch):
    monkeypatch.setattr(serve_module, "_STOP_SECONDS", 0.2)
    note = 'pathlib.Path({!r}, "pid").write_text(str(os.getpid()))\n'
    with FakeServer() as fake:
        folder = program("")
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        ready = READY.format(address=fake.address) + "\nwhile True: time.sleep(60)"
        program(note.format(str(folder)) + ignore + ready)
        with logprobd.serve("model"):
            pass

    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


def test_the_address_is_that_of_the_first_line_that_says_ready(program):
    lines = READY.format(address="127.0.0.1:1") + READY.format(address="127.0.0.1:2")
    folder = program(lines + "sys.exit(4)")

    with serve_module.ServerProcess([str(folder / "logprobd")]) as server:
        ended = server.wait()
        assert server.await_ready(20) == "127.0.0.1:1"

    assert str(ended).startswith("the server exited with status 4:\n")


def test_an_error_has_the_last_20_lines_of_the_log(program):
    folder = program("[print('line', number) for number in range(21)]\nsys.exit(1)")

    with serve_module.ServerProcess([str(folder / "logprobd")]) as server:
        with pytest.raises(RuntimeError) as ended:
            server.await_ready(20)

    assert str(ended.value).splitlines()[1:] == [f"line {number}" for number in range(1, 21)]


@pytest.mark.parametrize(
    "line", ["info already head=x grpc=127.0.0.1:1", "info ready head=x", "error not ready grpc="]
)
def test_other_lines_do_not_say_ready(program, line):
    folder = program(f"print({line!r})\nsys.exit(1)")

    with serve_module.ServerProcess([str(folder / "logprobd")]) as server:
        with pytest.raises(RuntimeError, match="status 1"):
            server.await_ready(20)


def test_a_missing_server_is_an_error_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "logprobd_server", None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ModuleNotFoundError, match="pip install logprobd-server"), logprobd.serve():
        pass


def test_the_program_of_the_package_comes_first(monkeypatch, tmp_path):
    (tmp_path / "logprobd_server.py").write_text(
        "def binary(name):\n    return '/package/' + name\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "logprobd_server", raising=False)

    assert serve_module.server_program() == "/package/logprobd"
