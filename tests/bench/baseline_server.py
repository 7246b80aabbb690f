#!/usr/bin/env python3
"""The baseline: a Python gRPC server that scores each request with torch.

    baseline_server.py --model DIR [--device cuda] [--compile] [--listen 127.0.0.1:0]

It implements Score and ListHeads of proto/logprobd/v1/scoring.proto for logprob and entropy at temperature 1, so
that the same load generator can be used. Each request is one batch. A worker thread copies the rows of a request
into its own pinned memory and from there to the GPU. The head is applied in bf16, chunk by chunk so that the
logits fit into memory; log_softmax and entropy are computed in fp32. `--compile` uses torch.compile for the part
after the copy. torch.compile compiles each number of rows separately, so the server scores requests of the sizes in
`--warm-rows` before it starts.

The server prints a line "ready grpc=HOST:PORT http=none" when it accepts requests. SIGTERM and SIGINT stop it.
"""

import argparse
import concurrent.futures
import pathlib
import signal
import sys
import threading
import warnings

import grpc
import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support" / "python"))

import scoring_rpc

# torch warns about read-only buffers, but this program only reads them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

DTYPES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}  # keyed by Dtype of scoring.proto
LOGPROB_AND_ENTROPY = 3
MESSAGE_BYTES_MAX = 1 << 30
HEAD_TENSORS = ("lm_head.weight", "model.embed_tokens.weight")


class BadRequest(ValueError):
    """The request cannot be scored; the text tells the caller why."""


def load_weight(folder: pathlib.Path, device: torch.device) -> torch.Tensor:
    """Loads the head [vocab, hidden] of a model with one file."""
    with safe_open(folder / "model.safetensors", "pt", device=str(device)) as file:
        for name in HEAD_TENSORS:
            if name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                return file.get_tensor(name).to(torch.bfloat16)
    raise SystemExit(
        f"{folder}/model.safetensors has none of the tensors {', '.join(HEAD_TENSORS)}"
    )


