"""The hand-written encoding gives the bytes and values of protobuf's encoding."""

import importlib
import sys
from pathlib import Path

import pytest
from logprobd import _protobuf, _wire

PROTO = Path(__file__).resolve().parents[4] / "proto"


@pytest.fixture(scope="module")
def pb2(tmp_path_factory):
    protoc = pytest.importorskip("grpc_tools.protoc")
    out = tmp_path_factory.mktemp("proto")
    arguments = ["protoc", f"-I{PROTO}", f"--python_out={out}"]
    names = ("scoring", "local", "weights")
    assert protoc.main([*arguments, *(f"logprobd/v1/{name}.proto" for name in names)]) == 0
    # The generated files are in logprobd/v1/, and the package under test is named logprobd too.
    for name in names:
        text = (out / f"logprobd/v1/{name}_pb2.py").read_text()
        text = text.replace("from logprobd.v1 import scoring_pb2", "import scoring_pb2_for_test")
        (out / f"{name}_pb2_for_test.py").write_text(text)
    sys.path.insert(0, str(out))
    yield importlib.import_module("scoring_pb2_for_test")
    sys.path.remove(str(out))


@pytest.fixture(scope="module")
def local_pb2(pb2):
    return importlib.import_module("local_pb2_for_test")


@pytest.fixture(scope="module")
def weights_pb2(pb2):
    return importlib.import_module("weights_pb2_for_test")


REQUEST = {
    "request_id": "töken-1",
    "head": "policy",
    "weights_version": 2**63 + 5,
    "dtype": 1,
    "rows": 2,
    "hidden_size": 4,
    "targets": b"\x01\0\0\0\x9c\xff\xff\xff",
    "temperature": 0.5,
    "row_temperatures": b"\0\0\x80?\0\0\0@",
    "entropy_temperature": 1.0,
    "ignore_index": -100,
    "outputs": 511,
    "top_k": 5,
    "candidate_ids": b"\x07\0\0\0",
    "candidate_offsets": b"\0" * 12,
    "segment_offsets": b"\0\0\0\0\x02\0\0\0",
    "priority": 3,
    "reject_nonfinite": True,
    "chunk_id": 300,
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "trace": True,
    "hidden": bytes(range(16)),
}
RESPONSE_BYTES = [
    "logprob",
    "entropy",
    "lse",
    "argmax_id",
    "argmax_logprob",
    "greedy",
    "sum_p_squared",
    "max_logit",
    "min_logit",
    "top_k_ids",
    "top_k_logprobs",
    "candidate_logprobs",
    "segment_logprob",
    "segment_rows",
    "segment_greedy",
    "target_rank",
]


def test_every_message_has_the_fields_of_protobuf(pb2, local_pb2, weights_pb2):
    for module in (pb2, local_pb2, weights_pb2):
        for name, message in module.DESCRIPTOR.message_types_by_name.items():
            ours = _protobuf._fields(getattr(_wire, name))

            assert {number: field for number, (field, _) in ours.items()} == {
                field.number: field.name for field in message.fields
            }, name


def test_a_full_request_has_the_bytes_of_protobuf(pb2):
    ours = _wire.encode(_wire.ScoreRequest(**REQUEST))

    assert ours == pb2.ScoreRequest(**REQUEST).SerializeToString()


def test_a_request_of_defaults_is_empty_but_optional_zeros_are_sent(pb2):
    zeros = {"temperature": 0.0, "entropy_temperature": 0.0, "ignore_index": 0}

    assert _wire.encode(_wire.ScoreRequest()) == b""
    assert (
        _wire.encode(_wire.ScoreRequest(**zeros)) == pb2.ScoreRequest(**zeros).SerializeToString()
    )


@pytest.mark.parametrize("value", [0, 1, -1, 63, -64, 2**31 - 1, -(2**31)])
def test_ignore_index_is_zigzag_coded(pb2, value):
    ours = _wire.encode(_wire.ScoreRequest(ignore_index=value))

    assert pb2.ScoreRequest.FromString(ours).ignore_index == value
    assert _wire.decode(_wire.ScoreRequest, ours).ignore_index == value


def test_a_request_decodes_to_what_protobuf_wrote(pb2):
    ours = _wire.decode(_wire.ScoreRequest, pb2.ScoreRequest(**REQUEST).SerializeToString())

    assert vars(ours) == {**REQUEST, "shared_memory": None, "cuda_ipc": None}


