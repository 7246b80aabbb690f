"""Sends bad requests to a running server: one case per row of the table in tests/FAULTS.md, with its id.

After every case the server must run, report SERVING, score a valid request and hold no request bytes.
"""

import dataclasses
import pathlib
import re
import struct
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from http2_frames import call_in_frames
from scoring_rpc import Scoring, floats, messages, request

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN_ROW, INF_ROW = 1, 2


def varint(value: int) -> bytes:
    out = b""
    while True:
        out += bytes([(value & 0x7F) | (0x80 if value > 0x7F else 0)])
        value >>= 7
        if not value:
            return out


def field(number: int, wire_type: int, payload: bytes) -> bytes:
    """Encodes a field for the wire; a length-delimited field gets its length."""
    length = varint(len(payload)) if wire_type == 2 else b""
    return varint(number << 3 | wire_type) + length + payload


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def f32(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def valid(**fields) -> bytes:
    return request(**fields).SerializeToString()


def nested(depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = field(50, 2, data)
    return data


@dataclasses.dataclass
class Case:
    """A message, and the status code and text that the server must return. The error may contain more than `text`."""

    id: str
    what: str
    data: Callable[[], bytes]
    code: grpc.StatusCode = INVALID
    text: str = ""


# The head of the server has 1,003 ids and a hidden size of 64.
REFUSED = [
    Case(
        "A1",
        "random bytes",
        lambda: np.random.default_rng(3).bytes(300),
        text="ScoreRequest: no valid field tag at byte 0",
    ),
    Case(
        "A2",
        "a length that runs past the end",
        lambda: valid()[:-5],
        text="ScoreRequest: hidden: length 512, but 507 bytes are left",
    ),
    Case(
        "A3",
        "a varint of eleven bytes",
        lambda: b"\x28" + b"\xff" * 10 + b"\x01" + valid(),
        text="ScoreRequest: rows: the number is truncated or has more than 64 bits",
    ),
    Case(
        "A3b",
        "a length that overflows",
        lambda: field(7, 2, b"")[:1] + b"\xff" * 9 + b"\x01",
        text="ScoreRequest: targets: the length is truncated or too large",
    ),
    Case(
        "A4",
        "rows sent as bytes",
        lambda: field(5, 2, b"\x02") + valid(),
        text="rows: wire type 2, must be 0",
    ),
    Case(
        "A5",
        "two hidden fields",
        lambda: valid() + field(32, 2, b"\0" * 512),
        text="hidden: given twice, must be given once",
    ),
    Case(
        "A7",
        "70 KiB of unknown fields",
        lambda: field(99, 2, b"x" * 70_000) + valid(),
        text="ScoreRequest: 70005 bytes of unknown fields, must be at most 65536",
    ),
    Case(
        "A8",
        "a group",
        lambda: b"\xab\x06" * 200 + valid(),
        text="ScoreRequest: an unknown field: wire type 3, groups are not supported",
    ),
    Case(
        "A9",
        "an empty message",
        lambda: b"",
        text="dtype: 0, must be DTYPE_BF16 (1), DTYPE_F16 (2) or DTYPE_F32 (3)",
    ),
    Case(
        "A15",
        "a request id that is not UTF-8",
        lambda: field(1, 2, b"\xff\xfe") + valid(),
        text="request_id: not valid UTF-8",
    ),
    Case(
        "A16",
        "a request id with an escape",
        lambda: valid(request_id="a\x1b[31m"),
        text="request_id: holds control characters, must hold none",
    ),
    Case(
        "B23",
        "a payload one byte short",
        lambda: valid(hidden=b"\0" * 511),
        text="hidden: 511 bytes, must be 512 (2 rows x 64 x 4 bytes of f32)",
    ),
    Case(
        "B24",
        "a product beyond 64 bits",
        lambda: (
            request(rows=2, hidden=b"", hidden_size=1).SerializeToString()
            + field(5, 0, varint(2**32 - 1))
            + field(6, 0, varint(2**32 - 1))
        ),
        text='hidden_size: 4294967295, must be 64 for head "default"',
    ),
    Case(
        "B25",
        "another head's hidden size",
        lambda: valid(hidden_size=32),
        text='hidden_size: 32, must be 64 for head "default"',
    ),
    Case(
        "B27",
        "more rows than a request may have",
        lambda: request(rows=70_000, hidden=b"", targets=b"").SerializeToString(),
        text="rows: 70000, must be in [0, 65536]",
    ),
    Case(
        "B28",
        "a target too few",
        lambda: valid(targets=i32(1)),
        text="targets: 1 ids, must be 2, one for each row",
    ),
    Case(
        "B28b",
        "targets that are not a whole number of ids",
        lambda: valid(targets=b"\0" * 7),
        text="targets: 7 bytes, must be a multiple of 4",
    ),
    Case(
        "B29",
        "a target at the vocabulary's end",
        lambda: valid(targets=i32(5, 1003)),
        text="targets[1]: 1003, must be in [0, 1003) or the ignore_index -100",
    ),
    Case(
        "B29b",
        "a negative target",
        lambda: valid(targets=i32(5, -1)),
        text="targets[1]: -1, must be in [0, 1003) or the ignore_index -100",
    ),
    Case(
        "B32",
        "no dtype",
        lambda: valid(dtype=0),
        text="dtype: 0, must be DTYPE_BF16 (1), DTYPE_F16 (2) or DTYPE_F32 (3)",
    ),
    Case(
        "B32b",
        "a dtype of the future",
        lambda: valid(dtype=77),
        text="dtype: 77, must be DTYPE_BF16 (1), DTYPE_F16 (2) or DTYPE_F32 (3)",
    ),
    Case(
        "B33b",
        "NaN with reject_nonfinite",
        lambda: valid(hidden=f32(*[float("nan")] * 128), reject_nonfinite=True),
        text="hidden: the logits of row 0 hold NaN or Inf (2 of 2 rows do), and reject_nonfinite is set",
    ),
    *(
        Case(
            f"B35-{t}",
            f"temperature {t}",
            lambda t=t: valid(temperature=t),
            text=f"temperature: {t:g}, must be finite and in [1e-4, 1e4]",
        )
        for t in (0.0, -1.0, float("nan"), float("inf"), 1e-30)
    ),
    Case(
        "B35b",
        "a row's temperature",
        lambda: valid(row_temperatures=f32(1, 0)),
        text="row_temperatures[1]: 0, must be finite and in [1e-4, 1e4]",
    ),
    Case(
        "B35c",
        "a temperature too few",
        lambda: valid(row_temperatures=f32(1)),
        text="row_temperatures: 1 values, must be 2, one for each row",
    ),
    Case(
        "B35d",
        "an entropy temperature of 0",
        lambda: valid(entropy_temperature=0.0),
        text="entropy_temperature: 0, must be finite and in [1e-4, 1e4]",
    ),
    Case(
        "B36",
        "top_k above the limit",
        lambda: valid(top_k=129),
        text="top_k: 129, must be in [0, 128]",
    ),
    Case(
        "B37",
        "segments that fall",
        lambda: valid(segment_offsets=u32(0, 2, 1, 2)),
        text="segment_offsets[2]: 1, must not be below the previous offset, 2",
    ),
    Case(
        "B37b",
        "segments that end early",
        lambda: valid(segment_offsets=u32(0, 1)),
        text="segment_offsets[1]: 1, must end at rows, 2",
    ),
    Case(
        "B38",
        "candidate offsets that end elsewhere",
        lambda: valid(candidate_ids=i32(1, 2), candidate_offsets=u32(0, 1, 1)),
        text="candidate_offsets[2]: 1, must end at the number of candidate_ids, 2",
    ),
    Case(
        "B38b",
        "a candidate out of range",
        lambda: valid(candidate_ids=i32(1, 2000), candidate_offsets=u32(0, 1, 2)),
        text="candidate_ids[1]: 2000, must be in [0, 1003)",
    ),
    Case(
        "B38c",
        "candidates without offsets",
        lambda: valid(candidate_ids=i32(1)),
        text="candidate_offsets: 0 offsets, must be 3, rows + 1",
    ),
    Case(
        "B42",
        "no payload",
        lambda: valid(hidden=None),
        text="hidden: 0 bytes, must be 512 (2 rows x 64 x 4 bytes of f32)",
    ),
    Case(
        "B-outputs",
        "an output of the future",
        lambda: valid(outputs=1 << 20),
        text="outputs: 1048576, has bits beyond 511, the sum of all Output values",
    ),
    Case(
        "B-priority",
        "a priority of the future",
        lambda: valid(priority=9),
        text="priority: 9, must be in [0, 3]",
    ),
    Case(
        "B-ignore",
        "an ignore_index that is a token",
        lambda: valid(ignore_index=7),
        text="ignore_index: 7, must lie outside [0, 1003), where it would hide a real id",
    ),
    Case(
        "C44",
        "a head that is not served",
        lambda: valid(head="other"),
        grpc.StatusCode.NOT_FOUND,
        'head: "other" is not served here; the heads are: default',
    ),
    Case(
        "C45",
        "weights that are not live",
        lambda: valid(weights_version=9),
        grpc.StatusCode.FAILED_PRECONDITION,
        'weights_version: 9, but version 1 is live for head "default"',
    ),
]

ACCEPTED = [
    Case(
        "A6",
        "hidden before everything else",
        lambda: field(32, 2, f32(*[0.5] * 128)) + valid(hidden=None),
    ),
    Case("A7b", "small unknown fields", lambda: field(99, 2, b"later") + valid()),
    Case("A8b", "an unknown submessage", lambda: nested(100) + valid()),
    Case("A16b", "a request id of letters", lambda: valid(request_id="step-12/rank-3")),
    Case("B26", "no rows", lambda: valid(rows=0, targets=None, hidden=None)),
    Case("B31", "an ignored row", lambda: valid(targets=i32(-100, 3))),
    Case("B33", "NaN in one row", lambda: valid(hidden=f32(*[float("nan")] * 64, *[1.0] * 64))),
    Case("B34", "Inf in one row", lambda: valid(hidden=f32(*[float("inf")] * 64, *[1.0] * 64))),
    Case("B34b", "denormals", lambda: valid(hidden=f32(*[1e-42] * 128))),
    Case("B34c", "the largest bf16", lambda: valid(dtype=1, hidden=b"\x7f\x7f" * 128)),
    Case("B34d", "the largest fp32", lambda: valid(hidden=f32(*[np.finfo(np.float32).max] * 128))),
    Case("B35e", "the coldest temperature", lambda: valid(temperature=1e-4)),
    Case("B35f", "the hottest temperature", lambda: valid(temperature=1e4)),
    Case("B39", "hidden at an odd offset", lambda: valid(request_id="x")),
    Case("B41", "fp32 hidden with a bf16 head", lambda: valid()),
]


def assert_unharmed(server, scoring: Scoring) -> None:
    """Checks the invariant that holds after every case."""
    assert scoring.health() == 1
    reply = scoring.score(request(rows=1))
    assert -20 < floats(reply.logprob)[0] < 0
    assert server.eventually(lambda: server.metric("logprobd_inflight_bytes") == 0)
    assert server.metric("logprobd_queue_rows") == 0


@pytest.fixture(scope="module")
def scoring(server):
    with Scoring(server.grpc) as scoring:
        yield scoring


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: f"{c.id}: {c.what}")
def test_is_refused_with_a_reason(server, scoring: Scoring, case: Case) -> None:
    with pytest.raises(grpc.RpcError) as error:
        scoring.score_raw(case.data())
    assert error.value.code() == case.code
    assert case.text and case.text in error.value.details()
    assert_unharmed(server, scoring)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda c: f"{c.id}: {c.what}")
