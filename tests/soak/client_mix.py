"""Client processes that do at random what clients do: unary calls of all sizes, streams, calls whose rows
lie in shared memory, calls that are cancelled or given too little time, and requests that are wrong."""

import multiprocessing
import multiprocessing.sharedctypes
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client" / "python"))

import grpc
import logprobd
import numpy as np
import scoring_rpc

SPAWN = multiprocessing.get_context("spawn")  # a fork of a process in which gRPC runs would hang
CALL_TIMEOUT_S = 60

# What a client may do, how often, and the statuses that it may end in.
OK, CANCELLED, INVALID, LATE, BUSY = (
    "OK",
    "CANCELLED",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
)
KINDS: dict[str, tuple[float, set[str]]] = {
    "small": (0.4, {OK, BUSY}),
    "bulk": (0.1, {OK, BUSY}),
    "shared": (0.1, {OK, BUSY}),
    "stream": (0.1, {OK, BUSY}),
    "cancelled": (0.15, {OK, CANCELLED, BUSY}),
    "late": (0.1, {OK, LATE, BUSY}),
    "wrong": (0.05, {INVALID}),
}
OUTCOMES = [OK, CANCELLED, INVALID, LATE, BUSY, "OTHER"]


class Mix:
    """The calls of one client process, from a seed."""

    def __init__(
        self,
        scoring: scoring_rpc.Scoring,
        client: logprobd.Client,
        hidden: int,
        vocab: int,
        rows: int,
        seed: int,
    ) -> None:
        self.scoring = scoring
        self.client = client
        self.random = random.Random(seed)
        self.targets = np.arange(rows, dtype=np.int32) % vocab
        self.hidden = hidden
        self.messages = {size: self._message(size, hidden, vocab, seed) for size in (1, 16, rows)}
        self.small = [self.messages[1], self.messages[16]]
        self.bulk = self.messages[rows]
        self.wrong = self._message(3, hidden + 1, vocab, seed)

    @staticmethod
    def _message(rows: int, hidden: int, vocab: int, seed: int) -> bytes:
        values = np.random.default_rng(seed).standard_normal(rows * hidden, dtype=np.float32)
        targets = np.arange(rows, dtype=np.int32) % vocab
        return (
            scoring_rpc.messages()
            .ScoreRequest(
                dtype=1,
                rows=rows,
                hidden_size=hidden,
                targets=targets.tobytes(),
                hidden=(values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
            )
            .SerializeToString()
        )

    def do(self, kind: str) -> str:
        """One call; how it ended."""
        try:
            getattr(self, f"_{kind}")()
        except grpc.FutureCancelledError:
            return CANCELLED
        except grpc.RpcError as error:
            return error.code().name
        except logprobd.LogprobdError as error:
            return error.code or type(error).__name__
        return OK

    def _small(self) -> None:
        self.scoring.score_raw(self.random.choice(self.small), CALL_TIMEOUT_S)

    def _bulk(self) -> None:
        self.scoring.score_raw(self.bulk, CALL_TIMEOUT_S)

    def _shared(self) -> None:
        rows = self.client.buffer(len(self.targets), self.hidden, "bf16")
        rows[:] = 0x3F80  # 1
        self.client.score(rows, self.targets, dtype="bf16")

    def _stream(self) -> None:
        call = self.scoring.channel.stream_stream("/logprobd.v1.Scoring/ScoreStream")
        chunks = [self.bulk, *self.small] * 2
        for number, _ in enumerate(call(iter(chunks), timeout=CALL_TIMEOUT_S)):
            if number == 3 and self.random.random() < 0.3:
                return  # leaves in the midst of it

    def _cancelled(self) -> None:
        future = self.scoring.score_future(self.bulk, CALL_TIMEOUT_S)
        time.sleep(self.random.uniform(0, 0.05))
        future.cancel()
        future.result()

    def _late(self) -> None:
        self.scoring.score_raw(self.bulk, self.random.uniform(0.001, 0.02))

    def _wrong(self) -> None:
        self.scoring.score_raw(self.wrong, CALL_TIMEOUT_S)


def client_process(address: str, shape: tuple[int, int, int], seed: int, stop, counts) -> None:
    """Calls until it is stopped, or killed. `counts`: [kind][outcome], this process's own."""
    kinds = list(KINDS)
    weights = [KINDS[kind][0] for kind in kinds]
    with (
        scoring_rpc.Scoring(address) as scoring,
        logprobd.Client(address, transport="shm") as client,
    ):
        mix = Mix(scoring, client, *shape, seed)
        while not stop.is_set():
            kind = mix.random.choices(kinds, weights)[0]
            outcome = mix.do(kind)
            column = OUTCOMES.index(outcome) if outcome in OUTCOMES else OUTCOMES.index("OTHER")
            counts[kinds.index(kind) * len(OUTCOMES) + column] += 1


class MixedLoad:
    """Several client processes, one of which may be killed and replaced. Use as a context."""

    def __init__(self, address: str, *, hidden: int, vocab: int, rows: int, processes: int) -> None:
        self._address, self._shape = address, (hidden, vocab, rows)
        self._stop = SPAWN.Event()
        self._random = random.Random(5)
        self._counts: list = []
        self._clients: list = []
        self.kills = 0
        for _ in range(processes):
            self._add()

    def _add(self) -> None:
        # Without a lock: a process that is killed while it holds one would stop the others.
        counts = SPAWN.RawArray("q", len(KINDS) * len(OUTCOMES))
        arguments = (self._address, self._shape, len(self._counts) + 1, self._stop, counts)
        client = SPAWN.Process(target=client_process, args=arguments, daemon=True)
        self._counts.append(counts)
        self._clients.append(client)

    def __enter__(self) -> "MixedLoad":
        for client in self._clients:
            client.start()
        return self

    def kill_one(self) -> None:
        """SIGKILL for one of the clients; another takes its place."""
        victim = self._random.choice(self._clients)
        victim.kill()
        victim.join()
        self._clients.remove(victim)
        self.kills += 1
        self._add()
        self._clients[-1].start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(15)
            if client.is_alive():
                client.kill()

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Calls by kind and by how they ended, of all clients that there have been."""
        sums = np.sum([list(counts) for counts in self._counts], axis=0).reshape(len(KINDS), -1)
        return {
            kind: {name: int(n) for name, n in zip(OUTCOMES, row, strict=True) if n}
            for kind, row in zip(KINDS, sums, strict=True)
        }

    def calls(self) -> int:
        return sum(sum(row.values()) for row in self.outcomes().values())

    def surprises(self) -> list[str]:
        """Calls that ended as their kind never may, and kinds of which nothing was seen."""
        found = []
        for kind, row in self.outcomes().items():
            bad = {name: n for name, n in row.items() if name not in KINDS[kind][1]}
            found += [f"{n} calls of kind {kind} ended with {name}" for name, n in bad.items()]
            if not row:
                found.append(f"no call of kind {kind} ended")
        return found