def score_chunk(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logprob of each target and the entropy of each row, fp32 [rows]."""
    logprobs = torch.log_softmax(torch.mm(hidden, weight.t()).float(), dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


class TorchScorer:
    """Scores rows with a head on one device. Thread-safe."""

    def __init__(self, weight: torch.Tensor, *, chunk_rows: int, compiled: bool) -> None:
        self.weight = weight
        self.chunk_rows = chunk_rows
        self._score_chunk = score_chunk
        if compiled:
            self._score_chunk = torch.compile(score_chunk, dynamic=False)
            # The thread that traces first on a machine without a GPU owns a device guard that torch 2.11 uses in
            # every later trace and backward, even if the thread has ended, as gRPC's threads do.
            with FakeTensorMode():
                torch.empty(0)
        self._staging = threading.local()
        # Chunks of two requests at the same time would double the memory without being faster.
        self._device_lock = threading.Lock()

    def _stage(self, data: bytes, dtype: torch.dtype) -> torch.Tensor:
        """Copies the bytes to the device, through the pinned memory of this thread."""
        source = torch.frombuffer(data, dtype=torch.uint8)
        if self.weight.device.type == "cpu":
            return source.view(dtype)
        buffer = getattr(self._staging, "buffer", None)
        if buffer is None or buffer.numel() < source.numel():
            buffer = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
            self._staging.buffer = buffer
        staged = buffer[: source.numel()]
        staged.copy_(source)
        return staged.to(self.weight.device, non_blocking=True).view(dtype)

    @torch.inference_mode()
    def score(
        self, hidden: bytes, dtype: torch.dtype, targets: bytes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logprob and entropy, fp32 [rows] in host memory, of hidden states [rows, hidden]."""
        rows = len(targets) // 4
        if rows == 0:
            return torch.empty(0), torch.empty(0)
        ids = torch.frombuffer(targets, dtype=torch.int32).to(torch.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= self.weight.shape[0]:
            raise BadRequest(f"targets must lie in [0, {self.weight.shape[0]})")
        states = self._stage(hidden, dtype).view(rows, -1).to(torch.bfloat16)
        ids = ids.to(self.weight.device, non_blocking=True)
        with self._device_lock:
            parts = [
                self._score_chunk(chunk, self.weight, chunk_ids)
                for chunk, chunk_ids in zip(
                    states.split(self.chunk_rows), ids.split(self.chunk_rows), strict=True
                )
            ]
        logprob, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        return logprob.cpu(), entropy.cpu()

    def warm_up(self, rows: int) -> None:
        hidden = bytes(rows * self.weight.shape[1] * 2)
        self.score(hidden, torch.bfloat16, bytes(rows * 4))


class BaselineServer:
    """Serves Score and ListHeads over gRPC, with one worker thread per request in progress."""

    def __init__(self, scorer: TorchScorer, listen: str, workers: int = 8) -> None:
        self.scorer = scorer
        self.messages = scoring_rpc.messages()
        handlers = {
            "Score": grpc.unary_unary_rpc_method_handler(
                self._score,
                self.messages.ScoreRequest.FromString,
                self.messages.ScoreResponse.SerializeToString,
            ),
            "ListHeads": grpc.unary_unary_rpc_method_handler(
                self._list_heads,
                self.messages.ListHeadsRequest.FromString,
                self.messages.ListHeadsResponse.SerializeToString,
            ),
        }
        self.server = grpc.server(
            concurrent.futures.ThreadPoolExecutor(workers),
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
            ],
        )
        service = grpc.method_handlers_generic_handler("logprobd.v1.Scoring", handlers)
        self.server.add_generic_rpc_handlers((service,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port(listen)}"
        self.server.start()

    def _score(self, request, context):
        dtype = DTYPES.get(request.dtype)
        vocab, hidden_size = self.scorer.weight.shape
        try:
            if dtype is None:
                raise BadRequest(f"dtype {request.dtype} is unknown")
            if request.hidden_size != hidden_size:
                raise BadRequest(
                    f"hidden_size is {request.hidden_size}, but the head has {hidden_size}"
                )
            if len(request.targets) != 4 * request.rows:
                raise BadRequest("targets must be i32 [rows]")
            if len(request.hidden) != request.rows * hidden_size * dtype.itemsize:
                raise BadRequest("hidden must be dtype [rows, hidden_size]")
            if request.outputs not in (0, LOGPROB_AND_ENTROPY) or request.top_k:
                raise BadRequest("only logprob and entropy are supported")
            logprob, entropy = self.scorer.score(request.hidden, dtype, request.targets)
        except BadRequest as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return self.messages.ScoreResponse(
            request_id=request.request_id,
            weights_version=1,
            rows=request.rows,
            logprob=logprob.numpy().tobytes(),
            entropy=entropy.numpy().tobytes(),
        )

    def _list_heads(self, request, context):
        vocab, hidden_size = self.scorer.weight.shape
        head = self.messages.Head(
            name="default",
            model_type="test",
            vocab_size=vocab,
            vocab_rows=vocab,
            hidden_size=hidden_size,
            dtype=1,
            weights_version=1,
            ready=True,
            scale=1,
            engine=f"torch/{self.scorer.weight.device.type}",
            limits=self.messages.Limits(
                message_bytes_max=MESSAGE_BYTES_MAX, request_rows_max=1 << 20
            ),
        )
        return self.messages.ListHeadsResponse(heads=[head], server_version="baseline")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder with the model")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda if there is a GPU",
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 takes a free port"
    )
    parser.add_argument("--compile", action="store_true", help="score with torch.compile")
    parser.add_argument(
        "--chunk-rows",
        type=int,
        default=2048,
        help="number of rows whose logits are in memory at once; default: 2048",
    )
    parser.add_argument(
        "--workers", type=int, default=8, help="number of worker threads; default: 8"
    )
    parser.add_argument(
        "--warm-rows",
        type=int,
        nargs="*",
        default=[16, 2048],
        help="request sizes to score before the server starts; default: 16 2048",
    )
    args = parser.parse_args()
    weight = load_weight(args.model, torch.device(args.device))
    scorer = TorchScorer(weight, chunk_rows=args.chunk_rows, compiled=args.compile)
    for rows in args.warm_rows:
        scorer.warm_up(rows)
    server = BaselineServer(scorer, args.listen, args.workers)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    print(f"ready grpc={server.address} http=none", flush=True)
    stopped.wait()
    server.server.stop(2).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