def test_is_scored(server, scoring: Scoring, case: Case) -> None:
    messages().ScoreResponse.FromString(scoring.score_raw(case.data()))
    assert_unharmed(server, scoring)


def field_names(message) -> set[str]:
    """Returns the names of the fields of a message type and of the messages in it."""
    names = {each.name for each in message.fields}
    return names.union(
        *(field_names(each.message_type) for each in message.fields if each.message_type)
    )


def test_b43_no_request_has_a_field_for_a_soft_cap() -> None:
    requests, responses = set(), set()
    for message in (messages().ScoreRequest, messages("weights").PushWeightsRequest):
        for service in message.DESCRIPTOR.file.services_by_name.values():
            requests.update(*(field_names(each.input_type) for each in service.methods))
            responses.update(*(field_names(each.output_type) for each in service.methods))

    # ListHeads returns the soft cap of a head.
    assert [name for name in responses if "cap" in name] == ["softcap"]
    assert [name for name in requests if "cap" in name] == []


def test_b43_unknown_fields_change_no_score(server, scoring: Scoring) -> None:
    known = messages().ScoreRequest.DESCRIPTOR.fields_by_number
    unknown = [number for number in range(1, 1000) if number not in known]
    expected = scoring.score(request(outputs=511))

    for value in (float("nan"), -1.0, 1e-3):
        data = b"".join(field(number, 5, f32(value)) for number in unknown) + valid(outputs=511)
        reply = messages().ScoreResponse.FromString(scoring.score_raw(data))
        expected.timings.CopyFrom(reply.timings)
        assert reply == expected
    assert_unharmed(server, scoring)


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a12_compression_is_refused_before_it_inflates(start_server, model, algorithm) -> None:
    server = start_server("--model", str(model.path), "--max-message-bytes", "512MiB")
    with Scoring(server.grpc) as scoring:
        assert_unharmed(server, scoring)
        before = server.peak_memory_bytes()
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as error:
                scoring.score_raw(b"\0" * (128 << 20), compression=algorithm, timeout=60)
            assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
        # Each has 128 KiB on the wire. The limit is an eighth of one inflated message.
        assert server.peak_memory_bytes() - before < 16 << 20
        assert_unharmed(server, scoring)


