"""The messages of logprobd/v1/*.proto and grpc.health.v1 that the client uses.

The proto files document the fields. Fields are encoded in the order of their declaration, so
`hidden`, the largest payload, is declared after the other fields. proto/generate.py writes the
lines between [generated: NAME] and [end].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from logprobd import _protobuf
from logprobd._protobuf import wire

Buffer = _protobuf.Buffer
DecodeError = _protobuf.DecodeError
decode = _protobuf.decode
encode = _protobuf.encode

SCORE = "/logprobd.v1.Scoring/Score"
SCORE_STREAM = "/logprobd.v1.Scoring/ScoreStream"
LIST_HEADS = "/logprobd.v1.Scoring/ListHeads"
VERIFY = "/logprobd.v1.Scoring/Verify"
LOAD_WEIGHTS = "/logprobd.v1.Weights/Load"
PUSH_WEIGHTS = "/logprobd.v1.Weights/Push"
COMMIT_WEIGHTS = "/logprobd.v1.Weights/Commit"
ROLLBACK_WEIGHTS = "/logprobd.v1.Weights/Rollback"
DISCARD_WEIGHTS = "/logprobd.v1.Weights/Discard"
LIST_WEIGHTS = "/logprobd.v1.Weights/List"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SCORING_SERVICE = "logprobd.v1.Scoring"

DTYPE_NUMBERS = {"bf16": 1, "fp16": 2, "fp32": 3}
DTYPE_NAMES = {number: name for name, number in DTYPE_NUMBERS.items()}
PRIORITIES = {"high": 1, "normal": 2, "low": 3}


class Output(NamedTuple):
    """An output with one value per row, and the response fields that contain it."""

    bit: int
    """Its bit in ScoreRequest.outputs."""
    arrays: dict[str, tuple[str, str]]
    """NumPy type on the wire and NumPy type of the result, by field of ScoreResponse."""


OUTPUTS = {
    # [generated: python_outputs]
    "logprob": Output(1, {"logprob": ("<f4", "float32")}),
    "entropy": Output(2, {"entropy": ("<f4", "float32")}),
    "lse": Output(4, {"lse": ("<f4", "float32")}),
    "argmax": Output(8, {"argmax_id": ("<i4", "int64"), "argmax_logprob": ("<f4", "float32")}),
    "greedy": Output(16, {"greedy": ("u1", "bool")}),
    "sum_p_squared": Output(32, {"sum_p_squared": ("<f4", "float32")}),
    "max_logit": Output(64, {"max_logit": ("<f4", "float32")}),
    "min_logit": Output(128, {"min_logit": ("<f4", "float32")}),
    "target_rank": Output(256, {"target_rank": ("<i4", "int64")}),
    # [end]
}

SERVING = 1  # grpc.health.v1 HealthCheckResponse.ServingStatus


@dataclass
class HealthRequest:
    service: str = wire(1, "string")


@dataclass
class HealthResponse:
    status: int = wire(1, "int")


# [generated: python_messages]
@dataclass
class SharedMemorySlice:
    region: Buffer = wire(1, "bytes")
    offset: int = wire(2, "uint")
    bytes: int = wire(3, "uint")


@dataclass
class CudaIpcSlice:
    lease: Buffer = wire(1, "bytes")
    device_uuid: Buffer = wire(2, "bytes")
    handle: Buffer = wire(3, "bytes")
    offset: int = wire(4, "uint")
    bytes: int = wire(5, "uint")


@dataclass
class ScoreRequest:
    request_id: str = wire(1, "string")
    head: str = wire(2, "string")
    weights_version: int = wire(3, "uint")
    dtype: int = wire(4, "int")
    rows: int = wire(5, "uint")
    hidden_size: int = wire(6, "uint")
    targets: Buffer = wire(7, "bytes")
    temperature: float | None = wire(8, "float", optional=True)
    row_temperatures: Buffer = wire(9, "bytes")
    entropy_temperature: float | None = wire(10, "float", optional=True)
    ignore_index: int | None = wire(11, "sint", optional=True)
    outputs: int = wire(12, "uint")
    top_k: int = wire(13, "uint")
    candidate_ids: Buffer = wire(14, "bytes")
    candidate_offsets: Buffer = wire(15, "bytes")
    segment_offsets: Buffer = wire(16, "bytes")
    priority: int = wire(17, "int")
    reject_nonfinite: bool = wire(18, "bool")
    chunk_id: int = wire(19, "uint")
    traceparent: str = wire(20, "string")
    trace: bool = wire(21, "bool")
    hidden: Buffer = wire(32, "bytes")
    shared_memory: SharedMemorySlice | None = wire(
        33, "message", optional=True, message=SharedMemorySlice
    )
    cuda_ipc: CudaIpcSlice | None = wire(34, "message", optional=True, message=CudaIpcSlice)


@dataclass
class StageTimings:
    queue_us: int = wire(1, "uint")
    copy_us: int = wire(2, "uint")
    engine_us: int = wire(3, "uint")
    total_us: int = wire(4, "uint")


@dataclass
class TraceStage:
    begin_ns: int = wire(1, "uint")
    end_ns: int = wire(2, "uint")


@dataclass
class Trace:
    traceparent: str = wire(1, "string")
    received_unix_ns: int = wire(2, "uint")
    receive: TraceStage | None = wire(3, "message", optional=True, message=TraceStage)
    queue: TraceStage | None = wire(4, "message", optional=True, message=TraceStage)
    copy: TraceStage | None = wire(5, "message", optional=True, message=TraceStage)
    engine: TraceStage | None = wire(6, "message", optional=True, message=TraceStage)
    kernel_ns: int = wire(7, "uint")
    reply: TraceStage | None = wire(8, "message", optional=True, message=TraceStage)


@dataclass
class ScoreResponse:
    request_id: str = wire(1, "string")
    chunk_id: int = wire(2, "uint")
    weights_version: int = wire(3, "uint")
    status_code: int = wire(4, "int")
    status_message: str = wire(5, "string")
    retry_after_ms: int = wire(6, "uint")
    rows: int = wire(7, "uint")
    ignored_rows: int = wire(8, "uint")
    nonfinite_rows: int = wire(9, "uint")
    logprob: Buffer = wire(10, "bytes")
    entropy: Buffer = wire(11, "bytes")
    lse: Buffer = wire(12, "bytes")
    argmax_id: Buffer = wire(13, "bytes")
    argmax_logprob: Buffer = wire(14, "bytes")
    greedy: Buffer = wire(15, "bytes")
    sum_p_squared: Buffer = wire(16, "bytes")
    max_logit: Buffer = wire(17, "bytes")
    min_logit: Buffer = wire(18, "bytes")
    top_k_ids: Buffer = wire(19, "bytes")
    top_k_logprobs: Buffer = wire(20, "bytes")
    candidate_logprobs: Buffer = wire(21, "bytes")
    segment_logprob: Buffer = wire(22, "bytes")
    segment_rows: Buffer = wire(23, "bytes")
    segment_greedy: Buffer = wire(24, "bytes")
    timings: StageTimings = wire(25, "message", message=StageTimings)
    target_rank: Buffer = wire(26, "bytes")
    trace: Trace | None = wire(27, "message", optional=True, message=Trace)


@dataclass
class ListHeadsRequest:
    pass


@dataclass
class Limits:
    message_bytes_max: int = wire(1, "uint")
    request_rows_max: int = wire(2, "uint")
    top_k_max: int = wire(3, "uint")
    candidates_max: int = wire(4, "uint")
    segments_max: int = wire(5, "uint")
    stream_window: int = wire(6, "uint")


@dataclass
class Shard:
    replica: int = wire(1, "uint")
    shard: int = wire(2, "uint")
    device: str = wire(3, "string")
    vocab_begin: int = wire(4, "uint")
    vocab_end: int = wire(5, "uint")


@dataclass
class Head:
    name: str = wire(1, "string")
    model_type: str = wire(2, "string")
    vocab_size: int = wire(3, "uint")
    vocab_rows: int = wire(4, "uint")
    hidden_size: int = wire(5, "uint")
    dtype: int = wire(6, "int")
    weights_version: int = wire(7, "uint")
    ready: bool = wire(8, "bool")
    tied: bool = wire(9, "bool")
    scale: float = wire(10, "float")
    softcap: float = wire(11, "float")
    has_bias: bool = wire(12, "bool")
    tensor: str = wire(13, "string")
    engine: str = wire(14, "string")
    weight_bytes: int = wire(15, "uint")
    limits: Limits = wire(16, "message", message=Limits)
    transports: list[str] = wire(17, "string", repeated=True)
    layout: list[Shard] = wire(18, "message", repeated=True, message=Shard)
    warnings: list[str] = wire(19, "string", repeated=True)


@dataclass
class LocalAccess:
    boot_id: str = wire(1, "string")
    grpc_path: str = wire(2, "string")
    control_path: str = wire(3, "string")
    shared_memory: bool = wire(4, "bool")
    cuda_ipc: bool = wire(5, "bool")


@dataclass
class ListHeadsResponse:
    heads: list[Head] = wire(1, "message", repeated=True, message=Head)
    server_version: str = wire(2, "string")
    local: LocalAccess | None = wire(3, "message", optional=True, message=LocalAccess)


@dataclass
class VerifyRequest:
    head: str = wire(1, "string")
    rows: int = wire(2, "uint")
    seed: int = wire(3, "uint")


@dataclass
class VerifyResponse:
    passed: bool = wire(1, "bool")
    rows: int = wire(2, "uint")
    logprob_difference_max: float = wire(3, "double")
    entropy_difference_max: float = wire(4, "double")
    logprob_tolerance: float = wire(5, "double")
    entropy_tolerance: float = wire(6, "double")
    logit_stddev: float = wire(7, "double")
    weights_version: int = wire(8, "uint")
    engine: str = wire(9, "string")
    seconds: float = wire(10, "double")


@dataclass
class LoadWeightsRequest:
    head: str = wire(1, "string")
    path: str = wire(2, "string")
    version: int = wire(3, "uint")
    sha256: str = wire(4, "string")
    commit: bool = wire(5, "bool")
    in_place: bool = wire(6, "bool")
    allow_nonfinite: bool = wire(7, "bool")


@dataclass
class WeightsVersion:
    version: int = wire(1, "uint")
    sha256: str = wire(2, "string")
    source: str = wire(3, "string")
    loaded_unix_seconds: int = wire(4, "int")
    weight_bytes: int = wire(5, "uint")
    dtype: int = wire(6, "int")


@dataclass
class LoadWeightsProgress:
    phase: str = wire(1, "string")
    bytes_done: int = wire(2, "uint")
    bytes_total: int = wire(3, "uint")
    done: WeightsVersion | None = wire(4, "message", optional=True, message=WeightsVersion)


@dataclass
class PushHeader:
    head: str = wire(1, "string")
    version: int = wire(2, "uint")
    dtype: int = wire(3, "int")
    vocab_rows: int = wire(4, "uint")
    sha256: str = wire(5, "string")
    allow_nonfinite: bool = wire(6, "bool")


@dataclass
class PushedRows:
    row_begin: int = wire(1, "uint")
    rows: int = wire(2, "uint")
    is_bias: bool = wire(3, "bool")
    data: Buffer = wire(4, "bytes")
    shared_memory: SharedMemorySlice | None = wire(
        5, "message", optional=True, message=SharedMemorySlice
    )
    cuda_ipc: CudaIpcSlice | None = wire(6, "message", optional=True, message=CudaIpcSlice)


@dataclass
class PushWeightsRequest:
    header: PushHeader | None = wire(1, "message", optional=True, message=PushHeader)
    rows: PushedRows | None = wire(2, "message", optional=True, message=PushedRows)


@dataclass
class PushedVersion:
    version: int = wire(1, "uint")
    rows: int = wire(2, "uint")
    vocab_rows: int = wire(3, "uint")


@dataclass
class PushWeightsResponse:
    pushed: PushedVersion | None = wire(1, "message", optional=True, message=PushedVersion)
    staged: WeightsVersion | None = wire(2, "message", optional=True, message=WeightsVersion)


@dataclass
class CommitWeightsRequest:
    head: str = wire(1, "string")
    version: int = wire(2, "uint")


@dataclass
class RollbackWeightsRequest:
    head: str = wire(1, "string")


@dataclass
class DiscardWeightsRequest:
    head: str = wire(1, "string")
    staged: bool = wire(2, "bool")
    previous: bool = wire(3, "bool")


@dataclass
class HeadWeightsState:
    head: str = wire(1, "string")
    live: WeightsVersion | None = wire(2, "message", optional=True, message=WeightsVersion)
    staged: WeightsVersion | None = wire(3, "message", optional=True, message=WeightsVersion)
    previous: WeightsVersion | None = wire(4, "message", optional=True, message=WeightsVersion)
    pushed: PushedVersion | None = wire(5, "message", optional=True, message=PushedVersion)
    highest_version: int = wire(6, "uint")


@dataclass
class WeightsResponse:
    head: HeadWeightsState = wire(1, "message", message=HeadWeightsState)


@dataclass
class ListWeightsRequest:
    head: str = wire(1, "string")


@dataclass
class ListWeightsResponse:
    heads: list[HeadWeightsState] = wire(1, "message", repeated=True, message=HeadWeightsState)


@dataclass
class Hello:
    client_id: str = wire(1, "string")


@dataclass
class CreateRegion:
    bytes: int = wire(1, "uint")


@dataclass
class CloseRegion:
    id: Buffer = wire(1, "bytes")


@dataclass
class LocalRequest:
    hello: Hello | None = wire(1, "message", optional=True, message=Hello)
    create_region: CreateRegion | None = wire(2, "message", optional=True, message=CreateRegion)
    close_region: CloseRegion | None = wire(3, "message", optional=True, message=CloseRegion)


@dataclass
class Welcome:
    lease: Buffer = wire(1, "bytes")
    shared_memory: bool = wire(2, "bool")
    cuda_ipc: bool = wire(3, "bool")
    region_bytes_max: int = wire(4, "uint")
    lease_bytes_max: int = wire(5, "uint")
    lease_regions_max: int = wire(6, "uint")


@dataclass
class Region:
    id: Buffer = wire(1, "bytes")
    bytes: int = wire(2, "uint")


@dataclass
class LocalReply:
    status_code: int = wire(1, "int")
    status_message: str = wire(2, "string")
    welcome: Welcome | None = wire(3, "message", optional=True, message=Welcome)
    region: Region | None = wire(4, "message", optional=True, message=Region)


# [end]
