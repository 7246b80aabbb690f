"""FakeServer checks requests by the rules of scoring.proto, and fails as it is told to."""

import types

import grpc
import numpy as np
import pytest
from logprobd import Client, _wire, testing
from logprobd.testing import FakeServer

VOCAB, HIDDEN, ROWS = 7, 4, 3


def ints(*values):
    return np.array(values, "<i4").tobytes()


def floats(*values):
    return np.array(values, "<f4").tobytes()


def request(**fields):
    valid = {
        "dtype": _wire.DTYPE_NUMBERS["fp32"],
        "rows": ROWS,
        "hidden_size": HIDDEN,
        "hidden": np.arange(ROWS * HIDDEN, dtype="<f4").tobytes(),
        "targets": ints(0, 6, 1),
    }
    return _wire.ScoreRequest(**{**valid, **fields})


def rows_of(count):
    """Returns the fields of a request of `count` rows of zeros."""
    return {"rows": count, "hidden": bytes(count * HIDDEN * 4), "targets": bytes(count * 4)}


@pytest.fixture
def server():
    with FakeServer(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        request_rows_max=4,
        top_k_max=5,
        candidates_max=3,
        segments_max=2,
        weights_version=3,
    ) as server:
        yield server


class Raw:
    """Sends messages to a server as they are."""

    def __init__(self, server):
        self.channel = grpc.insecure_channel(server.address)

    def score(self, message, **options):
        data = message if isinstance(message, bytes) else _wire.encode(message)
        answer = self.channel.unary_unary(_wire.SCORE)(data, timeout=20, **options)
        return _wire.decode(_wire.ScoreResponse, answer)

    def refusal(self, message):
        with pytest.raises(grpc.RpcError) as refused:
            self.score(message)
        return refused.value

    def stream(self, *messages):
        call = self.channel.stream_stream(_wire.SCORE_STREAM)
        data = [each if isinstance(each, bytes) else _wire.encode(each) for each in messages]
        return (_wire.decode(_wire.ScoreResponse, each) for each in call(iter(data), timeout=20))

    def call(self, method, message, answer):
        data = self.channel.unary_unary(method)(_wire.encode(message), timeout=20)
        return _wire.decode(answer, data)


@pytest.fixture
def raw(server):
    raw = Raw(server)
    yield raw
    raw.channel.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 3}, "hidden_size: 3, must be 4"),
        (rows_of(5), r"rows: 5, must be in \[0, 4\]"),
        ({"top_k": 6}, r"top_k: 6, must be in \[0, 5\]"),
        ({"dtype": 0}, "dtype: 0, is not known"),
        ({"hidden": bytes(47)}, "hidden has 47 bytes for 12 elements of fp32"),
        ({"dtype": _wire.DTYPE_NUMBERS["fp16"]}, "hidden has 48 bytes for 12 elements of fp16"),
        ({"targets": ints(0, 1)}, "targets has 8 bytes for 3 rows"),
        ({"targets": ints(0, 7, 9)}, r"targets\[1\]: 7, must be in \[0, 7\)"),
        ({"targets": ints(0, 1, -1)}, r"targets\[2\]: -1, must be in \[0, 7\)"),
        ({"targets": ints(0, -100, 1), "ignore_index": -1}, r"targets\[1\]: -100, must"),
        ({"ignore_index": 0}, r"ignore_index: 0, must lie outside \[0, 7\)"),
        ({"ignore_index": 6}, r"ignore_index: 6, must lie outside \[0, 7\)"),
        ({"temperature": 0.9e-4}, "temperature: .*, must be finite and in"),
        ({"temperature": 1.1e4}, "temperature: .*, must be finite and in"),
        ({"temperature": float("nan")}, "temperature: nan, must be finite and in"),
        ({"entropy_temperature": 0.0}, "^entropy_temperature: 0.0, must be finite"),
        ({"row_temperatures": floats(1, 1, 0)}, r"row_temperatures\[2\]: 0.0, must be finite"),
        ({"row_temperatures": floats(1, 1)}, "row_temperatures has 8 bytes for 3 rows"),
        (
            {"candidate_ids": ints(0, 7), "candidate_offsets": ints(0, 1, 2, 2)},
            r"candidate_ids\[1\]: 7, must be in \[0, 7\)",
        ),
        (
            {"candidate_ids": ints(-1), "candidate_offsets": ints(0, 1, 1, 1)},
            r"candidate_ids\[0\]: -1, must be in \[0, 7\)",
        ),
        (
            {"candidate_ids": ints(1, 2, 3, 4), "candidate_offsets": ints(0, 2, 3, 4)},
            "candidate_ids has 4 ids, above 3",
        ),
        (
            {"candidate_ids": ints(1), "candidate_offsets": ints(0, 1)},
            "candidate_offsets has 2 elements for 3 rows",
        ),
        ({"segment_offsets": ints(0, 2)}, "segment_offsets must rise from 0 to 3"),
        ({"segment_offsets": ints(1, 3)}, "segment_offsets must rise from 0 to 3"),
        ({"segment_offsets": ints(0, 4, 3)}, "segment_offsets must rise from 0 to 3"),
        ({"segment_offsets": ints(0, 1, 2, 3)}, "segment_offsets: 3 segments, must be at most 2"),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_by_its_field(raw, fields, message):
    refused = raw.refusal(request(**fields))

    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(ValueError, match=message):
        raise ValueError(refused.details())


