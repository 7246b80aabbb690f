"""Calls of the scoring API with Protobuf's own classes, independent of our client library."""

import functools
import pathlib
import tempfile
import types

import grpc
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]


@functools.cache
def messages(name: str = "scoring"):
    """Returns the message classes of proto/logprobd/v1/NAME.proto and its imports, by their names.

    Generated modules would not do: their package `logprobd` is also the name of our client.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper
    from grpc_tools import protoc

    proto = f"logprobd/v1/{name}.proto"
    with tempfile.NamedTemporaryFile() as out:
        flags = [f"-I{ROOT / 'proto'}", f"--descriptor_set_out={out.name}", "--include_imports"]
        assert protoc.main(["protoc", *flags, proto]) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(
            pathlib.Path(out.name).read_bytes()
        ).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name for file in files], pool)
    enums = {
        name: enum_type_wrapper.EnumTypeWrapper(kind)
        for file in files
        for name, kind in pool.FindFileByName(file.name).enum_types_by_name.items()
    }
    return types.SimpleNamespace(
        **{full_name.rsplit(".", 1)[-1]: kind for full_name, kind in classes.items()}, **enums
    )


def request(rows: int = 2, hidden_size: int = 64, seed: int = 0, **fields):
    """Returns a valid fp32 request. `fields` replace or add fields; None removes one."""
    random = np.random.default_rng(seed)
    values = {
        "dtype": 3,
        "rows": rows,
        "hidden_size": hidden_size,
        "targets": np.arange(rows, dtype=np.int32).tobytes(),
        "hidden": random.standard_normal((rows, hidden_size)).astype(np.float32).tobytes(),
    }
    values.update(fields)
    return messages().ScoreRequest(**{k: v for k, v in values.items() if v is not None})


class Scoring:
    """A channel to a server; every call takes and returns bytes or messages."""

    def __init__(self, address: str, options: tuple = ()) -> None:
        limits = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
        own = (("grpc.use_local_subchannel_pool", 1),)
        self.channel = grpc.insecure_channel(address, options=limits + own + options)

    def score_raw(self, data: bytes, timeout: float = 20, **keywords) -> bytes:
        call = self.channel.unary_unary("/logprobd.v1.Scoring/Score")
        return call(data, timeout=timeout, **keywords)

    def score_future(self, data: bytes, timeout: float = 60, **keywords):
        return self.channel.unary_unary("/logprobd.v1.Scoring/Score").future(
            data, timeout=timeout, **keywords
        )

    def score(self, message, timeout: float = 20, **keywords):
        data = self.score_raw(message.SerializeToString(), timeout, **keywords)
        return messages().ScoreResponse.FromString(data)

    def stream(self, requests, timeout: float = 30):
        call = self.channel.stream_stream("/logprobd.v1.Scoring/ScoreStream")
        for data in call((r.SerializeToString() for r in requests), timeout=timeout):
            yield messages().ScoreResponse.FromString(data)

    def health(self, service: str = "", timeout: float = 5) -> int:
        """Returns 1 for SERVING or 2 for NOT_SERVING."""
        name = service.encode()
        data = b"\x0a" + bytes([len(name)]) + name if name else b""
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        # Some faults close the connection; the call then waits until the channel has a new one.
        reply = check(data, timeout=timeout, wait_for_ready=True)
        return reply[1] if len(reply) > 1 else 0

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> "Scoring":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.float32)
