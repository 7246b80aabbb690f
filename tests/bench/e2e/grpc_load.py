"""Client processes in Python that send one request repeatedly and record every response.

Unlike `logprobctl bench`, they send a request of any size in one message, and they record the version, a checksum
and the time of each response, which the hot-swap section needs.
"""

import multiprocessing
import queue
import threading
import time
import zlib
from typing import NamedTuple

import grpc
import numpy as np
import scoring_rpc
from google.protobuf.message import DecodeError

# A child process that is forked while gRPC runs in the parent would hang.
SPAWN = multiprocessing.get_context("spawn")
CALL_TIMEOUT_S = 30
STARTS_WITHIN_S = 120


class Answer(NamedTuple):
    """The outcome of one call. Times are of the monotonic clock, which all processes share."""

    sent: float
    ended: float
    code: int  # gRPC status code
    version: int  # weights_version; 0 after a failure
    crc: int  # checksum of the bytes of logprob and entropy; 0 after a failure


class Requests(NamedTuple):
    """The request that every client sends. Its bf16 rows depend only on these fields."""

    rows: int
    hidden_size: int
    vocab: int

    def message(self) -> bytes:
        random = np.random.default_rng(7)
        piece = random.standard_normal(min(self.rows * self.hidden_size, 1 << 22), dtype=np.float32)
        hidden = np.resize(
            (piece.view(np.uint32) >> 16).astype(np.uint16), self.rows * self.hidden_size
        )
        targets = random.integers(0, self.vocab, self.rows, dtype=np.int32)
        return (
            scoring_rpc.messages()
            .ScoreRequest(
                dtype=1,
                rows=self.rows,
                hidden_size=self.hidden_size,
                targets=targets.tobytes(),
                hidden=hidden.tobytes(),
            )
            .SerializeToString()
        )


def call(scoring: scoring_rpc.Scoring, message: bytes) -> Answer:
    sent = time.monotonic()
    try:
        data = scoring.score_raw(message, timeout=CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        return Answer(sent, time.monotonic(), error.code().value[0], 0, 0)
    ended = time.monotonic()
    try:
        response = scoring_rpc.messages().ScoreResponse.FromString(data)
    except DecodeError:
        return Answer(sent, ended, grpc.StatusCode.DATA_LOSS.value[0], 0, 0)
    crc = zlib.crc32(response.entropy, zlib.crc32(response.logprob))
    return Answer(sent, ended, 0, response.weights_version, crc)


def client_process(
    address: str, requests: Requests, inflight: int, ready, go, stop, answers
) -> None:
    """Sends requests from `go` until `stop` on `inflight` threads, each with its own connection."""
    message = requests.message()
    all_answers: list[Answer] = []

    def send_until_stopped() -> None:
        with scoring_rpc.Scoring(address) as scoring:
            mine = [call(scoring, message)]
            ready.release()
            go.wait()
            while not stop.is_set():
                mine.append(call(scoring, message))
        all_answers.extend(mine[1:])

    threads = [threading.Thread(target=send_until_stopped) for _ in range(inflight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(all_answers)


class Clients:
    """Client processes that run from the start of the context until `finish`."""

    def __init__(self, address: str, requests: Requests, *, processes: int, inflight: int) -> None:
        self._ready = SPAWN.Semaphore(0)
        self._go, self._stop = SPAWN.Event(), SPAWN.Event()
        self._answers = SPAWN.Queue()
        self._count = processes * inflight
        arguments = (address, requests, inflight, self._ready, self._go, self._stop, self._answers)
        self.processes = [
            SPAWN.Process(target=client_process, args=arguments, daemon=True)
            for _ in range(processes)
        ]

    def __enter__(self) -> "Clients":
        try:
            for process in self.processes:
                process.start()
            for _ in range(self._count):
                if not self._ready.acquire(timeout=STARTS_WITHIN_S):
                    raise RuntimeError(f"the clients were not ready within {STARTS_WITHIN_S} s")
        except BaseException:
            self.__exit__()
            raise
        self._go.set()
        return self

    def finish(self) -> list[Answer]:
        """Stops the clients and returns all their answers in the order of their arrival."""
        self._stop.set()
        answers: list[Answer] = []
        try:
            for _ in self.processes:
                answers += self._answers.get(timeout=CALL_TIMEOUT_S + 5)
        except queue.Empty:
            raise RuntimeError("a client process ended without returning its answers") from None
        return sorted(answers, key=lambda answer: answer.ended)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for process in self.processes:
            if process.pid is None:  # never started
                continue
            process.join(5)
            if process.is_alive():
                process.kill()


def rows_per_second(
    address: str, requests: Requests, *, seconds: float, processes: int, inflight: int
) -> float:
    """Returns the rows per second of successful calls, between the first and the last response."""
    with Clients(address, requests, processes=processes, inflight=inflight) as clients:
        time.sleep(seconds)
        answers = [answer for answer in clients.finish() if answer.code == 0]
    if len(answers) < 2:
        return 0.0
    return requests.rows * (len(answers) - 1) / (answers[-1].ended - answers[0].ended)
