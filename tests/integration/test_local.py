"""Tests shared memory and its control socket with raw messages (rows F85 to F94 of tests/FAULTS.md)."""

import multiprocessing
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import threading
import time

import grpc
import pytest
from control_socket import ControlSocket, Region
from scoring_rpc import Scoring, messages, request


@pytest.fixture
def local_server(start_server, model, tmp_path: pathlib.Path):
    """Starts a server with Unix sockets and sets its `control_path`."""
    server = start_server("--model", str(model.path), "--local", str(tmp_path / "s"))
    server.control_path = str(tmp_path / "s.control")
    return server


def in_region(region, offset: int = 0, **fields):
    """Returns a request that `request` makes from `fields`, but puts its rows into the region."""
    message = request(**fields)
    data = message.hidden
    region.memory[offset : offset + len(data)] = data
    message.ClearField("hidden")
    message.shared_memory.region = region.id
    message.shared_memory.offset = offset
    message.shared_memory.bytes = len(data)
    return message


def list_heads(scoring: Scoring):
    call = scoring.channel.unary_unary("/logprobd.v1.Scoring/ListHeads")
    return messages().ListHeadsResponse.FromString(call(b"", timeout=20))


def refusal(scoring: Scoring, message) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        scoring.score(message)
    return error.value


def test_rows_in_shared_memory_get_the_bits_of_rows_over_tcp(local_server) -> None:
    with Scoring(local_server.grpc) as scoring, ControlSocket(local_server.control_path) as control:
        assert control.hello().status_code == 0
        region = control.create_region(4 << 20)
        for rows, offset in ((1, 0), (2, 64), (300, 128), (8000, 1 << 20)):
            fields = {"rows": rows, "seed": rows, "outputs": 7}
            fields["targets"] = b"\1\0\0\0" * rows
            remote = scoring.score(request(**fields))
            local = scoring.score(in_region(region, offset, **fields))
            assert local.rows == rows
            assert local.logprob == remote.logprob
            assert local.entropy == remote.entropy
            assert local.lse == remote.lse
        region.close()


def test_list_heads_says_where_the_sockets_are(local_server) -> None:
    with Scoring(local_server.grpc) as scoring:
        response = list_heads(scoring)
        assert list(response.heads[0].transports) == ["tcp", "unix", "shm"]
        local = response.local
        assert local.boot_id == pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert local.control_path == local_server.control_path
        assert (local.shared_memory, local.cuda_ipc) == (True, False)
        with Scoring(f"unix:{local.grpc_path}") as same_host:
            assert same_host.score(request()).logprob == scoring.score(request()).logprob


