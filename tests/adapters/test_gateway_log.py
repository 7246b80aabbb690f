"""Tests the log of the gateway: what its reader or its callers do stops no request and breaks no line."""

import fcntl
import logging
import os
import threading

import pytest
from logprobd_adapters.gateway_log import QUEUE_LINES_MAX, TEXT_MAX, log_thread

LOG = logging.getLogger("logprobd-gateway-log-test")
LOG.setLevel(logging.INFO)
LOG.propagate = True


@pytest.fixture
def pipe():
    """A pipe of 4 KiB."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read_until(reader: int, text: bytes) -> bytes:
    data = b""
    while text not in data:
        data += os.read(reader, 65_536)
    return data


def test_a_line_is_one_line_of_text_whatever_it_quotes(pipe) -> None:
    reader, writer = pipe
    hostile = "a\nb\r\x85\u2028\x9b\u202e" + b"\x9b\xff".decode(errors="surrogateescape")
    with log_thread(writer):
        LOG.info("%s", hostile)
        LOG.info("end")

    first, *_ = read_until(reader, b" INFO end\n").decode().split("\n")
    assert first.endswith(r" INFO a\nb\r\x85\u2028\x9b\u202e\udc9b\udcff"), (
        "each unsafe character is escaped"
    )
    assert len(first.splitlines()) == 1


def test_a_long_text_is_cut(pipe) -> None:
    reader, writer = pipe
    with log_thread(writer):
        LOG.info("%s", "x" * 8_000_000)
        LOG.info("end")

        # The line is longer than the pipe, so it is read before the end waits for it.
        first, *_ = read_until(reader, b" INFO end\n").decode().split("\n")
    assert first.endswith(" INFO " + "x" * (TEXT_MAX - 3) + "...")


def test_no_text_of_a_traceback_looks_like_a_line_of_its_own(pipe) -> None:
    reader, writer = pipe
    with log_thread(writer):
        try:
            raise ValueError("one\n2026-01-01 INFO forged\x9b")
        except ValueError:
            LOG.exception("failed")
        LOG.info("end")

    lines = read_until(reader, b" INFO end\n").decode().split("\n")
    assert r"    2026-01-01 INFO forged\x9b" in lines
    assert not any(line.startswith("2026-01-01 INFO forged") for line in lines)


def test_a_log_that_nobody_reads_stops_nobody_and_tells_what_was_lost(pipe) -> None:
    reader, writer = pipe
    with log_thread(writer):
        for i in range(2 * QUEUE_LINES_MAX):
            LOG.info("line %d %s", i, "x" * 100)

        told = read_until(reader, b" lines of the log were lost\n").decode()
    lines = told.splitlines()
    lost = int(lines[-1].split()[0])
    assert lost == 2 * QUEUE_LINES_MAX - (len(lines) - 1)
    assert " INFO line 0 " in lines[0]


def test_the_end_waits_a_bounded_time_for_a_log_that_nobody_reads(pipe) -> None:
    _, writer = pipe

    def log_and_end() -> None:
        with log_thread(writer):
            for _ in range(100):
                LOG.info("x" * 1000)

    ended = threading.Thread(target=log_and_end)
    ended.start()
    ended.join(20)
    assert not ended.is_alive()


def test_a_full_disk_stops_nobody() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with log_thread(full):
        for _ in range(10):
            LOG.info("line")
    os.close(full)
