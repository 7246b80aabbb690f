"""Hot swaps of the weights under full load: failed requests, mixed versions and the longest stall.

Two heads take turns as versions 2, 3, 4 and so on. Every client sends the same request, so each response must
be bit-identical to those that the head of its version gives without load. The clients are those of grpc_load.py,
since `logprobctl bench` records neither a checksum nor the time of each response.
"""

import collections
import dataclasses
import itertools
import time

from bench_records import record, record_of_rounds
from e2e.fixture import Fixture, OutOfTime, say
from e2e.grpc_load import Answer, Clients, Requests, call
from e2e.logprobctl import WeightsTool, server_flags
from scoring_rpc import Scoring

SWAPS = 100
SAY_EVERY = 10  # number of swaps between two messages
BUDGET_S = 300  # reading, hashing and copying a head of 1 GB takes one to two seconds
STALL_BATCHES = 2
CLIENT_PROCESSES = 4
IN_FLIGHT = 8  # requests per process; all processes together have four batches in flight
MESSAGES_OF_BATCH = 8  # requests that make up a batch


@dataclasses.dataclass
class Verdict:
    """The evaluation of the answers during the swaps."""

    failed: int
    mixed: int  # answers that are not bit-identical to those of their version
    stall: float  # longest time without an answer, in seconds
    usual: float  # median time between groups of answers, in seconds
    rows_per_second: float  # between the first and the last answer


def judge(answers: list[Answer], crc_of: list[int], rows: int = 1) -> Verdict:
    """Evaluates answers of `rows` rows each, sorted by their end. `crc_of` holds the checksum of answers of
    odd versions, then of even ones."""
    good = [answer for answer in answers if answer.code == 0]
    gaps = [b.ended - a.ended for a, b in itertools.pairwise(good)]
    # Answers of one batch arrive together. A gap above a tenth of the longest gap lies between two batches.
    longest = max(gaps, default=0.0)
    between = sorted(gap for gap in gaps if gap > longest / 10)
    return Verdict(
        failed=len(answers) - len(good),
        mixed=sum(answer.crc != crc_of[(answer.version + 1) % 2] for answer in good),
        stall=longest,
        usual=between[len(between) // 2] if between else 0.0,
        rows_per_second=rows * len(gaps) / (good[-1].ended - good[0].ended) if gaps else 0.0,
    )


def measure(fixture: Fixture) -> None:
    hidden = fixture.hidden_sizes[0]
    heads = [fixture.model(hidden, seed) for seed in (1, 2)]
    requests = Requests(max(1, fixture.batch_rows // MESSAGES_OF_BATCH), hidden, fixture.vocab)
    failures: list[str] = []
    with (
        fixture.engine(hidden) as engine,
        fixture.server(hidden, *server_flags(fixture.work)) as server,
    ):
        weights = WeightsTool(fixture.binaries, server.admin)
        alone = engine.throughput(fixture.batch_rows, fixture.seconds)
        crc_of = bits_of_both(server.grpc, requests, weights, heads)
        clients = Clients(server.grpc, requests, processes=CLIENT_PROCESSES, inflight=IN_FLIGHT)
        with clients:
            time.sleep(fixture.seconds)
            took = swap_many(weights, heads, fixture.end_of(BUDGET_S), failures)
            time.sleep(fixture.seconds)
            answers = clients.finish()
        verdict = judge(answers, crc_of, requests.rows)
        if not verdict.rows_per_second:
            raise RuntimeError(f"{verdict.failed} of {len(answers)} requests failed")
        add(fixture, hidden, verdict, answers, took, alone)
        if failures:  # raised inside the context, so that the log of the server is shown
            raise RuntimeError("; ".join(failures))


def bits_of_both(address: str, requests: Requests, weights: WeightsTool, heads: list) -> list[int]:
    """Returns the checksums of answers of odd and even versions without load. Leaves version 3 live."""
    message = requests.message()
    answers = []
    with Scoring(address) as scoring:
        answers.append(call(scoring, message))
        for version in (2, 3):
            weights.load(version, heads[(version + 1) % 2])
            weights.commit()
            answers.append(call(scoring, message))
    if any(answer.code for answer in answers):
        raise RuntimeError(
            f"calls before the load failed: their gRPC codes are {[a.code for a in answers]}"
        )
    crcs = [answer.crc for answer in answers]
    if crcs[0] == crcs[1] or crcs[0] != crcs[2]:
        raise RuntimeError(
            "versions 1 and 3 must give the same scores, and version 2 must give others"
        )
    return crcs[:2]


def swap_many(weights: WeightsTool, heads: list, end: float, failures: list[str]) -> list[float]:
    """Loads and commits SWAPS versions from 4 on, until `end` or a failure, which is added to `failures`.
    Returns the seconds that each version took."""
    took: list[float] = []
    try:
        for version in range(4, 4 + SWAPS):
            if time.monotonic() > end:
                say(f"  stopped after {len(took)} swaps: the time limit is reached")
                break
            started = time.monotonic()
            weights.load(version, heads[(version + 1) % 2])
            weights.commit()
            took.append(time.monotonic() - started)
            if len(took) % SAY_EVERY == 0:
                say(f"  {len(took)} of {SWAPS} swaps, the last in {took[-1]:.2f} s")
    except OutOfTime as over:
        say(f"  stopped after {len(took)} swaps: {over}")
    except RuntimeError as error:
        say(f"  swap {len(took) + 1} FAILED: {error}")
        failures.append(f"swap {len(took) + 1}: {error}")
    return took


def add(
    fixture: Fixture, hidden: int, verdict: Verdict, answers: list, took: list, alone: dict
) -> None:
    """Adds the records. `alone` is the throughput of the engine without a server."""
    versions = collections.Counter(answer.version for answer in answers if answer.code == 0)
    batch_s = alone["batch_seconds"]
    what = f"Hot swap under full load, {fixture.shape(hidden)}"
    note = f"{len(took)} swaps, {len(answers)} requests answered by {len(versions)} versions"
    fixture.records += [
        record(f"{what}: swaps", len(took), "swaps", note=f"target at least {SWAPS}"),
        record_of_rounds(
            f"{what}: rows answered during the swaps",
            "rows/s",
            [verdict.rows_per_second],
            baseline=("engine alone", [alone["rows_per_second"]]),
            note=note,
        ),
        record(
            f"{what}: failed requests", verdict.failed, "requests", note=f"{note}; target at most 0"
        ),
        record(
            f"{what}: answers that differ from their version",
            verdict.mixed,
            "requests",
            note=f"{note}; target at most 0",
        ),
        record(
            f"{what}: longest time without an answer",
            verdict.stall / batch_s,
            "batch times",
            note=f"{note}; a batch takes {1e3 * batch_s:.2f} ms, the longest time was "
            f"{1e3 * verdict.stall:.2f} ms, the median one {1e3 * verdict.usual:.2f}; "
            f"target at most {STALL_BATCHES}",
        ),
    ]
    if took:
        fixture.records.append(record_of_rounds(f"{what}: load and commit", "s", took, note=note))