def test_a13_an_unknown_method_is_unimplemented(server, scoring: Scoring) -> None:
    for method in ("/logprobd.v1.Scoring/Guess", "/other.Service/Score"):
        with pytest.raises(grpc.RpcError) as error:
            scoring.channel.unary_unary(method)(b"", timeout=5)
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert_unharmed(server, scoring)


def test_a14_metadata_beyond_the_limit_is_refused(server, scoring: Scoring) -> None:
    # gRPC closes the connection too, so this client uses a separate one.
    with Scoring(server.grpc) as own, pytest.raises(grpc.RpcError) as error:
        own.score_raw(valid(), metadata=(("x-big", "v" * 20_000),))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_unharmed(server, scoring)


def test_a22_a_stream_closed_before_any_message_ends_cleanly(server, scoring: Scoring) -> None:
    assert list(scoring.stream([])) == []
    assert_unharmed(server, scoring)


def test_a_bad_chunk_does_not_end_its_stream(server, scoring: Scoring) -> None:
    chunks = [request(chunk_id=1), request(chunk_id=2, targets=i32(0, 5000)), request(chunk_id=3)]
    answers = {reply.chunk_id: reply for reply in scoring.stream(chunks)}
    assert [answers[i].status_code for i in (1, 2, 3)] == [0, INVALID.value[0], 0]
    assert "5000" in answers[2].status_message
    assert_unharmed(server, scoring)