@pytest.mark.parametrize(
    "fields",
    [
        rows_of(4),
        rows_of(0),
        {"top_k": 5},
        {"head": "fake", "weights_version": 3},
        {"targets": ints(0, -100, 1)},
        {"ignore_index": -1, "targets": ints(0, -1, 1)},
        {"ignore_index": 7, "targets": ints(0, 7, 1)},
        {"temperature": 1e-4, "entropy_temperature": 1e4},
        {"candidate_ids": ints(0, 6, 3), "candidate_offsets": ints(0, 0, 3, 3)},
        {"segment_offsets": ints(0, 0, 3)},
        {"dtype": _wire.DTYPE_NUMBERS["bf16"], "hidden": bytes(24)},
    ],
)
def test_a_request_within_every_limit_is_scored(raw, fields):
    assert raw.score(request(**fields)).rows == fields.get("rows", ROWS)


def test_another_head_another_version_and_bytes_of_no_message_are_refused(raw):
    assert raw.refusal(request(head="other")).code() is grpc.StatusCode.NOT_FOUND
    version = raw.refusal(request(weights_version=2))
    assert version.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert version.details() == "weights_version: 2 is not live; 3 is live"
    assert raw.refusal(b"\xff").details().startswith("message: ")


def test_top_k_is_at_most_the_vocabulary():
    with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN, top_k_max=100) as server:
        raw = Raw(server)
        assert len(raw.score(request(top_k=VOCAB)).top_k_ids) == ROWS * VOCAB * 4
        assert raw.refusal(request(top_k=8)).details() == "top_k: 8, must be in [0, 7]"
        raw.channel.close()


def test_an_answer_belongs_to_its_request_and_has_what_was_asked_for(raw):
    answer = raw.score(request(request_id="r", chunk_id=5, targets=ints(0, -100, -100)))

    assert (answer.request_id, answer.chunk_id, answer.weights_version) == ("r", 5, 3)
    assert (answer.rows, answer.ignored_rows, answer.nonfinite_rows) == (3, 2, 0)
    assert (len(answer.logprob), len(answer.entropy), len(answer.lse)) == (12, 12, 0)
    assert (len(answer.top_k_ids), len(answer.candidate_logprobs), answer.trace) == (0, 0, None)
    assert len(raw.score(request(outputs=4)).logprob) == 0
    assert len(raw.score(request(outputs=4)).lse) == 12


def test_logits_have_the_scale_then_the_bias_then_the_cap():
    weight = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], np.float32)
    server = FakeServer(weight=weight, scale=0.5, bias=[0.0, 1.0, -1.0])

    assert (server.vocab_size, server.hidden_size) == (3, 2)
    plain = [0.5 * 3, 0.5 * 8 + 1, 0.5 * 7 - 1]
    assert server.logits(np.array([3.0, 4.0])).tolist() == plain
    server.softcap = 2.0
    expected = 2 * np.tanh(np.array(plain) / 2)
    assert np.array_equal(server.logits(np.array([3.0, 4.0])), expected)


