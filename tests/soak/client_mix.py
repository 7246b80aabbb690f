"""Makes the load of the soak: ordinary calls with `logprobctl bench`, and the rest with Python clients.

`logprobctl bench` sends unary calls of all sizes, and calls whose rows lie in shared memory. The Python clients
make the calls that it cannot make: streams, some of which are abandoned, and calls that are cancelled, whose deadline
is too short or that are invalid. The server has the heads of HEADS, to which all kinds of calls are made.
"""

import dataclasses
import itertools
import multiprocessing
import pathlib
import random
import subprocess
import threading
import time

import grpc
import numpy as np
import scoring_rpc
from e2e.logprobctl import LoadError, LoadPlan, parse

SPAWN = multiprocessing.get_context("spawn")  # a fork of a process in which gRPC runs would hang
CALL_TIMEOUT_S = 60
BENCH_SECONDS = 2.0  # duration of one run of logprobctl bench
HEADS = ("policy", "reference")

OK, CANCELLED, INVALID, LATE, BUSY = (
    "OK",
    "CANCELLED",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
)
# The kinds of calls of logprobctl bench.
BENCH_KINDS = ("unary", "shared")
# The kinds of calls of the Python clients and how often each is drawn.
CLIENT_KINDS = {"cancelled": 0.3, "late": 0.2, "stream": 0.2, "abandoned": 0.2, "wrong": 0.1}
# The statuses with which a call of each kind may end.
ALLOWED: dict[str, set[str]] = {
    **{kind: {OK, BUSY} for kind in BENCH_KINDS},
    "cancelled": {OK, CANCELLED, BUSY},
    "late": {OK, LATE, BUSY},
    "stream": {OK, BUSY},
    "abandoned": {OK, BUSY},
    "wrong": {INVALID},
}
OUTCOMES = [OK, CANCELLED, INVALID, LATE, BUSY, "OTHER"]