@pytest.mark.parametrize("method", ["ListHeads", "Verify"])
def test_a1_small_methods_refuse_malformed_messages(server, scoring: Scoring, method: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        scoring.channel.unary_unary(f"/logprobd.v1.Scoring/{method}")(b"\xff\xff\xff", timeout=5)
    assert error.value.code() == INVALID
    assert_unharmed(server, scoring)


def test_b30_a_padded_id_is_out_of_range(start_server, model) -> None:
    server = start_server("--model", str(model.path), "--valid-vocab", "1000")
    with Scoring(server.grpc) as scoring:
        with pytest.raises(grpc.RpcError) as error:
            scoring.score_raw(valid(targets=i32(0, 1001)))
        assert error.value.code() == INVALID
        assert "1000" in error.value.details()
        assert_unharmed(server, scoring)


def test_b31_ignored_rows_are_exact_zeros_and_counted(server, scoring: Scoring) -> None:
    reply = scoring.score(request(targets=i32(-100, 3), outputs=511, top_k=2))
    assert reply.ignored_rows == 1
    for name in ("logprob", "entropy", "lse", "argmax_logprob", "sum_p_squared", "max_logit"):
        values = floats(getattr(reply, name))
        assert values[0] == 0 and values[1] != 0, name
    assert np.frombuffer(reply.top_k_ids, np.int32)[:2].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_b33_nonfinite_values_affect_only_their_own_row(server, scoring: Scoring, bad) -> None:
    clean = request(rows=3)
    hidden = np.frombuffer(clean.hidden, np.float32).copy().reshape(3, 64)
    hidden[1, 10] = bad
    reply = scoring.score(request(rows=3, hidden=hidden.tobytes()))
    logprob = floats(reply.logprob)
    assert np.isnan(logprob[1])
    assert reply.nonfinite_rows == 1
    assert (logprob[[0, 2]] == floats(scoring.score(clean).logprob)[[0, 2]]).all()


def test_b40_a_payload_in_many_small_frames_is_scored(server, scoring: Scoring) -> None:
    rows = 20
    message = request(rows=rows, targets=np.arange(rows, dtype=np.int32).tobytes())
    data = call_in_frames(
        server.grpc, "/logprobd.v1.Scoring/Score", message.SerializeToString(), [1, 2, 3, 5, 7]
    )
    reply = messages().ScoreResponse.FromString(data)
    assert len(floats(reply.logprob)) == rows
    assert reply.logprob == scoring.score(message).logprob
    assert_unharmed(server, scoring)


def test_g104_many_head_names_add_no_series(server, scoring: Scoring) -> None:
    def series() -> int:
        return len([x for x in server.get("/metrics")[1].splitlines() if not x.startswith("#")])

    before, counted = series(), server.metric("logprobd_requests_total", head="unknown")
    for i in range(200):
        with pytest.raises(grpc.RpcError) as error:
            scoring.score_raw(valid(head=f"many-{i}"))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert series() == before
    assert "many-" not in server.get("/metrics")[1]
    assert server.metric("logprobd_requests_total", head="unknown") == counted + 200
    assert_unharmed(server, scoring)


def test_g107_logs_hold_no_payload(start_server, model) -> None:
    server = start_server("--model", str(model.path), "--log-level", "debug")
    hidden = f32(*[123.4567] * 128)
    with Scoring(server.grpc) as scoring:
        scoring.score_raw(valid(hidden=hidden, targets=i32(777, 778), request_id="find-me"))
        with pytest.raises(grpc.RpcError):
            scoring.score_raw(valid(hidden=hidden, targets=i32(777, 99_778), request_id="find-me"))
    server.stop()
    log = "".join(server.log)
    assert "find-me" in log
    for secret in ("123.4567", "123.456", struct.pack("<f", 123.4567).hex()):
        assert secret not in log
    # The pattern matches the target, but not the milliseconds of a time.
    assert not re.search(r"(?<![\d.])777(?!\d)", log), log


def test_g107_core_dumps_stay_off_if_they_are_off(start_server, model) -> None:
    # A core dump would contain payloads. The server raises the limit of open files, but never that of core dumps.
    server = start_server("--model", str(model.path), prefix=("prlimit", "--core=0:0"))
    limits = pathlib.Path(f"/proc/{server.process.pid}/limits").read_text()
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE), limits
