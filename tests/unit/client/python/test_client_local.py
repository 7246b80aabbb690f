"""Tests the control socket: leases, regions, and the reasons why they are not available."""

import contextlib
import dataclasses
import gc
import os
import socket
import threading
import types

import numpy as np
import pytest
from logprobd import _local_lease, _regions, _wire
from logprobd._fake_local import FakeControl, FakeLimits
from logprobd._local_lease import Lease, LocalUnavailable
from logprobd._regions import RegionPool
from waiting import wait_until

PAGE = 4096
MIB = 1 << 20


@pytest.fixture
def control():
    control = FakeControl(
        FakeLimits(region_bytes_max=2 * MIB, lease_bytes_max=4 * MIB, lease_regions_max=3),
        shared_memory=True,
        device_reader=None,
    )
    control.start()
    yield control
    control.stop()


@pytest.fixture
def lease(control):
    lease = Lease(control.access(), "trainer")
    yield lease
    lease.close()


def read(control, region, offset, size):
    place = _wire.SharedMemorySlice(region=region, offset=offset, bytes=size)
    return bytes(control.read(_wire.ScoreRequest(shared_memory=place)))


def test_a_lease_learns_the_servers_grant(control, lease):
    assert (lease.shared_memory, lease.cuda_ipc) == (True, False)
    assert (lease.region_bytes_max, lease.lease_bytes_max, lease.regions_max) == (
        2 * MIB,
        4 * MIB,
        3,
    )
    assert len(lease.id) == 16
    assert lease.is_alive
    assert control.clients == ["trainer"]


def test_a_region_is_memory_of_both_sides(control, lease):
    region, memory = lease.create_region(5000)

    memory[64:69] = b"hello"

    assert len(memory) == 2 * PAGE
    assert read(control, region, 64, 5) == b"hello"


def test_a_closed_region_is_forgotten_and_the_lease_lives(control, lease):
    region, _ = lease.create_region(PAGE)

    lease.close_region(region)

    assert control.num_regions == 0
    assert lease.is_alive
    with pytest.raises(LocalUnavailable, match="no such region") as caught:
        lease.close_region(region)
    assert caught.value.code == "NOT_FOUND"


def test_a_closed_region_leaves_no_descriptor(control, lease):
    def num_descriptors():
        gc.collect()  # those of earlier tests
        count = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the list itself
                count += "logprobd-fake" in os.readlink(f"/proc/self/fd/{descriptor}")
        return count

    before = num_descriptors()
    region, memory = lease.create_region(PAGE)
    lease.close_region(region)
    memory.close()

    assert num_descriptors() == before


def test_a_lease_has_exactly_its_limits(control, lease):
    for _ in range(2):
        lease.create_region(2 * MIB)

    with pytest.raises(LocalUnavailable, match="above the limits"):
        lease.create_region(1)
    assert control.num_regions == 2


def test_a_lease_has_exactly_its_number_of_regions(control, lease):
    for _ in range(3):
        lease.create_region(PAGE)

    with pytest.raises(LocalUnavailable, match="above the limits"):
        lease.create_region(PAGE)
    assert control.num_regions == 3


def test_a_refusal_says_why(lease):
    with pytest.raises(LocalUnavailable, match="above the limits") as caught:
        lease.create_region(3 * MIB)

    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert lease.is_alive


def test_the_end_of_the_server_is_seen_before_a_request_is_made(control, lease):
    control.drop_leases()

    assert not lease.is_alive
    with pytest.raises(LocalUnavailable, match="control socket"):
        lease.create_region(PAGE)


def test_closing_returns_all_regions(control):
    lease = Lease(control.access())
    lease.create_region(PAGE)

    lease.close()

    assert not lease.is_alive
    wait_until(lambda: control.num_regions == 0 and control.clients == [])


def test_a_garbage_collected_lease_returns_all_regions(control):
    Lease(control.access()).create_region(PAGE)
    gc.collect()

    wait_until(lambda: control.num_regions == 0 and control.clients == [])


def test_another_hosts_server_is_recognised_by_its_boot_id(control):
    with pytest.raises(LocalUnavailable, match="another host"):
        Lease(dataclasses.replace(control.access(), boot_id="other"))


def test_a_host_without_boot_id_shares_nothing(control, monkeypatch):
    access = dataclasses.replace(control.access(), boot_id="")
    monkeypatch.setattr(_local_lease, "BOOT_ID_PATH", "/nowhere/boot_id")

    with pytest.raises(LocalUnavailable, match="another host"):
        Lease(access)