SHARED = {"region": b"r" * 16, "offset": 2**40, "bytes": 4096}
DEVICE = {
    "lease": b"l" * 16,
    "device_uuid": b"u" * 16,
    "handle": b"\0" * 64,
    "offset": 16,
    "bytes": 32,
}


@pytest.mark.parametrize("place", ["shared_memory", "cuda_ipc"])
def test_slices_travel_as_in_protobuf(pb2, place):
    fields = SHARED if place == "shared_memory" else DEVICE
    ours_of = _wire.SharedMemorySlice if place == "shared_memory" else _wire.CudaIpcSlice
    theirs_of = pb2.SharedMemorySlice if place == "shared_memory" else pb2.CudaIpcSlice
    ours = _wire.ScoreRequest(rows=2, **{place: ours_of(**fields)})
    theirs = pb2.ScoreRequest(rows=2, **{place: theirs_of(**fields)})

    data = theirs.SerializeToString()

    assert _wire.encode(ours) == data
    assert _wire.decode(_wire.ScoreRequest, data) == ours


def test_an_optional_message_without_fields_is_sent_and_found(pb2, local_pb2):
    theirs = local_pb2.LocalRequest(hello=local_pb2.Hello()).SerializeToString()

    assert theirs != b""
    assert _wire.encode(_wire.LocalRequest(hello=_wire.Hello())) == theirs
    assert _wire.decode(_wire.LocalRequest, theirs) == _wire.LocalRequest(hello=_wire.Hello())


def test_messages_of_the_control_socket_travel_as_in_protobuf(local_pb2):
    welcome = {
        "lease": b"l" * 16,
        "shared_memory": True,
        "cuda_ipc": True,
        "region_bytes_max": 2**33,
        "lease_bytes_max": 2**34,
        "lease_regions_max": 16,
    }
    requests = [("hello", "Hello", {"client_id": "me"})]
    requests += [("create_region", "CreateRegion", {"bytes": 2**33})]
    requests += [("close_region", "CloseRegion", {"id": b"r" * 16})]
    replies = [("welcome", "Welcome", welcome), ("region", "Region", {"id": b"r", "bytes": 4096})]

    for outer, cases in (("LocalRequest", requests), ("LocalReply", replies)):
        for field, name, values in cases:
            ours = getattr(_wire, outer)(**{field: getattr(_wire, name)(**values)})
            theirs = getattr(local_pb2, outer)(**{field: getattr(local_pb2, name)(**values)})
            data = theirs.SerializeToString()
            assert _wire.encode(ours) == data
            assert _wire.decode(getattr(_wire, outer), data) == ours


def test_local_access_decodes_as_in_protobuf(pb2):
    access = {"boot_id": "b", "grpc_path": "/g", "control_path": "/c", "shared_memory": True}
    theirs = pb2.ListHeadsResponse(local=pb2.LocalAccess(**access, cuda_ipc=True))

    ours = _wire.decode(_wire.ListHeadsResponse, theirs.SerializeToString())

    assert ours.local == _wire.LocalAccess(**access, cuda_ipc=True)
    assert _wire.decode(_wire.ListHeadsResponse, b"").local is None


def test_hidden_is_the_last_field_on_the_wire():
    ours = _wire.encode(_wire.ScoreRequest(**REQUEST))

    assert ours.endswith(REQUEST["hidden"])


def test_a_response_decodes_as_in_protobuf(pb2):
    theirs = pb2.ScoreResponse(
        request_id="r",
        chunk_id=9,
        weights_version=4,
        status_code=8,
        status_message="full",
        retry_after_ms=20,
        rows=3,
        ignored_rows=1,
        nonfinite_rows=2,
        timings=pb2.StageTimings(queue_us=1, copy_us=2, engine_us=3, total_us=2**32 - 1),
        **{name: name.encode() for name in RESPONSE_BYTES},
    )

    ours = _wire.decode(_wire.ScoreResponse, theirs.SerializeToString())

    assert ours.trace is None
    assert [bytes(getattr(ours, name)) for name in RESPONSE_BYTES] == [
        name.encode() for name in RESPONSE_BYTES
    ]
    assert (ours.status_code, ours.status_message, ours.retry_after_ms) == (8, "full", 20)
    assert ours.timings == _wire.StageTimings(1, 2, 3, 2**32 - 1)
    assert _wire.encode(ours) == theirs.SerializeToString()


