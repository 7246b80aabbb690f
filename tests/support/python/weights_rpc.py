"""Calls the Weights service with Protobuf's own classes, independently of our client library."""

import grpc
import numpy as np
from scoring_rpc import messages


def push_header(version: int, **fields):
    """Returns the first message of a push of bf16 rows."""
    module = messages("weights")
    header = module.PushHeader(**{"version": version, "dtype": 1} | fields)
    return module.PushWeightsRequest(header=header)


def pushed_rows(row_begin: int, rows: np.ndarray, **fields):
    """Returns a message of a push. `fields` replace the rows' bytes."""
    module = messages("weights")
    values = {"row_begin": row_begin, "rows": len(rows)}
    payload = fields or {"data": rows.tobytes()}
    return module.PushWeightsRequest(rows=module.PushedRows(**values, **payload))


class Weights:
    """A channel to a server's admin listener."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(
            address, options=(("grpc.use_local_subchannel_pool", 1),)
        )

    def load_call(self, path, timeout: float = 60, **fields):
        """Returns the stream of a load's progress. Each item is a LoadWeightsProgress."""
        module = messages("weights")
        return self.channel.unary_stream(
            "/logprobd.v1.Weights/Load",
            request_serializer=module.LoadWeightsRequest.SerializeToString,
            response_deserializer=module.LoadWeightsProgress.FromString,
        )(module.LoadWeightsRequest(path=str(path), **fields), timeout=timeout)

    def load(self, path, **fields):
        """Returns the version that was loaded."""
        return list(self.load_call(path, **fields))[-1].done

    def push_call(self, messages_of_push, timeout: float = 60):
        """Returns the future of a push's PushWeightsResponse."""
        module = messages("weights")
        return self.channel.stream_unary(
            "/logprobd.v1.Weights/Push",
            request_serializer=module.PushWeightsRequest.SerializeToString,
            response_deserializer=module.PushWeightsResponse.FromString,
        ).future(iter(messages_of_push), timeout=timeout)

    def push(self, version: int, weight: np.ndarray, row_begin: int = 0, **header):
        """Pushes bf16 rows from `row_begin` on in pieces of 100 rows, and returns the response."""
        pieces = [
            pushed_rows(row_begin + i, weight[i : i + 100]) for i in range(0, len(weight), 100)
        ]
        return self.push_call([push_header(version, **header), *pieces]).result()

    def _change(self, method: str, **fields):
        module = messages("weights")
        request = getattr(module, f"{method}WeightsRequest")(**fields)
        data = self.channel.unary_unary(f"/logprobd.v1.Weights/{method}")(
            request.SerializeToString(), timeout=60
        )
        return module.WeightsResponse.FromString(data).head

    def commit(self, **fields):
        return self._change("Commit", **fields)

    def rollback(self, **fields):
        return self._change("Rollback", **fields)

    def discard(self, **fields):
        return self._change("Discard", **fields)

    def list(self):
        """Returns the state of the only head."""
        module = messages("weights")
        data = self.channel.unary_unary("/logprobd.v1.Weights/List")(b"", timeout=60)
        (head,) = module.ListWeightsResponse.FromString(data).heads
        return head

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
