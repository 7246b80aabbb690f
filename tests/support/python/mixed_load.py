"""Sends all kinds of requests to a server at once until it is stopped, so that all metrics change."""

import threading

import grpc
import numpy as np
from scoring_rpc import Scoring, request

HIDDEN = 256  # must match the fixture slow_model
IGNORED = -100


class MixedLoad:
    """Sends valid, invalid, late and cancelled requests from five threads. Use it as a context manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,))
            for work in (self._score, self._score, self._stream, self._leave, self._misbehave)
        ]

    def __enter__(self) -> "MixedLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, work) -> None:
        with Scoring(self.address) as scoring:
            while not self._stopping.is_set():
                work(scoring)

    def _score(self, scoring: Scoring) -> None:
        scoring.score(request(rows=100, hidden_size=HIDDEN))

    def _stream(self, scoring: Scoring) -> None:
        """Sends chunks with a row that is ignored and one that is not finite."""
        rows = 50
        targets = np.arange(rows, dtype=np.int32)
        targets[3] = IGNORED
        hidden = np.ones((rows, HIDDEN), np.float32)
        hidden[5, 7] = np.nan
        chunk = request(
            rows=rows, hidden_size=HIDDEN, targets=targets.tobytes(), hidden=hidden.tobytes()
        )
        for _ in scoring.stream([chunk] * 4):
            pass

    def _leave(self, scoring: Scoring) -> None:
        """Sends a request that cannot be scored in time, and one that the client cancels."""
        data = request(rows=2000, hidden_size=HIDDEN).SerializeToString()
        late = scoring.score_future(data, timeout=0.05)
        cancelled = scoring.score_future(data)
        assert isinstance(late.exception(), grpc.RpcError)
        cancelled.cancel()

    def _misbehave(self, scoring: Scoring) -> None:
        wrong = request(rows=2, hidden_size=HIDDEN + 1).SerializeToString()
        assert scoring.score_future(wrong).code() == grpc.StatusCode.INVALID_ARGUMENT
        self._stopping.wait(0.05)