def test_the_lowest_id_is_the_best_of_equal_logits():
    with (
        FakeServer(weight=np.ones((5, HIDDEN), np.float32)) as server,
        Client(server.address) as client,
    ):
        hidden = np.ones((1, HIDDEN), np.float32)
        result = client.score(hidden, [2], outputs=("argmax", "target_rank", "greedy"), top_k=3)

    assert (result.argmax_id.tolist(), result.target_rank.tolist()) == ([0], [2])
    assert result.top_k_ids.tolist() == [[0, 1, 2]]
    assert result.greedy.tolist() == [False]


def test_rows_without_finite_logits_are_marked_in_every_output(server):
    hidden = np.ones((4, HIDDEN), np.float32)
    hidden[1] = hidden[3] = np.inf
    names = [name for name in _wire.OUTPUTS]
    with Client(server.address) as client:
        result = client.score(
            hidden, [1, 2, 3, 4], outputs=names, top_k=2, candidates=[[1], [2], [3], [4]]
        )

    assert result.nonfinite_rows == 2
    for name in result.outputs:
        values = getattr(result, name)
        if name in ("argmax_id", "target_rank", "top_k_ids"):
            assert (values[1] == -1).all()
        elif name == "greedy":
            assert not values[1]
        elif name != "candidate_offsets":
            assert np.isnan(values[1]).all()
            assert np.isfinite(values[0]).all()
            assert np.isfinite(values[2]).all()


def test_random_weights_give_logits_of_standard_deviation_3_and_depend_on_the_seed():
    server = FakeServer(vocab_size=300, hidden_size=256)
    logits = np.random.default_rng(5).standard_normal((50, 256)) @ server.weight.T

    assert server.weight.dtype == np.float32
    assert logits.std() == pytest.approx(3, rel=0.05)
    assert np.array_equal(server.weight, FakeServer(vocab_size=300, hidden_size=256).weight)
    assert not np.array_equal(
        server.weight, FakeServer(vocab_size=300, hidden_size=256, seed=1).weight
    )


# Failures on purpose


def test_the_next_messages_fail_in_the_order_that_was_asked_for(server, raw):
    server.fail_next(2, "UNAVAILABLE")
    server.fail_next(code="INTERNAL", retry_after=0.25)
    server.fail_next(retry_after=-1)

    refused = [raw.refusal(request()) for _ in range(4)]

    assert [each.code().name for each in refused] == [
        "UNAVAILABLE",
        "UNAVAILABLE",
        "INTERNAL",
        "RESOURCE_EXHAUSTED",
    ]
    hints = [dict(each.trailing_metadata()).get("grpc-retry-pushback-ms") for each in refused]
    assert hints == [None, None, "250", "-1000"]
    assert raw.score(request()).rows == ROWS
    assert len(server.requests) == 5


def test_a_failure_on_a_stream_is_the_answer_to_its_chunk(server, raw):
    server.fail_next(1, "RESOURCE_EXHAUSTED", retry_after=0.25)
    server.fail_next(1, "INTERNAL", retry_after=-1)
    chunks = [request(chunk_id=number) for number in (7, 8, 9)]

    first, second, third, last = raw.stream(*chunks, b"\xff")

    status = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert (first.chunk_id, first.status_code, first.retry_after_ms) == (7, status, 250)
    assert first.status_message == "simulated failure"
    assert (second.chunk_id, second.retry_after_ms) == (8, 0)
    assert (third.chunk_id, third.status_code, third.rows) == (9, 0, ROWS)
    assert (last.chunk_id, last.status_code) == (0, grpc.StatusCode.INVALID_ARGUMENT.value[0])


def test_aborted_ends_the_whole_stream(server, raw):
    server.fail_next(1, "ABORTED")

    with pytest.raises(grpc.RpcError) as ended:
        list(raw.stream(request(chunk_id=1), request(chunk_id=2)))

    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


