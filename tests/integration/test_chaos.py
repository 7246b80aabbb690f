"""Tests threads that hang, processes that are stopped or killed, and files that fail: rows E112 to E115 of
tests/FAULTS.md. Whatever happens, every call is answered and the process ends or serves, in a bounded time."""

import errno
import os
import pathlib
import signal
import socket
import subprocess
import time

import grpc
import pytest
from control_socket import ControlSocket
from model_folder import ModelFolder
from scoring_rpc import ROOT, Scoring, messages, request
from unused_ports import unused_ports
from weights_rpc import Weights

Code = grpc.StatusCode
CODES = {code.value[0]: code for code in Code}
WATCHDOG_S = 0.5
# From the hang to the end of the process: the limits of the engine (6 s), the next look at the heartbeats
# (0.25 s), and at most 2 s for the last answers.
END_S = WATCHDOG_S + 10


class Faults:
    """A library that makes a function of a server fail or hang, for its environment; see faulty_calls.c."""

    def __init__(self, library: pathlib.Path, switch: pathlib.Path) -> None:
        self.library, self.switch = library, switch
        self.set(False)

    def environment(self, call: str, thread: str = "", error: int = 0) -> dict[str, str]:
        variables = {
            "LD_PRELOAD": str(self.library),
            "FAULTY_SWITCH": str(self.switch),
            "FAULTY_CALL": call,
        }
        if thread:
            variables["FAULTY_THREAD"] = thread
        if error:
            variables["FAULTY_ERRNO"] = str(error)
        return variables

    def set(self, is_on: bool) -> None:
        with open(self.switch, "r+b" if self.switch.exists() else "wb") as file:
            file.write(bytes([is_on]))


@pytest.fixture(scope="module")
def faulty_library(tmp_path_factory) -> pathlib.Path:
    library = tmp_path_factory.mktemp("library") / "faulty_calls.so"
    source = ROOT / "tests" / "support" / "faulty_calls.c"
    compiler = os.environ.get("CC", "cc")
    # A sanitizer's runtime library cannot start with another dlsym, which is needed only for a driver's calls.
    options = ("-O1", "-shared", "-fPIC", "-DNO_DRIVER_CALLS")
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    return library


@pytest.fixture
def faults(faulty_library, tmp_path) -> Faults:
    return Faults(faulty_library, tmp_path / "switch")


def is_asleep(server, thread: str) -> bool:
    """Returns whether the threads of this name of a server's process are asleep."""
    tasks = pathlib.Path(f"/proc/{server.process.pid}/task").iterdir()
    named = [task for task in tasks if (task / "comm").read_text().strip() == thread]
    states = [(task / "stat").read_text().rpartition(") ")[2][0] for task in named]
    return len(states) > 0 and set(states) == {"S"}


def code_of_stream(stream) -> grpc.StatusCode:
    """Returns how the first request of a stream ended: by an answer, or with the stream."""
    try:
        return CODES[messages().ScoreResponse.FromString(next(stream)).status_code]
    except grpc.RpcError as error:
        return error.code()


@pytest.mark.parametrize(
    ("thread", "named"),
    [
        ("engine-submit", "thread engine-rank, head default, replica 0, shard 0"),
        # It hangs where it waits for work, so that only the one who hands work to it can say that it has some.
        ("engine-finish", "thread engine-finish, head default, replica 0"),
        # It holds the lock of the queue, so that no call can be answered before the process ends.
        ("batch", "thread batch, head default"),
    ],
)
def test_e112_a_thread_that_never_returns_ends_the_process(
    start_server, model, faults, thread, named
) -> None:
    server = start_server(
        "--model",
        str(model.path),
        "--watchdog-s",
        str(WATCHDOG_S),
        environment=faults.environment("clock_gettime", thread),
    )
    data = request().SerializeToString()
    with Scoring(server.grpc) as scoring:
        watch = scoring.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        seen = [next(watch)[1]]
        assert scoring.score(request()).rows == 2
        # A thread that polls for more work would hang without a batch in its hands.
        assert server.eventually(lambda: is_asleep(server, thread))
        started = time.monotonic()
        faults.set(True)
        calls = [scoring.score_future(data) for _ in range(3)]
        stream = scoring.channel.stream_stream("/logprobd.v1.Scoring/ScoreStream")(
            iter([data]), timeout=60
        )
        seen.append(next(watch)[1])

        codes = [call.code() for call in calls]
        last = code_of_stream(stream)
        status = server.wait()

    assert time.monotonic() - started < END_S
    assert seen == [1, 2]
    assert codes == [Code.UNAVAILABLE] * 3
    assert last == Code.UNAVAILABLE
    assert status == 4
    assert any(f"the process ends: {named} has not moved for 6 s" in line for line in server.log)
    if thread != "batch":
        assert f"{named} has not moved" in calls[0].details()