def test_a_trace_decodes_as_in_protobuf(pb2):
    stages = {"receive": (0, 1), "queue": (1, 2**40), "reply": (2**40, 2**41)}
    theirs = pb2.ScoreResponse(
        trace=pb2.Trace(
            traceparent="00-",
            received_unix_ns=2**63,
            kernel_ns=5,
            **{name: pb2.TraceStage(begin_ns=b, end_ns=e) for name, (b, e) in stages.items()},
        )
    )

    ours = _wire.decode(_wire.ScoreResponse, theirs.SerializeToString())

    assert ours.trace == _wire.Trace(
        traceparent="00-",
        received_unix_ns=2**63,
        kernel_ns=5,
        **{name: _wire.TraceStage(*times) for name, times in stages.items()},
    )
    assert _wire.encode(ours) == theirs.SerializeToString()


def test_a_negative_status_code_survives(pb2):
    data = pb2.ScoreResponse(status_code=-1).SerializeToString()

    assert _wire.decode(_wire.ScoreResponse, data).status_code == -1
    assert _wire.encode(_wire.ScoreResponse(status_code=-1)) == data


def test_heads_decode_as_in_protobuf(pb2):
    head = {"name": "a", "vocab_size": 7, "scale": 0.25, "tied": True, "transports": ["tcp", "shm"]}
    theirs = pb2.ListHeadsResponse(
        heads=[
            pb2.Head(
                **head,
                limits=pb2.Limits(message_bytes_max=2**40),
                layout=[pb2.Shard(), pb2.Shard(shard=1, device="gpu3", vocab_begin=6, vocab_end=7)],
            ),
            pb2.Head(name="b"),
        ],
        server_version="1.2",
    )

    ours = _wire.decode(_wire.ListHeadsResponse, theirs.SerializeToString())

    assert [h.name for h in ours.heads] == ["a", "b"]
    assert {name: getattr(ours.heads[0], name) for name in head} == head
    assert ours.heads[0].limits.message_bytes_max == 2**40
    assert ours.heads[0].layout == [_wire.Shard(), _wire.Shard(0, 1, "gpu3", 6, 7)]
    assert ours.heads[1].limits == _wire.Limits()
    assert ours.heads[1].layout == []
    assert _wire.encode(ours) == theirs.SerializeToString()


def test_verify_travels_as_in_protobuf(pb2):
    request = {"head": "h", "rows": 64, "seed": 2**64 - 1}
    response = {"passed": True, "rows": 8, "logprob_difference_max": 1e-7, "engine": "cpu"}

    assert (
        _wire.encode(_wire.VerifyRequest(**request))
        == pb2.VerifyRequest(**request).SerializeToString()
    )
    ours = _wire.decode(_wire.VerifyResponse, pb2.VerifyResponse(**response).SerializeToString())
    assert {name: getattr(ours, name) for name in response} == response


@pytest.mark.parametrize("place", ["data", "shared_memory", "cuda_ipc"])
def test_pushed_rows_travel_as_in_protobuf(pb2, weights_pb2, place):
    values = {"data": bytes(range(64)), "shared_memory": SHARED, "cuda_ipc": DEVICE}[place]
    types = {"shared_memory": "SharedMemorySlice", "cuda_ipc": "CudaIpcSlice"}
    fields = {"row_begin": 2**31, "rows": 8, "is_bias": True}
    mine = getattr(_wire, types[place])(**values) if place in types else values
    ours = _wire.PushWeightsRequest(rows=_wire.PushedRows(**fields, **{place: mine}))
    theirs = weights_pb2.PushWeightsRequest(rows={**fields, place: values})

    data = theirs.SerializeToString()

    assert _wire.encode(ours) == data
    assert _wire.decode(_wire.PushWeightsRequest, data) == ours


def test_requests_of_weights_have_the_bytes_of_protobuf(weights_pb2):
    header = {"head": "h", "version": 2**53, "dtype": 3, "vocab_rows": 9, "sha256": "ab"}
    load = {"head": "h", "path": "/p", "version": 2, "sha256": "ab", "commit": True}
    requests = {
        "PushHeader": {**header, "allow_nonfinite": True},
        "LoadWeightsRequest": {**load, "in_place": True, "allow_nonfinite": True},
        "CommitWeightsRequest": {"head": "h", "version": 7},
        "RollbackWeightsRequest": {"head": "h"},
        "DiscardWeightsRequest": {"head": "h", "staged": True, "previous": True},
        "ListWeightsRequest": {"head": "h"},
    }
    for name, values in requests.items():
        theirs = getattr(weights_pb2, name)(**values).SerializeToString()
        assert _wire.encode(getattr(_wire, name)(**values)) == theirs