def test_while_it_is_not_ready_nothing_is_scored(server, raw):
    server.ready = False

    refused = raw.refusal(request())

    assert (refused.code().name, refused.details()) == ("UNAVAILABLE", "the head is loading")
    health = [raw.call(_wire.HEALTH_CHECK, _wire.HealthRequest(), _wire.HealthResponse).status]
    server.ready = True
    for service in ("", _wire.SCORING_SERVICE):
        message = _wire.HealthRequest(service)
        health.append(raw.call(_wire.HEALTH_CHECK, message, _wire.HealthResponse).status)
    assert health == [2, 1, 1]
    with pytest.raises(grpc.RpcError) as unknown:
        raw.call(_wire.HEALTH_CHECK, _wire.HealthRequest("other"), _wire.HealthResponse)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_unknown_method_is_not_implemented(raw):
    with pytest.raises(grpc.RpcError) as refused:
        raw.call("/logprobd.v1.Scoring/Other", _wire.HealthRequest(), _wire.HealthResponse)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(("delay", "slept"), [(0.0, []), (3.0, [3.0])])
def test_answers_may_be_delayed(server, raw, monkeypatch, delay, slept):
    sleeps = []
    time = types.SimpleNamespace(sleep=sleeps.append, time_ns=lambda: 0)
    monkeypatch.setattr(testing, "time", time)
    server.delay = delay

    raw.score(request())

    assert sleeps == slept


def test_requests_are_noted_with_what_a_test_may_ask_for(server, raw):
    message = request(request_id="r", head="fake", weights_version=3)
    raw.score(message, metadata=(("client_id", "me"), ("traceparent", "00-a"), ("x-bin", b"\0")))
    raw.score(request(traceparent="00-b"), metadata=(("traceparent", "00-a"),))
    list(raw.stream(request()))

    first, second, third = server.requests
    assert (first.method, first.rows, first.head, first.request_id) == ("Score", 3, "fake", "r")
    assert (first.weights_version, first.transport, first.traceparent) == (3, "tcp", "00-a")
    assert first.message_bytes == len(_wire.encode(message))
    assert first.metadata["client_id"] == "me"
    assert "x-bin" not in first.metadata
    assert (second.traceparent, third.method) == ("00-b", "ScoreStream")


def test_the_head_is_described_as_it_is(server, raw):
    server.bias, server.scale, server.softcap = np.ones(VOCAB), 0.5, 2.0
    answer = raw.call(_wire.LIST_HEADS, _wire.ListHeadsRequest(), _wire.ListHeadsResponse)

    (head,) = answer.heads
    assert (head.name, head.tensor, head.vocab_size, head.hidden_size) == (
        "fake",
        "lm_head.weight",
        VOCAB,
        HIDDEN,
    )
    assert (head.has_bias, head.scale, head.softcap, head.ready) == (True, 0.5, 2.0, True)
    assert head.weight_bytes == VOCAB * HIDDEN * 4
    assert head.limits == _wire.Limits(64 << 20, 4, 5, 3, 2, 16)
    assert (head.transports, answer.local) == (["tcp"], None)
    assert head.layout == [_wire.Shard(device="cpu", vocab_end=VOCAB)]


def test_transports_are_those_that_were_switched_on():
    for options, transports in (
        ({"shared_memory": True}, ["tcp", "shm"]),
        ({"device_reader": lambda *_: b""}, ["tcp", "cuda_ipc"]),
        ({"shared_memory": True, "device_reader": lambda *_: b""}, ["tcp", "shm", "cuda_ipc"]),
    ):
        with FakeServer(vocab_size=VOCAB, hidden_size=HIDDEN, **options) as server:
            assert server.head().transports == transports
            assert server.control is not None


def test_a_stopped_server_starts_again_at_the_same_port(server, raw):
    address = server.address

    server.stop()
    server.stop()
    assert raw.refusal(request()).code() is grpc.StatusCode.UNAVAILABLE
    server.start()

    assert server.address == address
    assert raw.score(request(), wait_for_ready=True).rows == ROWS


@pytest.mark.parametrize(("rows", "verified"), [(0, 8), (1, 1), (64, 64)])
def test_a_verification_has_at_most_64_rows(raw, rows, verified):
    report = raw.call(_wire.VERIFY, _wire.VerifyRequest(rows=rows), _wire.VerifyResponse)

    assert (report.passed, report.rows, report.weights_version) == (True, verified, 3)
    with pytest.raises(grpc.RpcError, match="rows: 65, must be in"):
        raw.call(_wire.VERIFY, _wire.VerifyRequest(rows=65), _wire.VerifyResponse)
