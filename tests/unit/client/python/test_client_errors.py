"""Tests that statuses are converted to typed errors that survive pickling."""

import pickle
from dataclasses import fields

import grpc
import pytest
from logprobd import RetryPolicy, _status, _wire, errors
from logprobd._status import decode_answer, from_status, from_weights_status, parse_place
from logprobd.errors import code_name


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("INVALID_ARGUMENT", errors.InvalidArgument),
        ("RESOURCE_EXHAUSTED", errors.Overloaded),
        ("UNAVAILABLE", errors.Unavailable),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceeded),
        ("NOT_FOUND", errors.NotFound),
        ("UNIMPLEMENTED", errors.NotFound),
        ("FAILED_PRECONDITION", errors.WeightsVersionMismatch),
        ("CANCELLED", errors.Cancelled),
        ("INTERNAL", errors.ServerBug),
        ("UNKNOWN", errors.ServerBug),
        ("DATA_LOSS", errors.ServerBug),
        ("PERMISSION_DENIED", errors.LogprobdError),
    ],
)
def test_each_code_has_its_class(code, error):
    made = from_status(code, "some details", address="host:1")

    assert type(made) is error
    assert made.code == code
    assert "some details" in str(made)


def test_a_refused_placement_is_not_a_version_mismatch():
    # Regression: the error was a WeightsVersionMismatch that advised weights_version=0.
    error = from_status("FAILED_PRECONDITION", "cuda_ipc: another GPU", address="host:1")

    assert type(error) is errors.Unavailable
    assert error.code == "FAILED_PRECONDITION"
    assert errors.is_placement_refusal(error)


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE"])
def test_the_wait_after_a_refusal_is_at_least_the_servers_hint(code):
    error = from_status(code, "come back later", address="host:1", retry_after=4.0)

    assert RetryPolicy().delay(error, 1) >= 4.0


def test_a_message_above_a_limit_is_a_bad_argument():
    error = from_status("RESOURCE_EXHAUSTED", "Received message larger than max", address="h:1")

    assert type(error) is errors.InvalidArgument
    assert "lower chunk_bytes" in str(error)


def test_an_overload_says_how_long_the_server_asks_to_wait():
    hinted = from_status("RESOURCE_EXHAUSTED", "full", address="h:1", retry_after=0.25)
    plain = from_status("RESOURCE_EXHAUSTED", "full", address="h:1")

    assert str(hinted).startswith("h:1 is overloaded (it asks to wait 0.25 s): full.")
    assert str(plain).startswith("h:1 is overloaded: full.")
    assert (hinted.retry_after, plain.retry_after) == (0.25, None)


def test_an_unavailable_server_keeps_its_own_words():
    error = from_status("UNAVAILABLE", "draining", address="h:1", retry_after=2.0)

    assert (error.details, error.retry_after) == ("draining", 2.0)
    refused = from_status("FAILED_PRECONDITION", "shared_memory: gone", address="h:1")
    assert refused.details == "shared_memory: gone"


def test_a_cancelled_call_says_so_if_nobody_else_does():
    assert str(from_status("CANCELLED", "", address="h:1")) == "the call was cancelled"
    assert str(from_status("CANCELLED", "closed", address="h:1")) == "closed"


def test_an_answer_that_cannot_be_read_is_a_server_bug():
    assert decode_answer(_wire.Hello, b"\x0a\x01a") == _wire.Hello("a")
    with pytest.raises(errors.ServerBug, match="the server's answer cannot be read: a varint"):
        decode_answer(_wire.Hello, b"\xff")


@pytest.mark.parametrize(
    ("code", "options", "error"),
    [
        ("DEADLINE_EXCEEDED", {}, errors.DeadlineExceeded),
        ("RESOURCE_EXHAUSTED", {"retry_after": 0.0}, errors.Overloaded),
        ("INTERNAL", {}, errors.ServerBug),
        ("CANCELLED", {}, errors.Cancelled),
    ],
)
def test_other_codes_of_the_service_weights(code, options, error):
    made = from_weights_status(code, "some details", address="host:1", **options)

    assert (type(made), made.code) == (error, code)
    assert "some details" in str(made)
    assert getattr(made, "retry_after", None) == options.get("retry_after")


def test_errors_extend_the_nearest_builtin():
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.Unavailable, ConnectionError)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("targets[12]: 7, must be in [0, 5) or the ignore_index -100", ("targets", 12)),
        ("candidate_ids[3]: -1, must be in [0, 5)", ("candidate_ids", 3)),
        ("top_k: 500, must be in [0, 128]", ("top_k", None)),
        ("hidden: the logits of row 4 hold NaN or Inf (2 rows do)", ("hidden", 4)),
        ("Something else", (None, None)),
        ("rows = 3 and row 12 of them", ("rows", 12)),
        ("head: at the end", ("head", None)),
        ("head=x", ("head", None)),
        ("headless", (None, None)),
        ("row 3", (None, 3)),
        ("the arrow 3", (None, None)),
        ("see targets[1] and row 2", ("targets", 1)),
        # Regression: the first word was always treated as a field.
        ("the message is cut short", (None, None)),
    ],
)
def test_field_and_row_are_parsed_from_the_message(message, place):
    assert parse_place(message) == place


def test_errors_survive_pickling():
    error = errors.InvalidArgument("targets[3] is bad", field="targets", row=3, code="X")

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is errors.InvalidArgument
    assert (str(again), again.field, again.row, again.code) == (str(error), "targets", 3, "X")
    overloaded = pickle.loads(pickle.dumps(errors.Overloaded("full", retry_after=0.5)))
    assert overloaded.retry_after == 0.5


def test_codes_have_the_names_of_grpc():
    for status in grpc.StatusCode:
        number, _ = status.value
        if status.name not in ("OK", "OUT_OF_RANGE"):
            assert code_name(number) == status.name


def test_the_fields_known_are_those_of_the_messages():
    messages = (_wire.ScoreRequest, _wire.VerifyRequest)

    assert {f.name for message in messages for f in fields(message)} == _status.FIELDS