def test_a_missing_socket_hints_at_containers(control):
    access = dataclasses.replace(control.access(), control_path="/nowhere/control.sock")

    with pytest.raises(LocalUnavailable, match="/nowhere/control.sock: .*mount the folder"):
        Lease(access)


def test_an_access_without_a_path_is_refused(control):
    with pytest.raises(LocalUnavailable, match="no control socket"):
        Lease(dataclasses.replace(control.access(), control_path=""))


def test_a_socket_without_a_listener_is_reported(control, tmp_path):
    path = str(tmp_path / "dead.sock")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(path)
    dead.close()

    with pytest.raises(LocalUnavailable, match="the server has ended"):
        Lease(dataclasses.replace(control.access(), control_path=path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can open every file")
def test_another_users_socket_is_reported(control, tmp_path):
    tmp_path.chmod(0)
    path = str(tmp_path / "control.sock")

    with pytest.raises(LocalUnavailable, match="run the client as the server's user"):
        Lease(dataclasses.replace(control.access(), control_path=path))


@contextlib.contextmanager
def control_socket(tmp_path, serve):
    """Provides the access to a control socket at which `serve(connection)` answers the first request."""
    path = str(tmp_path / "odd.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def accept():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield _wire.LocalAccess(boot_id=_local_lease.boot_id(), control_path=path)
        thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_wire.encode(_wire.LocalReply(region=_wire.Region(bytes=1))), "without a welcome"),
        (b"\xff\xff", "reply"),
        (_wire.encode(_wire.LocalReply(status_code=7, status_message="not you")), "not you"),
    ],
)
def test_nonsense_and_refusals_of_a_server_are_reported(tmp_path, answer, reason):
    with control_socket(tmp_path, lambda connection: connection.send(answer)) as access:
        with pytest.raises(LocalUnavailable, match=reason):
            Lease(access)


@contextlib.contextmanager
def lease_of(tmp_path, serve):
    """Provides a lease of a control socket at which `serve(connection)` answers the first request
    after the welcome."""

    def welcome(connection):
        connection.send(WELCOME)
        connection.recv(1000)
        serve(connection)

    with (
        control_socket(tmp_path, welcome) as access,
        contextlib.closing(Lease(access)) as lease,
    ):
        yield lease


WELCOME = _wire.encode(_wire.LocalReply(welcome=_wire.Welcome(lease=bytes(16))))


def test_a_late_reply_is_not_taken_for_that_of_the_next_request(tmp_path):
    may_answer, answered = threading.Event(), threading.Event()

    def serve(connection):
        may_answer.wait(20)
        with contextlib.suppress(OSError):  # the client has closed the connection
            connection.send(WELCOME)
        answered.set()
        connection.recv(1000)

    with lease_of(tmp_path, serve) as lease:
        lease._socket.settimeout(0.01)
        with pytest.raises(LocalUnavailable, match="timed out"):
            lease.close_region(bytes(16))
        may_answer.set()
        assert answered.wait(20)

        with pytest.raises(LocalUnavailable):
            lease.close_region(bytes(16))


@contextlib.contextmanager
def lease_that_gets_a_descriptor(tmp_path, reply):
    """Provides a lease whose request gets `reply` with a descriptor. Fails if that stays open."""
    # The end of a pipe is no memory. Its other end is at its end once all descriptors are closed.
    reader, writer = os.pipe()

    def serve(connection):
        socket.send_fds(connection, [reply], [writer])
        os.close(writer)

    with open(reader, "rb", buffering=0) as pipe:
        with lease_of(tmp_path, serve) as lease:
            yield lease

        os.set_blocking(reader, False)
        assert pipe.read() == b""  # None while a descriptor is open


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (_wire.encode(_wire.LocalReply(status_code=8, status_message="no room")), "no room"),
        (b"\xff\xff", "cannot be read"),
        (WELCOME, "without a region"),
        (_wire.encode(_wire.LocalReply(region=_wire.Region(bytes(16), PAGE))), "cannot be mapped"),
    ],
    ids=["refusal", "not a message", "no region", "no memory"],
)
def test_a_descriptor_that_gives_no_region_is_closed(tmp_path, reply, reason):
    with lease_that_gets_a_descriptor(tmp_path, reply) as lease:
        with pytest.raises(LocalUnavailable, match=reason):
            lease.create_region(PAGE)


def test_a_descriptor_that_nobody_asked_for_is_closed(tmp_path):
    reply = _wire.encode(_wire.LocalReply(status_message="closed"))

    with lease_that_gets_a_descriptor(tmp_path, reply) as lease:
        lease.close_region(b"id")


