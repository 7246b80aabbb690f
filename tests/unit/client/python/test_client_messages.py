"""Tests the messages that tell a new user what to change."""

import inspect
import logging
import socket
import threading

import numpy as np
import pytest
from logprobd import AsyncClient, Client, InvalidArgument, RetryPolicy, Unavailable
from logprobd._status import from_status
from logprobd.retry import NOTICE_SECONDS, RetryNotice
from logprobd.score_args import ScoreArgs

ONCE = RetryPolicy(attempts_max=2, base_seconds=0.01)


@pytest.fixture
def http_address():
    """Runs a server that answers every connection with HTTP/1, like the --http port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1024)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_server_that_speaks_http1_may_be_the_http_port(http_address, rows):
    with Client(http_address, retry=ONCE) as client:
        with pytest.raises(Unavailable, match="is this the --http port"):
            client.score(*rows)
        with pytest.raises(Unavailable, match="is this the --http port"):
            client.wait_ready(timeout=0.3)


def test_other_connection_errors_do_not_mention_the_http_port():
    error = from_status("UNAVAILABLE", "Connection refused", address="a:1")

    assert "--http" not in str(error)
    assert "Check that the server runs" in str(error)


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2), [7]])
def test_bare_candidate_ids_are_refused_with_the_right_form(client, rows, ids):
    shown = ", ".join(map(str, ids))
    with pytest.raises(InvalidArgument) as caught:
        client.score(*rows, candidates=ids)

    assert f"[[{shown}]] * 10" in str(caught.value)
    assert caught.value.field == "candidates"


def test_the_form_that_the_message_shows_works(client, rows):
    assert client.score(*rows, candidates=[[1, 2, 3]] * 10).candidate_logprobs.shape == (30,)


def test_targets_of_another_length_name_the_helpers_that_shift(client, rows):
    with pytest.raises(InvalidArgument, match=r"from_padded .* from_packed"):
        client.score(rows[0], rows[1][1:])


def test_rows_that_require_gradients_point_to_the_operator(client, rows):
    torch = pytest.importorskip("torch")
    hidden = torch.from_numpy(rows[0]).requires_grad_()

    with pytest.warns(UserWarning, match="logprobd_ops"):
        result = client.score(hidden, rows[1])

    assert not result.logprob.requires_grad


def test_no_warning_where_gradients_are_off(client, rows, recwarn):
    torch = pytest.importorskip("torch")
    hidden = torch.from_numpy(rows[0]).requires_grad_()

    with torch.no_grad():
        client.score(hidden, rows[1])
    client.score(hidden.detach(), rows[1])

    assert not recwarn.list


class Waits:
    """A RetryNotice on a fake clock, and the messages that it logs."""

    def __init__(self, caplog):
        caplog.set_level(logging.WARNING, logger="logprobd")
        self.notice, self.now, self._caplog = RetryNotice(), 100.0, caplog

    def wait(self, delay):
        self.notice.waits("a:1 is down", delay, self.now)
        self.now += delay

    @property
    def messages(self):
        return [record.getMessage() for record in self._caplog.records]


def test_a_call_says_what_it_waits_for_after_a_second_and_then_rarely(caplog):
    waits = Waits(caplog)

    waits.wait(NOTICE_SECONDS - 0.1)
    assert waits.messages == []
    waits.wait(0.2)
    assert waits.messages == ["no answer for 0.9 s, next attempt in 0.2 s: a:1 is down"]
    waits.wait(5.0)
    assert len(waits.messages) == 1
    waits.wait(5.0)
    assert len(waits.messages) == 2


def test_an_answer_starts_the_time_anew(caplog):
    waits = Waits(caplog)

    waits.wait(0.9)
    waits.notice.answered()
    waits.wait(0.9)

    assert waits.messages == []


def test_the_final_error_names_address_attempts_and_time(caplog):
    waits = Waits(caplog)
    waits.wait(5.9)
    error = from_status("UNAVAILABLE", "refused", address="a:1")

    final = waits.notice.gave_up(error, 8, waits.now)

    assert final is error
    assert "a:1 is not available" in str(final)
    assert str(final).endswith("(gave up after 8 attempts in 5.9 s)")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_score_shows_every_argument_and_its_description(kind):
    shown = inspect.signature(kind.score).parameters
    fields = inspect.signature(ScoreArgs).parameters

    assert list(shown) == ["self", *fields]
    assert shown["temperature"].default == 1.0
    for name in fields:
        assert f"\n    {name}: " in inspect.getdoc(kind.score)


def test_an_unknown_argument_is_a_type_error(client, rows):
    with pytest.raises(TypeError, match=r"^ScoreMethod\.score\(\) got an .*'temprature'"):
        client.score(*rows, temprature=2.0)


def test_a_batch_takes_neither_timeout_nor_progress(client, rows):
    batch = {"hidden": rows[0], "targets": rows[1]}
    for name, value in (("timeout", 1.0), ("progress", print)):
        with pytest.raises(InvalidArgument, match=f"{name} cannot be set for a batch"):
            list(client.score_stream([{**batch, name: value}]))


def test_one_row_takes_its_candidates_as_a_list_of_one_list(client):
    hidden = np.ones(16, np.float32)

    assert client.score(hidden, 3, candidates=[[1, 2]]).candidate_logprobs.shape == (2,)
