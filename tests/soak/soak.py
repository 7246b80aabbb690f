#!/usr/bin/env python3
"""Loads a server with all kinds of calls for a long time and checks that its memory does not grow.

    soak.py --minutes 120 --slope-max 1 --out soak_cpu.json         on the CPU engine
    soak.py --device cuda --minutes 6 --control-minutes 1.5 ...     on a GPU

While the clients of client_mix.py call the two heads of a server, some clients are killed with SIGKILL, /metrics is
read, weights of each head are swapped and rolled back, and SIGHUP makes the server read its settings again. RSS, GPU
memory, open files and threads are sampled each second. After a warm-up of a third of the run their slopes must be
zero within noise (slope.py). With --slope-max the interval of the memory's slopes must also end at a maximum. A
control run then uses a server that leaks on purpose, which the same check must detect. This server preloads leak.so
from --bin-dir, or else a library that the C compiler $CC or cc builds from leak.c.

Prints its progress twice a minute. Results are written after the run and again after the control run. SIGTERM ends
the run early, and the results up to then are evaluated.

Exits with 1 if something grows or may grow faster than --slope-max, a call ended with a status that is not allowed,
or the leak was not detected.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "support" / "python"), str(TESTS / "bench")]

import bench_records  # noqa: E402
import slope  # noqa: E402
import suite_result  # noqa: E402
from client_mix import HEADS, MixedLoad  # noqa: E402
from e2e.logprobctl import WeightsTool, server_flags  # noqa: E402
from e2e.processes import (  # noqa: E402
    LOG_LINES_SHOWN,
    gpu_memory_mib,
    gpu_memory_of_mib,
    running,
)
from e2e.synthetic_head import write_head  # noqa: E402
from sampler import Sampler  # noqa: E402
from server_process import ServerProcess  # noqa: E402

# The unit of each sampled quantity, and the growth over a run up to which it is not detectable (slope.py).
RESOLUTIONS = {
    "RSS": ("MiB", 2.0),
    "anonymous memory": ("MiB", 2.0),
    "GPU memory": ("MiB", 4.0),
    "open files": ("files", 4.0),
    "threads": ("threads", 2.0),
}
LEAK_SHOWS_IN = "anonymous memory"
BOUNDED = ("RSS", "anonymous memory")  # by --slope-max
KILL_EVERY_S = 8.0
SWAP_EVERY_S = 5.0
ROLLBACK_EVERY = 3  # swaps of a head
SCRAPE_EVERY_S = 1.0
SCRAPE_TIMEOUT_S = 10.0  # the default of Prometheus
SAY_EVERY_S = 30.0
LEAK_LIBRARY = "leak.so"
# glibc returns blocks above 32 MiB, such as those of a real head, at once. The smaller heads of the CPU run and the
# memory of their engines would come from its arenas and leave holes there: 15 MiB of noise over 6 minutes.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": f"{128 << 10}"}


@dataclasses.dataclass
class Options:
    binaries: pathlib.Path
    device: str
    model: pathlib.Path
    other_model: (
        pathlib.Path
    )  # has the same shape; weights of both heads are swapped between the two
    hidden: int
    vocab: int
    rows: int
    processes: int
    resolution_factor: float  # 1, or larger for runs that are too short for a server to settle
    kill_every_s: float = KILL_EVERY_S
    swap_every_s: float = SWAP_EVERY_S
    sample_every_s: float = 1.0
    samples: pathlib.Path | None = None  # CSV file to which every sample is added
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)  # ends the run early


@dataclasses.dataclass
class Outcome:
    slopes: dict[str, slope.Slope]
    medians: dict[str, float]
    surprises: list[str]
    note: str


class Every:
    """Tells when a repeated action is due."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def is_due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._seconds
        return True