def test_clients_find_the_socket_of_a_server_with_default_settings(
    start_server, model, tmp_path
) -> None:
    os.chmod(tmp_path, 0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    server = start_server("--model", str(model.path), environment=environment)
    with Scoring(server.grpc) as scoring:
        local = list_heads(scoring).local
    assert pathlib.Path(local.control_path).parent == tmp_path
    assert stat.S_IMODE(os.stat(local.control_path).st_mode) == 0o600
    with ControlSocket(local.control_path) as control:
        assert control.hello().welcome.shared_memory
    server.stop()
    assert list(tmp_path.iterdir()) == []


def test_none_turns_the_sockets_off(start_server, model) -> None:
    server = start_server("--model", str(model.path), "--local", "none")
    with Scoring(server.grpc) as scoring:
        assert not list_heads(scoring).HasField("local")
        message = request(hidden=None)
        message.shared_memory.region = bytes(16)
        message.shared_memory.bytes = 512
        error = refusal(scoring, message)
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "--local" in error.details()
        scoring.score(request())


def test_cuda_ipc_is_refused_without_a_gpu(local_server) -> None:
    with Scoring(local_server.grpc) as scoring, ControlSocket(local_server.control_path) as control:
        message = request(hidden=None)
        slice_ = message.cuda_ipc
        slice_.lease = control.hello().welcome.lease
        slice_.device_uuid, slice_.handle, slice_.bytes = bytes(16), bytes(64), 512
        error = refusal(scoring, message)
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "--cuda-ipc" in error.details()
        scoring.score(request())


def test_the_client_cannot_change_the_size_of_a_region(local_server) -> None:
    with ControlSocket(local_server.control_path) as control:
        control.hello()
        region = control.create_region(1 << 20)
        for size in (0, 4096, 2 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(region.file, size)
        region.close()


def test_f88_a_client_cannot_name_its_region(local_server) -> None:
    create = messages("local").CreateRegion
    assert list(create.DESCRIPTOR.fields_by_name) == ["bytes"]
    with (
        ControlSocket(local_server.control_path) as other,
        ControlSocket(local_server.control_path) as control,
    ):
        for each in (other, control):
            assert each.hello().status_code == 0
        taken = other.create_region(4096)
        named = create(bytes=4096).SerializeToString()
        for number in range(2, 16):
            named += bytes([number << 3 | 2, len(taken.id)]) + taken.id

        reply, files = control.call(create_region=create.FromString(named))

        assert reply.status_code == 0, reply.status_message
        assert len(reply.region.id) == 16 and reply.region.id != taken.id
        region = Region(reply.region, files[0])
        region.memory[:5] = b"hello"
        assert taken.memory[:5] == bytes(5)
        for each in (region, taken):
            each.close()


def test_a_client_that_overwrites_its_rows_spoils_only_its_own_scores(local_server) -> None:
    with Scoring(local_server.grpc) as scoring, ControlSocket(local_server.control_path) as control:
        control.hello()
        region = control.create_region(1 << 20)
        message = in_region(region, rows=1000, targets=b"\0\0\0\0" * 1000)
        honest = request(rows=50)
        expected = scoring.score(honest).logprob
        stop = threading.Event()

        def scribble() -> None:
            while not stop.is_set():
                region.memory[: 1 << 18] = os.urandom(1 << 18)

        writer = threading.Thread(target=scribble)
        writer.start()
        try:
            for _ in range(20):
                pending = scoring.score_future(message.SerializeToString())
                assert scoring.score(honest).logprob == expected
                assert len(messages().ScoreResponse.FromString(pending.result()).logprob) == 4000
        finally:
            stop.set()
            writer.join()
        region.close()


def _hold_a_region(path: str, ready) -> None:
    control = ControlSocket(path)
    control.hello()
    region = control.create_region(8 << 20)
    ready.set()
    time.sleep(600)
    region.close()


def test_the_regions_of_a_killed_client_are_released(local_server) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    client = spawn.Process(target=_hold_a_region, args=(local_server.control_path, ready))
    client.start()
    assert ready.wait(60)
    assert local_server.metric("logprobd_shm_regions") == 1
    assert local_server.metric("logprobd_shm_bytes") == 8 << 20

    os.kill(client.pid, signal.SIGKILL)
    client.join()
    killed = time.monotonic()
    assert local_server.eventually(lambda: local_server.metric("logprobd_shm_regions") == 0)
    assert local_server.metric("logprobd_shm_bytes") == 0
    assert time.monotonic() - killed < 5  # less than 1 s on an idle machine


def test_a_closed_region_serves_the_requests_that_still_read_it(local_server) -> None:
    with Scoring(local_server.grpc) as scoring, ControlSocket(local_server.control_path) as control:
        control.hello()
        region = control.create_region(8 << 20)
        fields = {"rows": 20_000, "targets": b"\0\0\0\0" * 20_000}
        message = in_region(region, **fields)
        expected = scoring.score(message).logprob
        pending = [scoring.score_future(message.SerializeToString()) for _ in range(4)]
        control.close_region(region)
        outcomes = []
        for call in pending:
            try:
                outcomes.append(messages().ScoreResponse.FromString(call.result()).logprob)
            except grpc.RpcError as error:  # the request arrived after the close
                assert error.code() == grpc.StatusCode.NOT_FOUND
        assert all(logprob == expected for logprob in outcomes)
        assert refusal(scoring, message).code() == grpc.StatusCode.NOT_FOUND
        assert local_server.eventually(lambda: local_server.metric("logprobd_shm_regions") == 0)
        region.close()


ANOTHER_USER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
print(connection.recv(4096).hex(), connection.recv(4096).hex() == "")
"""


SYSTEM_PYTHON = "/usr/bin/python3"  # another user may not be able to read the tests' own Python


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON),
    reason="needs root, to run as another user, and a system Python",
)
def test_a_process_of_another_user_is_refused(start_server, model) -> None:
    # The folder is open to all users, and so is the socket in the second attempt, where only the check of the user
    # remains.
    folder = pathlib.Path("/tmp") / f"logprobd-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        server = start_server("--model", str(model.path), "--local", str(folder / "s"))
        path = str(folder / "s.control")
        command = [SYSTEM_PYTHON, "-S", "-E", "-c", ANOTHER_USER, path]
        nobody = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
        refused = subprocess.run(command, capture_output=True, text=True, check=False, **nobody)
        assert "PermissionError" in refused.stderr
        os.chmod(path, 0o666)
        turned_away = subprocess.run(command, capture_output=True, text=True, check=True, **nobody)
        data, closed = turned_away.stdout.split()
        reply = messages("local").LocalReply.FromString(bytes.fromhex(data))
        assert reply.status_code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        assert closed == "True"
        server.stop()
    finally:
        shutil.rmtree(folder)


def test_the_memory_of_regions_is_limited(start_server, model, tmp_path) -> None:
    start_server(
        *("--model", str(model.path), "--local", str(tmp_path / "s")),
        *("--shared-memory-bytes", "4MiB", "--region-bytes", "1MiB"),
    )
    path = str(tmp_path / "s.control")
    create = messages("local").CreateRegion
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    with ControlSocket(path) as first, ControlSocket(path) as second, ControlSocket(path) as third:
        welcome = first.hello().welcome
        assert (welcome.region_bytes_max, welcome.lease_bytes_max) == (1 << 20, 2 << 20)
        second.hello(), third.hello()
        assert first.call(create_region=create(bytes=(1 << 20) + 1))[0].status_code == 3
        regions = [client.create_region(1 << 20) for client in (first, first, second, second)]
        reply = first.call(create_region=create(bytes=1))[0]
        assert reply.status_code == exhausted and "this lease" in reply.status_message
        reply = third.call(create_region=create(bytes=1))[0]
        assert reply.status_code == exhausted and "--shared-memory-bytes" in reply.status_message
        assert first.close_region(regions[0]).status_code == 0
        regions.append(third.create_region(1 << 20))
        for region in regions:
            region.close()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--cuda-ipc", "--device", "cpu"), ("--cuda-ipc", "--device cpu")),
        (("--cuda-ipc", "--local", "none"), ("--cuda-ipc", "--local none")),
        (("--local", "/" + "x" * 100), ("--local",)),
    ],
)
def test_contradictory_settings_are_refused(binaries, model, options, names) -> None:
    command = [str(binaries / "logprobd"), "--model", str(model.path), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert all(name in result.stderr for name in names)