def test_answers_of_weights_decode_as_in_protobuf(weights_pb2):
    version = {"version": 3, "sha256": "ab", "source": "pushed", "weight_bytes": 2**40}
    version |= {"loaded_unix_seconds": 2**33, "dtype": 3}
    pushed = {"version": 4, "rows": 5, "vocab_rows": 6}
    state = {"head": "h", "live": version, "pushed": pushed, "highest_version": 7}

    theirs = weights_pb2.ListWeightsResponse(heads=[state, {}]).SerializeToString()
    ours = _wire.decode(_wire.ListWeightsResponse, theirs)
    answer = weights_pb2.PushWeightsResponse(pushed=pushed, staged=version).SerializeToString()
    progress = weights_pb2.LoadWeightsProgress(phase="loading", bytes_done=1, done=version)

    known = _wire.HeadWeightsState(
        "h",
        live=_wire.WeightsVersion(**version),
        pushed=_wire.PushedVersion(**pushed),
        highest_version=7,
    )
    assert ours.heads == [known, _wire.HeadWeightsState()]
    assert _wire.decode(_wire.PushWeightsResponse, answer) == _wire.PushWeightsResponse(
        known.pushed, known.live
    )
    decoded = _wire.decode(_wire.LoadWeightsProgress, progress.SerializeToString())
    assert decoded == _wire.LoadWeightsProgress("loading", 1, done=known.live)


def test_all_fields_of_the_proto_are_known(pb2, local_pb2, weights_pb2):
    for ours in (
        _wire.ScoreRequest,
        _wire.SharedMemorySlice,
        _wire.CudaIpcSlice,
        _wire.LocalAccess,
        _wire.ScoreResponse,
        _wire.StageTimings,
        _wire.Head,
        _wire.Limits,
        _wire.Shard,
        _wire.ListHeadsResponse,
        _wire.VerifyRequest,
        _wire.VerifyResponse,
        _wire.LocalRequest,
        _wire.LocalReply,
        _wire.Hello,
        _wire.Welcome,
        _wire.CreateRegion,
        _wire.Region,
        _wire.CloseRegion,
        _wire.LoadWeightsRequest,
        _wire.LoadWeightsProgress,
        _wire.PushWeightsRequest,
        _wire.PushHeader,
        _wire.PushedRows,
        _wire.PushWeightsResponse,
        _wire.PushedVersion,
        _wire.CommitWeightsRequest,
        _wire.RollbackWeightsRequest,
        _wire.DiscardWeightsRequest,
        _wire.WeightsResponse,
        _wire.ListWeightsRequest,
        _wire.ListWeightsResponse,
        _wire.HeadWeightsState,
        _wire.WeightsVersion,
    ):
        known = {
            **pb2.DESCRIPTOR.message_types_by_name,
            **local_pb2.DESCRIPTOR.message_types_by_name,
            **weights_pb2.DESCRIPTOR.message_types_by_name,
        }
        theirs = known[ours.__name__]
        numbers = {f.name: f.metadata["wire"].number for f in ours.__dataclass_fields__.values()}
        assert numbers == {field.name: field.number for field in theirs.fields}


def test_enums_are_those_of_the_proto(pb2):
    assert _wire.DTYPE_NUMBERS == {
        "bf16": pb2.DTYPE_BF16,
        "fp16": pb2.DTYPE_F16,
        "fp32": pb2.DTYPE_F32,
    }
    assert {
        name.removeprefix("PRIORITY_").lower(): number
        for name, number in pb2.Priority.items()
        if number
    } == _wire.PRIORITIES
    assert {
        name.removeprefix("OUTPUT_").lower(): number
        for name, number in pb2.Output.items()
        if number
    } == {name: output.bit for name, output in _wire.OUTPUTS.items()}


def test_unknown_fields_are_skipped():
    unknown = b"\xa0\x06\x05" + b"\xa2\x06\x02hi" + b"\xa5\x06\0\0\0\0" + b"\xa1\x06" + b"\0" * 8

    response = _wire.decode(_wire.ScoreResponse, unknown + b"\x38\x03")

    assert response.rows == 3


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x05ab",  # a length beyond the end
        b"\x80",  # a truncated tag
        b"\x38" + b"\xff" * 10 + b"\x01",  # a varint of 11 bytes
        b"\x3a\x00",  # rows as a length-delimited field
        b"\x0b",  # a group
        b"\x0a\x01\xff",  # a string that is not UTF-8
    ],
)
def test_malformed_bytes_are_refused(data):
    with pytest.raises(_wire.DecodeError):
        _wire.decode(_wire.ScoreResponse, data)