class Swapper:
    """Changes the weights of heads in a thread, one head after the other. Use as a context manager.

    Each change of a head loads and commits the other one of two folders as a new version. Each ROLLBACK_EVERY-th one is
    rolled back at once. `after_change` is called after each.
    """

    def __init__(
        self,
        weights: list[WeightsTool],
        folders: list[pathlib.Path],
        every_s: float = SWAP_EVERY_S,
        after_change: Callable[[], object] = lambda: None,
    ) -> None:
        self.swaps = 0
        self.rollbacks = 0
        self._every_s = every_s
        self.failures: list[str] = []
        self._weights, self._folders = weights, folders
        self._after_change = after_change
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            round_of_heads, head = divmod(self.swaps, len(self._weights))
            weights = self._weights[head]
            try:
                weights.load(round_of_heads + 2, self._folders[(round_of_heads + 1) % 2])
                weights.commit()
                self.swaps += 1
                if (round_of_heads + 1) % ROLLBACK_EVERY == 0:
                    weights.rollback()
                    self.rollbacks += 1
                self._after_change()
            except (RuntimeError, OSError) as error:
                self.failures.append(str(error))

    def __enter__(self) -> "Swapper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(130)


def gpu_memory_reader(pid: int) -> Callable[[], float | None]:
    """Returns a reader of the GPU memory of the server if the driver reports it by process, else of all processes."""
    if gpu_memory_of_mib(pid) is None:
        return gpu_memory_mib
    return lambda: gpu_memory_of_mib(pid)


def scrape_error(server: ServerProcess) -> str:
    """Returns why /metrics could not be read in the time that Prometheus allows, or "" if it could."""
    try:
        status, _ = server.get("/metrics", timeout=SCRAPE_TIMEOUT_S)
    except OSError as error:
        return repr(error)
    return "" if status == 200 else f"status {status}"