@pytest.fixture
def pool(lease):
    return RegionPool(lease, 64 * PAGE)


def test_spans_share_a_region_and_do_not_overlap(control, pool):
    spans = [pool.allocate(size) for size in (1, PAGE, PAGE + 1, 10)]

    assert control.num_regions == 1
    assert [span.offset for span in spans] == [0, PAGE, 2 * PAGE, 4 * PAGE]
    assert [span.bytes.nbytes for span in spans] == [1, PAGE, PAGE + 1, 10]


def test_freed_spans_are_used_again_and_grow_together(pool):
    first, second, third = (pool.allocate(10 * PAGE) for _ in range(3))
    first.free()
    third.free()
    second.free()

    whole = pool.allocate(64 * PAGE)

    assert (whole.region, whole.offset) == (first.region, 0)


def test_free_space_is_tracked_in_any_order_of_allocating_and_freeing(pool):
    draw = np.random.default_rng(5)
    held = []
    for _ in range(2000):
        if held and (len(held) > 12 or draw.random() < 0.5):
            held.pop(int(draw.integers(len(held)))).free()
        else:
            held.append(pool.allocate(int(draw.integers(1, 5 * PAGE))))
        ends = sorted((s.region.address + s.offset, s.size) for s in held)
        for (begin, size), (following, _) in zip(ends, ends[1:], strict=False):
            assert begin + size <= following
    for span in held:
        span.free()

    assert pool.allocate(64 * PAGE).offset == 0


def test_a_full_region_is_followed_by_another(control, pool):
    pool.allocate(60 * PAGE)
    pool.allocate(10 * PAGE)

    assert control.num_regions == 2


def test_a_large_span_gets_its_own_region_that_is_returned_when_free(control, pool):
    pool.allocate(PAGE).free()
    large = pool.allocate(MIB)
    assert control.num_regions == 2

    large.free()

    assert control.num_regions == 1


def test_the_servers_limits_are_kept_without_asking(control, lease):
    pool = RegionPool(lease, MIB)
    for _ in range(3):
        pool.allocate(MIB)

    with pytest.raises(LocalUnavailable, match="limits on shared memory") as caught:
        pool.allocate(MIB)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    with pytest.raises(LocalUnavailable, match="limits on shared memory"):
        RegionPool(lease, PAGE).allocate(3 * MIB)


def test_what_is_left_of_a_lease_is_used_by_smaller_regions(control, lease):
    pool = RegionPool(lease, 3 * MIB // 2)
    pool.allocate(3 * MIB // 2)
    pool.allocate(3 * MIB // 2)

    pool.allocate(PAGE)  # 1 MiB is left

    assert control.num_regions == 3


def test_after_a_refusal_the_server_is_left_alone_for_a_while(control, pool, lease, monkeypatch):
    asked = []
    create = lease.create_region
    monkeypatch.setattr(lease, "create_region", lambda size: (asked.append(size), create(size)))
    control.limits.region_bytes_max = 0

    for _ in range(3):
        with pytest.raises(LocalUnavailable, match="above the limits"):
            pool.allocate(PAGE)

    assert len(asked) == 1


def test_a_while_after_a_refusal_the_server_is_asked_again(control, pool, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_regions, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    limit, control.limits.region_bytes_max = control.limits.region_bytes_max, 0
    with pytest.raises(LocalUnavailable, match="above the limits"):
        pool.allocate(PAGE)
    control.limits.region_bytes_max = limit

    now[0] += 1.0

    assert pool.allocate(PAGE).size == PAGE


def test_an_arrays_memory_is_free_once_nothing_refers_to_it(control, pool):
    array = pool.array(10 * PAGE)
    part = array[5:10]
    array[:] = 7
    offset = pool.find(array.ctypes.data, array.nbytes)[1]
    del array
    gc.collect()
    assert pool.allocate(PAGE).offset == 10 * PAGE  # the slice still refers to it

    del part
    gc.collect()

    assert pool.allocate(10 * PAGE).offset == offset


def test_an_array_outlives_its_pool_and_its_lease(control):
    lease = Lease(control.access())
    array = RegionPool(lease, PAGE).array(PAGE)
    lease.close()
    gc.collect()

    array[:] = 5

    assert array.sum() == 5 * PAGE


def test_addresses_are_found_in_their_region(pool):
    span = pool.allocate(2 * PAGE)
    address = span.bytes.ctypes.data

    assert pool.find(address + 64, PAGE) == (span.region, span.offset + 64)
    assert pool.find(span.region.address + 64 * PAGE - 1, 2) is None
    assert pool.find(span.region.address - 1, 2) is None