class Calls:
    """Makes the calls of one Python client, with random data from a seed."""

    def __init__(
        self, scoring: scoring_rpc.Scoring, shape: tuple[int, int, int], seed: int
    ) -> None:
        hidden, vocab, rows = shape
        self.scoring = scoring
        self.random = random.Random(seed)
        head = HEADS[seed % len(HEADS)]
        self.small = self._message(head, 1, hidden, vocab, seed)
        self.bulk = self._message(head, rows, hidden, vocab, seed)
        self.wrong = self._message(head, 3, hidden + 1, vocab, seed)

    @staticmethod
    def _message(head: str, rows: int, hidden: int, vocab: int, seed: int) -> bytes:
        values = np.random.default_rng(seed).standard_normal(rows * hidden, dtype=np.float32)
        targets = np.arange(rows, dtype=np.int32) % vocab
        return (
            scoring_rpc.messages()
            .ScoreRequest(
                head=head,
                dtype=1,
                rows=rows,
                hidden_size=hidden,
                targets=targets.tobytes(),
                hidden=(values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
            )
            .SerializeToString()
        )

    def make(self, kind: str) -> str:
        """Makes one call and returns the status with which it ended."""
        try:
            getattr(self, f"_{kind}")()
        except grpc.FutureCancelledError:
            return CANCELLED
        except grpc.RpcError as error:
            return error.code().name
        return OK

    def _cancelled(self) -> None:
        future = self.scoring.score_future(self.bulk, CALL_TIMEOUT_S)
        time.sleep(self.random.uniform(0, 0.05))
        future.cancel()
        future.result()

    def _late(self) -> None:
        self.scoring.score_raw(self.bulk, self.random.uniform(0.001, 0.02))

    def _stream(self, answers: int = 6) -> None:
        """Sends 6 chunks over a stream, and leaves it after so many answers."""
        call = self.scoring.channel.stream_stream("/logprobd.v1.Scoring/ScoreStream")
        chunks = [self.bulk, self.small] * 3
        for _ in itertools.islice(call(iter(chunks), timeout=CALL_TIMEOUT_S), answers):
            pass

    def _abandoned(self) -> None:
        self._stream(answers=3)

    def _wrong(self) -> None:
        self.scoring.score_raw(self.wrong, CALL_TIMEOUT_S)


def client_process(address: str, shape: tuple[int, int, int], seed: int, stop, counts) -> None:
    """Makes calls until `stop` is set or the process is killed. No other process writes `counts` [kind][outcome]."""
    kinds = list(CLIENT_KINDS)
    weights = list(CLIENT_KINDS.values())
    with scoring_rpc.Scoring(address) as scoring:
        calls = Calls(scoring, shape, seed)
        while not stop.is_set():
            kind = calls.random.choices(kinds, weights)[0]
            outcome = calls.make(kind)
            column = OUTCOMES.index(outcome) if outcome in OUTCOMES else OUTCOMES.index("OTHER")
            counts[kinds.index(kind) * len(OUTCOMES) + column] += 1


class BenchClient:
    """Runs `logprobctl bench` repeatedly with calls of one kind to each head in turn, in a thread."""

    def __init__(self, binaries: pathlib.Path, address: str, kind: str, rows: int) -> None:
        plans = {
            "unary": LoadPlan(rows=f"1:4,16:4,{rows}:1", seconds=BENCH_SECONDS, concurrency=2),
            "shared": LoadPlan(rows=rows, seconds=BENCH_SECONDS, transport="shm", fresh=True),
        }
        self.kind = kind
        self.counts = dict.fromkeys(OUTCOMES, 0)
        self.failures: list[str] = []
        self._plan = plans[kind]
        self._command = [str(binaries / "logprobctl"), "bench", "--json", "--address", address]
        self._process: subprocess.Popen | None = None
        self._is_killed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        for head in itertools.cycle(HEADS):
            if self._stop.is_set():
                return
            self._is_killed = False
            plan = dataclasses.replace(self._plan, head=head)
            self._process = subprocess.Popen(
                [*self._command, *plan.flags()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            out, err = self._process.communicate()
            if self._is_killed:
                continue
            try:
                load = parse(out, err, self._plan.transport)
            except LoadError as error:
                self.failures.append(f"logprobctl bench, {self.kind}: {error}")
                self._stop.wait(1)
                continue
            self.counts[OK] += load.requests
            is_busy = load.first_error.startswith(BUSY)
            self.counts[BUSY if is_busy else "OTHER"] += load.errors

    def start(self) -> None:
        self._thread.start()

    def kill(self) -> None:
        """Sends SIGKILL to the running bench, after which the next one starts at once."""
        if self._process is not None:
            self._is_killed = True
            self._process.kill()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(BENCH_SECONDS + 10)
        if self._thread.is_alive():
            self.kill()
            self._thread.join(5)


class MixedLoad:
    """Runs all clients, each of which can be killed and replaced. Use as a context manager."""

    def __init__(
        self,
        binaries: pathlib.Path,
        address: str,
        *,
        hidden: int,
        vocab: int,
        rows: int,
        processes: int,
    ) -> None:
        self._address, self._shape = address, (hidden, vocab, rows)
        self._stop = SPAWN.Event()
        self._random = random.Random(5)
        self._counts: list = []
        self._clients: list = []
        self._benches = [BenchClient(binaries, address, kind, rows) for kind in BENCH_KINDS]
        self.kills = 0
        for _ in range(processes):
            self._add()

    def _add(self) -> None:
        # The array has no lock, since a process that is killed while it holds a lock would block the others.
        counts = SPAWN.RawArray("q", len(CLIENT_KINDS) * len(OUTCOMES))
        arguments = (self._address, self._shape, len(self._counts) + 1, self._stop, counts)
        client = SPAWN.Process(target=client_process, args=arguments, daemon=True)
        self._counts.append(counts)
        self._clients.append(client)

    def __enter__(self) -> "MixedLoad":
        for client in [*self._clients, *self._benches]:
            client.start()
        return self

    def kill_one(self) -> None:
        """Sends SIGKILL to one of the clients and replaces it."""
        victim = self._random.choice([*self._clients, *self._benches])
        victim.kill()
        self.kills += 1
        if victim not in self._clients:
            return
        victim.join()
        self._clients.remove(victim)
        self._add()
        self._clients[-1].start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for bench in self._benches:
            bench.stop()
        for client in self._clients:
            client.join(15)
            if client.is_alive():
                client.kill()

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Returns the number of calls of all clients so far, by kind and outcome."""
        found = {
            bench.kind: {k: n for k, n in bench.counts.items() if n} for bench in self._benches
        }
        sums = np.sum([list(counts) for counts in self._counts], axis=0).reshape(-1, len(OUTCOMES))
        for kind, row in zip(CLIENT_KINDS, sums, strict=True):
            found[kind] = {name: int(n) for name, n in zip(OUTCOMES, row, strict=True) if n}
        return found

    def calls(self) -> int:
        return sum(sum(row.values()) for row in self.outcomes().values())

    def surprises(self) -> list[str]:
        """Describes calls that ended with a status that their kind does not allow, and kinds without any call."""
        found = [failure for bench in self._benches for failure in bench.failures]
        for kind, row in self.outcomes().items():
            bad = {name: n for name, n in row.items() if name not in ALLOWED[kind]}
            found += [f"{n} calls of kind {kind} ended with {name}" for name, n in bad.items()]
            if not row:
                found.append(f"no call of kind {kind} ended")
        return found
