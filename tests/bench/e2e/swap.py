"""Hot swaps of the weights under full load: failures, mixed versions, the longest stall.

Two heads take turns as version 2, 3, 4 and so on. Every client sends the same request, so that an
answer must have exactly the bits of its version's head.
"""

import collections
import dataclasses
import itertools
import time

from bench_records import record, record_of_rounds
from e2e.grpc_load import Answer, Clients, Requests, call
from e2e.scene import Scene, Skipped, say
from e2e.weights import WeightsTool, free_port, server_flags
from scoring_rpc import Scoring

SWAPS = 100
BUDGET_S = 80
STALL_BATCHES = 2
CLIENT_PROCESSES = 4
IN_FLIGHT = 6  # of each process
MESSAGES_OF_BATCH = 8  # a request is this part of a batch


@dataclasses.dataclass
class Verdict:
    """What the answers of a run of swaps say."""

    failed: int
    mixed: int  # answers that have not the bits of the version that they name
    stall: float  # seconds, the longest time without an answer
    usual: float  # seconds, the median time between groups of answers


def judge(answers: list[Answer], crc_of: list[int]) -> Verdict:
    """`crc_of`: of answers of the head of odd versions, and of even ones. `answers` by their end."""
    good = [answer for answer in answers if answer.code == 0]
    gaps = [b.ended - a.ended for a, b in itertools.pairwise(good)]
    # Answers of one batch come together: what lies between batches is more than a tenth of the longest.
    longest = max(gaps, default=0.0)
    between = sorted(gap for gap in gaps if gap > longest / 10)
    return Verdict(
        failed=len(answers) - len(good),
        mixed=sum(answer.crc != crc_of[(answer.version + 1) % 2] for answer in good),
        stall=longest,
        usual=between[len(between) // 2] if between else 0.0,
    )


def measure(scene: Scene) -> None:
    if not WeightsTool.is_there(scene.binaries):
        raise Skipped("logprobctl has no command `weights`")
    hidden = scene.hidden_sizes[0]
    heads = [scene.model(hidden, seed) for seed in (1, 2)]
    admin = f"127.0.0.1:{free_port()}"
    requests = Requests(max(1, scene.batch_rows // MESSAGES_OF_BATCH), hidden, scene.vocab)
    weights = WeightsTool(scene.binaries, admin)
    flags = server_flags(scene.binaries, admin, scene.work)
    with scene.engine(hidden) as engine, scene.server(hidden, *flags) as server:
        batch_s = engine.throughput(scene.batch_rows, scene.seconds)["batch_seconds"]
        crc_of = bits_of_both(server.grpc, requests, weights, heads)
        clients = Clients(server.grpc, requests, processes=CLIENT_PROCESSES, inflight=IN_FLIGHT)
        with clients:
            time.sleep(scene.seconds)
            took = swap_many(weights, heads, scene.end_of(BUDGET_S))
            time.sleep(scene.seconds)
            answers = clients.finish()
    add(scene, hidden, judge(answers, crc_of), answers, took, batch_s)


def bits_of_both(address: str, requests: Requests, weights: WeightsTool, heads: list) -> list[int]:
    """What odd and even versions answer, with nothing else going on; leaves version 3 live."""
    message = requests.message()
    crcs = []
    with Scoring(address) as scoring:
        crcs.append(call(scoring, message).crc)
        for version in (2, 3):
            weights.load(version, heads[(version + 1) % 2])
            weights.commit()
            crcs.append(call(scoring, message).crc)
    if crcs[0] == crcs[1] or crcs[0] != crcs[2]:
        raise RuntimeError("versions 1 and 3 must answer alike, 2 must not")
    return crcs[:2]


def swap_many(weights: WeightsTool, heads: list, end: float) -> list[float]:
    """Loads and commits versions from 4 on, the next of SWAPS until `end`; seconds that each took."""
    took: list[float] = []
    for version in range(4, 4 + SWAPS):
        if time.monotonic() > end:
            say(f"  stopped after {len(took)} swaps: the time for them is over")
            break
        started = time.monotonic()
        weights.load(version, heads[(version + 1) % 2])
        weights.commit()
        took.append(time.monotonic() - started)
    return took


def add(
    scene: Scene, hidden: int, verdict: Verdict, answers: list, took: list, batch_s: float
) -> None:
    versions = collections.Counter(answer.version for answer in answers if answer.code == 0)
    what = f"Hot swap under full load, {scene.shape(hidden)}"
    note = f"{len(took)} swaps, {len(answers)} requests answered by {len(versions)} versions"
    scene.records += [
        record(
            f"{what}: failed requests", verdict.failed, "requests", note=f"{note}; wanted at most 0"
        ),
        record(
            f"{what}: answers without the bits of their version",
            verdict.mixed,
            "requests",
            note=f"{note}; wanted at most 0",
        ),
        record(
            f"{what}: longest time without an answer",
            verdict.stall / batch_s,
            "batch times",
            note=f"{note}; a batch takes {1e3 * batch_s:.2f} ms, the longest time was "
            f"{1e3 * verdict.stall:.2f} ms, the usual one {1e3 * verdict.usual:.2f}; "
            f"wanted at most {STALL_BATCHES}",
        ),
        record_of_rounds(f"{what}: load and commit", "s", took, note=note),
    ]