@pytest.fixture
def manager(tmp_path):
    """A service manager's socket, whose `recv` returns the next message of a server."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        yield manager


def await_message(manager: socket.socket, line: str) -> None:
    while line not in manager.recv(4096).decode().splitlines():
        pass


def test_e113_a_stopped_process_is_silent_and_continues(
    start_server, model, manager, tmp_path
) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
    server = start_server(
        "--model", str(model.path), "--watchdog-s", str(WATCHDOG_S), environment=environment
    )
    with Scoring(server.grpc) as scoring:
        await_message(manager, "WATCHDOG=1")
        server.signal(signal.SIGSTOP)
        try:
            call = scoring.score_future(request().SerializeToString(), timeout=60)
            manager.settimeout(WATCHDOG_S + 7)  # a thread would have stood still for too long
            with pytest.raises(TimeoutError):
                while manager.recv(4096):  # the messages that were under way
                    pass
        finally:
            server.signal(signal.SIGCONT)
        manager.settimeout(20)

        await_message(manager, "WATCHDOG=1")
        await_message(manager, "WATCHDOG=1")

        assert call.code() == Code.OK
        assert server.process.poll() is None


@pytest.fixture
def start_swappable(start_server, model, tmp_path):
    """Returns a function that starts a server of which a second model's folder can be loaded, and that folder."""
    second = tmp_path / "second"
    second.mkdir()
    ModelFolder.write(second, vocab=1003, hidden=64, seed=2)

    def start(*options: str, **keywords):
        roots = ("--admin", "auto", "--weights-root", str(tmp_path))
        return start_server("--model", str(model.path), *roots, *options, **keywords)

    return start, second


def code_of_load(load) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as ended:
        list(load)
    return ended.value.code()


def test_e113_a_load_that_hangs_holds_up_no_scores_and_ends_with_the_grace_time(
    start_swappable, faults
) -> None:
    start, second = start_swappable
    server = start(
        "--watchdog-s",
        str(WATCHDOG_S),
        "--grace-s",
        "0.5",
        environment=faults.environment("preadv"),
    )
    with Scoring(server.grpc) as scoring, Weights(server.admin) as weights:
        faults.set(True)

        late = code_of_load(weights.load_call(second, timeout=WATCHDOG_S + 7))

        assert late == Code.DEADLINE_EXCEEDED
        assert scoring.score(request()).rows == 2
        assert server.get("/readyz")[0] == 200
        server.signal()
        assert server.wait(END_S) == 3


def test_e113_a_server_that_is_killed_in_a_load_leaves_no_call_open(
    start_swappable, faults
) -> None:
    start, second = start_swappable
    server = start(environment=faults.environment("preadv"))
    with Scoring(server.grpc) as scoring, Weights(server.admin) as weights:
        watch = scoring.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        assert next(watch)[1] == 1
        faults.set(True)
        load = weights.load_call(second)
        next(load)  # the phase in which it hangs

        server.signal(signal.SIGKILL)

        assert server.wait() == -signal.SIGKILL
        assert code_of_load(load) == Code.UNAVAILABLE
        assert code_of_load(watch) == Code.UNAVAILABLE


def test_e114_an_input_error_refuses_a_load_and_leaves_the_live_version(
    start_swappable, faults
) -> None:
    start, second = start_swappable
    server = start(environment=faults.environment("preadv", error=errno.EIO))
    with Scoring(server.grpc) as scoring, Weights(server.admin) as weights:
        before = scoring.score(request())
        faults.set(True)

        with pytest.raises(grpc.RpcError) as failed:
            weights.load(second)

        assert failed.value.code() == Code.DATA_LOSS
        assert "Input/output error" in failed.value.details()
        assert scoring.score(request()).logprob == before.logprob
        faults.set(False)
        assert weights.load(second).version == 2


def test_e114_an_input_error_at_the_start_is_one_clear_line(start_server, model, faults) -> None:
    environment = faults.environment("preadv", error=errno.EIO)
    faults.set(True)
    server = start_server("--model", str(model.path), wait=False, environment=environment)
    assert server.wait() == 1
    (line,) = [line for line in server.log if "logprobd: error: " in line]
    assert "config.json': cannot read at byte 0: Input/output error" in line


def test_e115_no_space_for_a_region_is_an_error_of_its_client_alone(
    start_server, model, faults, tmp_path
) -> None:
    server = start_server(
        "--model",
        str(model.path),
        "--local",
        str(tmp_path / "socket"),
        environment=faults.environment("fallocate", error=errno.ENOSPC),
    )
    with Scoring(server.grpc) as scoring, ControlSocket(f"{tmp_path}/socket.control") as control:
        control.hello()
        faults.set(True)

        reply, _ = control.call(create_region=messages("local").CreateRegion(bytes=4096))

        assert reply.status_code == Code.RESOURCE_EXHAUSTED.value[0]
        assert scoring.score(request()).rows == 2
        faults.set(False)
        control.create_region(4096).close()


def test_e115_a_full_disk_under_the_log_harms_no_request(binaries, model) -> None:
    # /dev/full fails every write with ENOSPC; without a log the ports must be known.
    (port,) = unused_ports(1)
    command = [binaries / "logprobd", "--model", model.path, "--device", "cpu", "--http", "none"]
    with open("/dev/full", "wb") as full:
        server = subprocess.Popen([*command, "--listen", f"127.0.0.1:{port}"], stderr=full)
    try:
        with Scoring(f"127.0.0.1:{port}") as scoring:
            assert scoring.score(request(), wait_for_ready=True).rows == 2
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
