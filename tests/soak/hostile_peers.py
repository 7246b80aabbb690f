#!/usr/bin/env python3
"""Attacks a server beside a client that behaves well, and prints what each attack costs the server and the client.

    hostile_peers.py --out tests/soak/hostile_peers.json             all attacks, about 8 minutes
    hostile_peers.py --attack resets --attack headers-before-settings   some of them
    hostile_peers.py --attacker-cores 4 --seconds 20                 attackers have four cores of their own
    hostile_peers.py --table tests/soak/hostile_peers.json           prints the table of a result

Each attack gets a new server with small limits. Its latencies are compared with those of the same client just before
the attack, beside the same probes. The attacking processes run only while nothing else does (SCHED_IDLE), since peers
of a server do not usually share its processor; with --attacker-cores nothing else runs on theirs.

Exits with 1 if a bound does not hold, except for attacks that only client certificates, tokens or a newer gRPC close
(SECURITY.md).
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(TESTS / "support" / "python"),
    str(TESTS / "bench"),
    str(TESTS.parent / "client" / "python"),
]

import attacks  # noqa: E402
import logprobd  # noqa: E402
import suite_result  # noqa: E402
from built_packages import has_newer_grpc  # noqa: E402
from e2e.logprobctl import LoadPlan, LoadTool  # noqa: E402
from e2e.processes import running  # noqa: E402
from model_folder import ModelFolder  # noqa: E402
from sampler import memory_of  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from token_file import TokenFile  # noqa: E402

SPAWN = multiprocessing.get_context("spawn")  # a fork of a process in which gRPC runs would hang
MIB = 1 << 20
HIDDEN = 64
QUEUE_MIB = 64
LIMITS = (
    *("--receive-bytes", "256MiB", "--queue-bytes", f"{QUEUE_MIB}MiB"),
    *("--max-message-bytes", "64MiB", "--local", "none"),
)
SECONDS = 10.0  # of the baseline and of most attacks, unless --seconds says otherwise
RATE = 50.0  # calls of the client that behaves well, per second
PROBE_EVERY_S = 0.2
PROBE_TIMEOUT_S = 5.0
SETTLE_S = 5.0  # from the end of an attack to the last look at the memory
# An attack that takes more ends early, since the machine has other users.
STOP_AT_MIB = 8 * 1024

# The bounds.
MEMORY_MARGIN_MIB = 256  # above the declared limits
P99_FACTOR_MAX = 2.0
HEALTH_SECONDS_MAX = 1.0

NEWER_GRPC = "a newer gRPC"


@dataclasses.dataclass
class Case:
    title: str
    make: Callable[[types.SimpleNamespace], attacks.Attack]  # from the addresses and `token`
    earlier: str = ""  # what it did at commit 09c3ceb, before the limits
    seconds: float = SECONDS  # at least
    closed_by: str = ""  # what keeps the bounds that the server alone does not keep
    prefix: tuple[str, ...] = ()
    has_tokens: bool = False


CASES = {
    "http-headers": Case(
        "HTTP headers without end, 2 connections",
        lambda _: attacks.EndlessHttpHeaders(),
        "0.18 to 2.35 GB",
    ),
    "http-drip": Case(
        "HTTP clients that drip bytes, 28 connections",
        lambda _: attacks.DrippedHttpBytes(28),
        "8 of 8 /healthz failed in 3 s",
    ),
    "idle-connections": Case(
        "400 idle connections of one address, 300 open files",
        lambda _: attacks.HeldConnections(400, source="127.0.0.2"),
        "219 connections locked out all, and admin, for 40 s",
        prefix=("prlimit", "--nofile=300:300"),
    ),
    "calls-without-message": Case(
        "400 calls without a message",
        lambda _: attacks.HeldConnections(400, starts_calls=True),
    ),
    "dropped-connections": Case(
        "connections opened and dropped", lambda _: attacks.DroppedConnections()
    ),
    "unread-answers": Case(
        "unread answers, a client id for each call, no tokens",
        lambda _: attacks.UnreadAnswers(HIDDEN),
        "10 of 10 calls of others refused, without end",
        seconds=45,  # an answer of 1 MiB may stay unread for 31 s
        closed_by="tokens",
    ),
    "unread-answers-token": Case(
        "unread answers of one token",
        lambda at: attacks.UnreadAnswers(HIDDEN, {"authorization": f"Bearer {at.token}"}),
        seconds=45,
        has_tokens=True,
    ),
    "headers-before-settings": Case(
        "headers before SETTINGS are acknowledged, 6 connections of 40 calls",
        lambda _: attacks.HeadersBeforeSettings(40),
        "0.8 to 4.2 GB",
        closed_by="client certificates",  # a newer gRPC ends such a connection after 5 s
    ),
    "continuation": Case(
        "headers without end after SETTINGS are acknowledged, 8 connections",
        lambda _: attacks.EndlessContinuation(),
        closed_by=NEWER_GRPC,
    ),
    "hpack-literal": Case(
        "a header name of 1 GiB that never ends, 4 connections",
        lambda _: attacks.EndlessLiteral(),
        closed_by=NEWER_GRPC,
    ),
    "small-frames": Case(
        "a message of 32 MiB in DATA frames of one byte",
        lambda _: attacks.SmallFrames(32 * MIB),
        "1.4 GB",
        seconds=20,
        closed_by="tokens",
    ),
    "resets": Case(
        "100,000 calls that are reset at once",
        lambda _: attacks.Resets(100_000),
        "1.7 GB, 17 s",
        seconds=20,
        closed_by=NEWER_GRPC,
    ),
}


def broken_bounds(result: dict) -> list[str]:
    """Returns the names of the bounds that do not hold."""
    holds = {
        "memory": result["peak_mib"] <= result["declared_mib"] + MEMORY_MARGIN_MIB,
        "latency": result["p99_during_ms"] <= P99_FACTOR_MAX * result["p99_before_ms"],
        "calls of others": result["failed_calls"] == 0,
        "health": result["health_failed"] == 0 and result["health_slowest_s"] < HEALTH_SECONDS_MAX,
        "admin": result["admin_failed"] == 0,
    }
    return [name for name, does_hold in holds.items() if not does_hold]


def declared_mib(server: ServerProcess) -> float:
    """Returns the host memory that the server's plan declares, and that of answers that clients have not taken."""
    text = subprocess.run(
        [*server.command, "--dry-run"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    number, unit = re.search(r"host +total +([\d.]+) (\w+)", text).groups()
    return float(number) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit] + QUEUE_MIB


def attack(name: str, at: types.SimpleNamespace, cores: set[int], stop, report) -> None:
    """Runs an attack on some cores in a process of its own until `stop` is set."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, cores)
    case_attack = CASES[name].make(at)
    with attacks.Attackers(at, case_attack) as attackers:
        stop.wait()
    report.send((case_attack.amount, case_attack.unit, attackers.num_cut))


class Probes:
    """Asks for /healthz and the admin listener over new connections until the end of a `with` block."""

    def __init__(self, server: ServerProcess, token: str) -> None:
        self.slowest = {"health": 0.0, "admin": 0.0}
        self.failed = {"health": 0, "admin": 0}
        self.count = 0
        self._server, self._token = server, token
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _health(self) -> None:
        if self._server.get("/healthz", PROBE_TIMEOUT_S)[0] != 200:
            raise OSError("/healthz does not answer 200")

    def _admin(self) -> None:
        with logprobd.WeightsClient(
            self._server.admin, timeout=PROBE_TIMEOUT_S, token=self._token or None
        ) as client:
            client.list()

    def _run(self) -> None:
        while not self._is_over.wait(PROBE_EVERY_S):
            for name, probe in (("health", self._health), ("admin", self._admin)):
                begin = time.monotonic()
                try:
                    probe()
                except (OSError, logprobd.LogprobdError):
                    self.failed[name] += 1
                self.slowest[name] = max(self.slowest[name], time.monotonic() - begin)
            self.count += 1

    def __enter__(self) -> "Probes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextlib.contextmanager
def attacked(name: str, at: types.SimpleNamespace, server: ServerProcess, cores: set[int]):
    """Attacks the server from some cores during the context. Yields a dictionary that has the attack's report at the
    end."""
    stop = SPAWN.Event()
    receiver, sender = SPAWN.Pipe(duplex=False)
    attacker = SPAWN.Process(target=attack, args=(name, at, cores, stop, sender), daemon=True)
    report: dict = {"stopped_early": False}

    def watch() -> None:
        while not stop.wait(0.1):
            with contextlib.suppress(OSError):
                if memory_of(server.process.pid)["RSS"] > STOP_AT_MIB:
                    report["stopped_early"] = True
                    stop.set()

    watcher = threading.Thread(target=watch)
    attacker.start()
    watcher.start()
    try:
        yield report
    finally:
        stop.set()
        watcher.join()
        if receiver.poll(180):
            report["did"], report["unit"], report["cut"] = receiver.recv()
        attacker.kill()
        attacker.join()
    if not report.get("did"):
        raise RuntimeError(f"the attack {name} did nothing")


def closed_by(case: Case, is_grpc_newer: bool) -> str:
    """Returns what keeps the bounds that the server does not keep. With a newer gRPC it keeps what this closes."""
    return "" if is_grpc_newer and case.closed_by == NEWER_GRPC else case.closed_by


def measure(
    name: str, binaries: pathlib.Path, seconds: float, attacker_cores: set[int], work: pathlib.Path
) -> dict:
    """Returns the figures of one attack."""
    case = CASES[name]
    model = ModelFolder.write(work, vocab=1003, hidden=HIDDEN)
    options = ["--model", str(model.path), "--admin", "auto", *LIMITS]
    own = attackers = operator = ""
    if case.has_tokens:
        tokens = TokenFile(work / "tokens.toml")
        own, attackers = tokens.add("own", "score"), tokens.add("attacker", "score")
        operator = tokens.add("operator", "admin")
        options += ["--tokens", str(tokens.path)]
    process = ServerProcess(binaries, *options, prefix=case.prefix)
    with running(process, "logprobd") as server:
        at = types.SimpleNamespace(grpc=server.grpc, http=server.http, token=attackers)
        # The client that behaves well.
        plan = LoadPlan(rows=4, seconds=seconds, rate=RATE, channels=2, token=own)
        tool = LoadTool(binaries)
        with Probes(server, operator):
            before = tool.run(server.grpc, plan)
        start_mib = memory_of(server.process.pid)["RSS"]
        server.reset_peak_memory()
        plan.seconds = max(seconds, case.seconds)
        with (
            tool.running(server.grpc, plan) as end_of_load,
            Probes(server, operator) as probes,
            attacked(name, at, server, attacker_cores) as report,
        ):
            during = end_of_load()
        peak_mib = server.peak_memory_bytes() / MIB
        threading.Event().wait(SETTLE_S)
        result = {
            "attack": case.title,
            "did": f"{report['did']:,} {report['unit']}",
            "cut": report["cut"],
            "stopped_early": report["stopped_early"],
            "seconds": plan.seconds,
            "declared_mib": round(declared_mib(server)),
            "start_mib": round(start_mib),
            "peak_mib": round(peak_mib),
            "after_mib": round(memory_of(server.process.pid)["RSS"]),
            "p99_before_ms": round(before.p99 * 1e3, 2),
            "p99_during_ms": round(during.p99 * 1e3, 2),
            "longest_during_ms": round(during.longest * 1e3, 2),
            "calls": during.requests,
            "failed_calls": during.errors,
            "first_failure": during.first_error,
            "probes": probes.count,
            "health_failed": probes.failed["health"],
            "health_slowest_s": round(probes.slowest["health"], 3),
            "admin_failed": probes.failed["admin"],
            "admin_slowest_s": round(probes.slowest["admin"], 3),
            "earlier": case.earlier,
            "closed_by": closed_by(case, has_newer_grpc(binaries)),
        }
    return result | {"broken_bounds": broken_bounds(result)}


def problems(results: dict[str, dict]) -> list[str]:
    """Describes the bounds that do not hold, except those that need more than the server."""
    return [
        f"{result['attack']}: {', '.join(result['broken_bounds'])}"
        for result in results.values()
        if result["broken_bounds"] and not result["closed_by"]
    ]


# The columns of the table: title and text of a result.
COLUMNS: dict[str, Callable[[dict], str]] = {
    "attack": lambda each: each["attack"],
    "memory at the start, at most and after, MiB": lambda each: (
        f"{each['start_mib']}, {each['peak_mib']}, {each['after_mib']}"
    ),
    "declared, MiB": lambda each: f"{each['declared_mib']}",
    "p99 of others before and during, ms": lambda each: (
        f"{each['p99_before_ms']:.1f}, {each['p99_during_ms']:.1f}"
    ),
    "calls of others that failed": lambda each: (
        f"{each['failed_calls']} of {each['failed_calls'] + each['calls']}"
    ),
    "slowest `/healthz`, s": lambda each: f"{each['health_slowest_s']:.2f}",
    "failed calls of admin": lambda each: f"{each['admin_failed']} of {each['probes']}",
    "bounds that do not hold": lambda each: ", ".join(each["broken_bounds"]) or "none",
    "closed by": lambda each: each["closed_by"],
    "at 09c3ceb": lambda each: each["earlier"],
}


def table(record: dict) -> str:
    """Returns the table of a result in Markdown."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    rows += [[text(each) for text in COLUMNS.values()] for each in record["attacks"].values()]
    own = record["cores_of_attackers"]
    machine = record["machine"] + (f" and {own} more for the attackers" if own else "")
    origin = (
        f"{machine}, mean load of 15 minutes {record['load_average']}, {record['date']}, "
        f"commit {record['commit']}:"
    )
    return "\n".join([origin, "", *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    suite_result.add_arguments(parser)
    parser.add_argument(
        "--attack", action="append", choices=CASES, help="attack to run; default: all"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="time of the baseline, and least time of an attack; default: %(default)g",
    )
    parser.add_argument(
        "--attacker-cores",
        type=int,
        default=0,
        metavar="N",
        help="cores on which only the attackers run; default: 0, all cores are shared",
    )
    parser.add_argument("--table", type=pathlib.Path, help="prints the table of this result")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())), end="")
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if not 0 <= args.attacker_cores < len(cores):
        parser.error(
            f"--attacker-cores must be less than the number of cores, which is {len(cores)}"
        )
    attacker_cores = set(cores[-args.attacker_cores :])  # all of them for 0
    if args.attacker_cores:
        os.sched_setaffinity(0, set(cores) - attacker_cores)
    results = {}
    for name in args.attack or CASES:
        with tempfile.TemporaryDirectory(prefix="logprobd_hostile_") as work:
            results[name] = measure(
                name, args.bin_dir, args.seconds, attacker_cores, pathlib.Path(work)
            )
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
    return suite_result.write(
        {"cores_of_attackers": args.attacker_cores, "attacks": results}, problems(results), args
    )


if __name__ == "__main__":
    sys.exit(main())