def run(
    options: Options, seconds: float, title: str, environment: dict[str, str] | None = None
) -> Outcome:
    """Runs one server under load for `seconds` or until `options.stop` is set. The first third is warm-up."""
    models = [flag for head in HEADS for flag in ("--model", f"{head}={options.model}")]
    process = ServerProcess(
        options.binaries,
        *(*models, *server_flags(options.model.parent)),
        device=options.device,
        environment=ALLOCATOR | (environment or {}),
    )
    scrapes = 0
    scrape_errors: list[str] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(process, "logprobd"))
        load = stack.enter_context(
            MixedLoad(
                options.binaries,
                server.grpc,
                hidden=options.hidden,
                vocab=options.vocab,
                rows=options.rows,
                processes=options.processes,
            )
        )
        pid = server.process.pid
        sampler = stack.enter_context(Sampler(pid, gpu_memory_reader(pid), options.sample_every_s))
        swapper = stack.enter_context(
            Swapper(
                [WeightsTool(options.binaries, server.admin, head) for head in HEADS],
                [options.model, options.other_model],
                options.swap_every_s,
                after_change=lambda: server.signal(signal.SIGHUP),
            )
        )
        begin = time.monotonic()
        kill, read, report = Every(options.kill_every_s), Every(SCRAPE_EVERY_S), Every(SAY_EVERY_S)
        while time.monotonic() - begin < seconds and server.process.poll() is None:
            if options.stop.wait(0.05):
                break
            if kill.is_due():
                load.kill_one()
            if read.is_due():
                scrapes += 1
                if error := scrape_error(server):
                    scrape_errors.append(error)
            if report.is_due():
                last = {name: values[-1] for name, values in sampler.series.items()}
                say(
                    f"{title}: {(time.monotonic() - begin) / 60:.1f} of {seconds / 60:.1f} minutes, "
                    f"{load.calls():,} calls, {load.kills} kills, {swapper.swaps} swaps, "
                    f"{swapper.rollbacks} rollbacks, "
                    + ", ".join(f"{name} {value:,.1f}" for name, value in last.items())
                )
        lasted = time.monotonic() - begin
        if options.samples:
            sampler.append_to(options.samples, title, begin)
        times, series = sampler.after(begin + lasted / 3)
        surprises = load.surprises() + swapper.failures
        if server.process.poll() is not None:
            end = "".join(server.log[-LOG_LINES_SHOWN:])
            surprises.append(f"the server ended with {server.process.returncode}:\n{end}")
        if scrape_errors:
            surprises.append(
                f"{len(scrape_errors)} of {scrapes} scrapes failed, first: {scrape_errors[0]}"
            )
        if not swapper.swaps and lasted > 2 * options.swap_every_s:
            surprises.append("no weights were swapped")
        calls, kills = load.calls(), load.kills
        for surprise in surprises:
            say(f"FAILED: {title}: {surprise}")
        slopes = {
            name: slope.fit(
                times, values, resolution=RESOLUTIONS[name][1] * options.resolution_factor
            )
            for name, values in series.items()
        }
    medians = {name: sorted(values)[len(values) // 2] for name, values in series.items()}
    note = (
        f"{calls:,} calls, {kills} clients killed, {swapper.swaps} swaps, {swapper.rollbacks} rollbacks, "
        f"as many SIGHUPs as swaps, {scrapes} scrapes; "
        f"the last {slopes['RSS'].seconds / 60:.1f} of {lasted / 60:.1f} minutes"
    )
    return Outcome(slopes, medians, surprises, note)


def build_leak(binaries: pathlib.Path, work: pathlib.Path) -> pathlib.Path:
    """Returns the library to preload from the folder of the programs, or builds it.

    Raises SystemExit with advice if it cannot be built.
    """
    packed = binaries / LEAK_LIBRARY
    if packed.exists():
        return packed
    library, compiler = work / LEAK_LIBRARY, os.environ.get("CC", "cc")
    source = pathlib.Path(__file__).with_name("leak.c")
    try:
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"soak.py: cannot build the library that leaks: {error}; set CC to a C compiler, "
            f"put {LEAK_LIBRARY} into --bin-dir, or skip the control run with --control-minutes 0"
        ) from None
    return library


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def per_hour(
    outcome: Outcome,
    name: str,
    title: str,
    *,
    expects_growth: bool,
    slope_max: float | None = None,
) -> dict:
    """Returns a record of one slope. `slope_max` bounds the upper end of its interval, per hour."""
    fitted, unit = outcome.slopes[name], RESOLUTIONS[name][0]
    verdict = "grows" if fitted.grows else "zero within noise"
    if fitted.high < 0 and fitted.growth < -fitted.resolution:
        verdict = "shrinks"
    entry = bench_records.record(
        f"{title}: {name}",
        fitted.per_second * 3600,
        f"{unit}/h",
        spread=[fitted.low * 3600, fitted.high * 3600],
        note=f"{verdict}; {fitted.growth:+.3g} {unit} of {outcome.medians[name]:.4g} in the time "
        f"measured, growth below {fitted.resolution:g} is not detectable; {outcome.note}",
    )
    exceeds = slope_max is not None and fitted.may_exceed(slope_max / 3600)
    if slope_max is not None:
        bound = "may be above" if exceeds else "is at most"
        entry["note"] += f"; the slope {bound} {slope_max:g} {unit}/h"
    if exceeds or fitted.grows != expects_growth:
        entry["missed"] = True
    return entry


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    suite_result.add_arguments(parser)
    parser.add_argument(
        "--samples",
        type=pathlib.Path,
        help="CSV file to which every sample is added, to explain a verdict",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device of the server; default: cpu",
    )
    parser.add_argument("--minutes", type=float, default=20, help="minutes of the run; default: 20")
    parser.add_argument(
        "--control-minutes",
        type=float,
        default=3,
        help="minutes of the control run with a leak; 0 skips it; default: 3",
    )
    parser.add_argument(
        "--leak-bytes",
        type=int,
        default=4096,
        help="bytes that leak per sent message; default: 4096",
    )
    parser.add_argument("--hidden", type=int, help="hidden size; default: 256, on a GPU 4096")
    parser.add_argument("--vocab", type=int, help="vocabulary size; default: 8192, on a GPU 151936")
    parser.add_argument(
        "--rows", type=int, default=512, help="rows of a bulk request; default: 512"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="number of Python client processes; default: 2"
    )
    parser.add_argument(
        "--resolution-factor",
        type=float,
        default=1,
        help="factor of the undetectable growth, for runs that are too short for a server to settle; default: 1",
    )
    parser.add_argument(
        "--slope-max",
        type=float,
        metavar="MIB_PER_HOUR",
        help="maximum of the upper end of the interval of the slopes of RSS and anonymous memory, for runs that are "
        "long enough for a narrow interval; default: none",
    )
    parser.add_argument(
        "--kill-every-s",
        type=float,
        default=KILL_EVERY_S,
        help="seconds between kills of a client; default: 8",
    )
    parser.add_argument(
        "--swap-every-s",
        type=float,
        default=SWAP_EVERY_S,
        help="seconds between swaps of the weights; default: 5",
    )
    parser.add_argument(
        "--sample-every-s", type=float, default=1, help="seconds between samples; default: 1"
    )
    parser.add_argument("--machine", help="machine of the records; default: read from the system")
    args = parser.parse_args()
    is_gpu = args.device == "cuda"
    args.hidden = args.hidden or (4096 if is_gpu else 256)
    args.vocab = args.vocab or (151_936 if is_gpu else 8192)
    for program in ("logprobd", "logprobctl"):
        if not (args.bin_dir / program).exists():
            parser.error(
                f"{args.bin_dir / program} is missing: build it, or set --bin-dir to its folder"
            )
    return args


def soak(args: argparse.Namespace, work: pathlib.Path, stop: threading.Event) -> bool:
    """Executes both runs and writes the results after each. Returns whether all checks passed."""
    leak = build_leak(args.bin_dir, work) if args.control_minutes else None
    models = [
        write_head(work / f"head-{seed}", vocab=args.vocab, hidden=args.hidden, seed=seed)
        for seed in (1, 2)
    ]
    options = Options(
        binaries=args.bin_dir,
        device=args.device,
        model=models[0],
        other_model=models[1],
        hidden=args.hidden,
        vocab=args.vocab,
        rows=args.rows,
        processes=args.processes,
        resolution_factor=args.resolution_factor,
        kill_every_s=args.kill_every_s,
        swap_every_s=args.swap_every_s,
        sample_every_s=args.sample_every_s,
        samples=args.samples,
        stop=stop,
    )
    where = f"Soak, {args.device}, H={args.hidden}, V={args.vocab}"
    outcome = run(options, args.minutes * 60, "mixed load")
    records = [
        per_hour(
            outcome,
            name,
            f"{where}, mixed load",
            expects_growth=False,
            slope_max=args.slope_max if name in BOUNDED else None,
        )
        for name in outcome.slopes
    ]
    has_misses = bench_records.report_misses(records)
    if args.out:
        # The records are already written here, since the control run may fail.
        bench_records.write(records, args.out)
    if leak and not stop.is_set():
        environment = {"LD_PRELOAD": str(leak), "LEAK_BYTES": str(args.leak_bytes)}
        control = run(options, args.control_minutes * 60, "with a leak", environment)
        title = f"{where}, with a leak of {args.leak_bytes} bytes per sent message"
        records.append(per_hour(control, LEAK_SHOWS_IN, title, expects_growth=True))
        has_misses |= bench_records.report_misses(records[-1:])
    bench_records.write(records, args.out)
    return not has_misses and not outcome.surprises


def main() -> int:
    args = arguments()
    bench_records.ORIGIN.update(
        machine=args.machine or bench_records.machine(with_gpu=args.device == "cuda"),
        commit=args.commit or bench_records.commit(),
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    work = pathlib.Path(tempfile.mkdtemp(prefix="logprobd_soak_"))
    try:
        return 0 if soak(args, work, stop) else 1
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
