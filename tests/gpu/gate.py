#!/usr/bin/env python3
"""Runs everything that needs a GPU and that CI therefore skips, and writes a result that names the commit.

    python3 tests/gpu/gate.py                                     on a machine with a GPU and a build
    bash tests/gpu/run.sh build/gpu.tar.xz \\
      python3 tests/gpu/gate.py --bin-dir @BIN@       on a GPU machine without a build, after pack.sh

Steps: every *_gpu_test that a CMakeLists.txt names, the example of the fused kernel, the operator's Python tests on
CUDA, the same-host client check, a driver that hangs, the bits of the operator and the server, compute-sanitizer on the
small cases of the kernels' unit tests, and the digest of the result bits. Prints what passed, failed and was skipped
per step. A skipped test fails the gate unless it needs two GPUs, tests CPUs or, with --without-originals, needs another
package. Exits with 1 unless all passed. `--jobs N` runs N steps at once; the GPU is shared, so no step may measure
time. Needs pytest, torch, grpcio and ml_dtypes for the Python steps.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPERATOR_TESTS = ROOT / "tests" / "unit" / "kernels" / "torch_ops"
# All GoogleTest binaries that need a GPU. A binary that is missing, or one that is not listed here, fails the gate.
GPU_TESTS = (
    "accuracy_gpu_test",
    "chunk_kernels_gpu_test",
    "combine_gpu_test",
    "cuda_engine_gpu_test",
    "divergence_gpu_test",
    "fault_gpu_test",
    "fused_kernel_gpu_test",
    "fused_sm80_gpu_test",
    "invariance_gpu_test",
    "local_memory_gpu_test",
    "row_ops_gpu_test",
    "shards_gpu_test",
)
# invariance_gpu_test measures the GPU's free memory. In shards_gpu_test kernels of several shards wait for each other
# on one GPU, and the time slices of other processes would make each wait some hundred times longer.
ALONE = ("invariance_gpu_test", "shards_gpu_test")
# Tests that are small enough for compute-sanitizer, which runs kernels 10 to 100 times slower.
SANITIZED = {
    "row_ops_gpu_test": "*",
    "divergence_gpu_test": "*",
    # Kernels that wait for each other across streams would time out.
    "combine_gpu_test": "-PeerExchangeTest.*:PeerScoresTest.*",
    "chunk_kernels_gpu_test": "*",
    "fused_kernel_gpu_test": "FusedScoresTest.*:ListedLogitsTest.*",
    "fused_sm80_gpu_test": "FusedScoresTest.*:ListedLogitsTest.*",
}
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# A test may be skipped for want of a second GPU, or because it tests CPUs; with --without-originals, also for want of a
# package that the operator is compared with. These are the tests' own words, so that no other reason matches.
ALLOWED_SKIPS = re.compile(
    r"needs two GPUs|GPUs have their own kernels|test_gpu_ranks\.py tests ranks on GPUs"
)
MISSING_ORIGINALS = re.compile(r"could not import|not installed|no module named", re.IGNORECASE)
needs_originals = True  # cleared by --without-originals
step_timeout_seconds = 1800.0  # set by --step-timeout


class StepTimeoutError(Exception):
    """The message has the end of the step's output."""


@dataclasses.dataclass
class Result:
    """Counts of tests in a step. `detail` is shown when the step did not pass."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    bad_skips: int = 0  # Skipped tests that fail the gate.
    detail: str = ""
    seconds: float = 0.0
    digests: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Step:
    name: str
    run: Callable[[], Result]
    alone: bool = False  # Runs while no other step does.


def call(command: list[str | pathlib.Path], **environment: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=step_timeout_seconds)
    except subprocess.TimeoutExpired as error:
        # Its own children would otherwise disturb the steps that need the GPU for themselves.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise StepTimeoutError(f"no end after {error.timeout:.0f} s\n{tail(output)}") from error
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])


def report_of(report: pathlib.Path, done: subprocess.CompletedProcess[str]) -> Result:
    """Counts the tests in a JUnit report of GoogleTest or pytest."""
    text = report.read_text()
    if not text:
        return Result(
            failed=1, detail=f"exit {done.returncode} before the report\n{tail(done.stdout)}"
        )
    cases = [
        c for c in ElementTree.fromstring(text).iter("testcase") if c.get("status") != "notrun"
    ]
    bad = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    reasons = [
        (skip.get("message") or "no reason").strip()
        for case in cases
        if (skip := case.find("skipped")) is not None
    ]
    bad_skips = [
        reason
        for reason in reasons
        if not ALLOWED_SKIPS.search(reason)
        and (needs_originals or not MISSING_ORIGINALS.search(reason))
    ]
    result = Result(len(cases) - bad - len(reasons), bad, len(reasons), len(bad_skips))
    if not bad and (done.returncode != 0 or not cases):
        result.failed = 1
    counts = collections.Counter(reasons)
    result.detail = "\n".join(f"skipped {n}: {reason}" for reason, n in sorted(counts.items()))
    if result.failed:
        result.detail += f"\nexit {done.returncode}\n{tail(done.stdout, 80)}"
    return result


def gtest(*command: str | pathlib.Path, arguments: tuple[str, ...] = ()) -> Result:
    """Runs a GoogleTest binary, perhaps under another program."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        done = call([*command, f"--gtest_output=xml:{report.name}", *arguments])
        # They tell where a test hangs, but not why one fails.
        lines = [line for line in done.stdout.splitlines() if not re.match(r"\[ +(RUN|OK) ", line)]
        done.stdout = "\n".join(lines)
        return report_of(pathlib.Path(report.name), done)


def program(binary: pathlib.Path) -> Result:
    done = call([binary])
    return Result(passed=1) if done.returncode == 0 else Result(failed=1, detail=tail(done.stdout))


def operator_tests(library: pathlib.Path, file: pathlib.Path) -> Result:
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--show-capture=no",
        ]
        done = call(
            [*pytest, file, f"--junitxml={report.name}"],
            LINEAR_LOGPROB_DEVICE="cuda",
            LINEAR_LOGPROB_LIBRARY=str(library),
        )
        return report_of(pathlib.Path(report.name), done)


def check(script: str, server: pathlib.Path, **environment: str) -> Result:
    """Runs a script of this folder that ends with the line "N of M right"."""
    done = call([sys.executable, ROOT / "tests" / "gpu" / script, server], **environment)
    match = re.search(r"^(\d+) of (\d+) right$", done.stdout, re.MULTILINE)
    if match is None:
        return Result(failed=1, detail=f"exit {done.returncode}\n{tail(done.stdout)}")
    right, total = int(match[1]), int(match[2])
    failed = max(total - right, int(done.returncode != 0))
    return Result(right, failed, detail=tail(done.stdout, 80) if failed else "")


def sanitize(sanitizer: str, tool: str, binary: pathlib.Path, tests: str) -> Result:
    command = (sanitizer, "--tool", tool, "--error-exitcode", "9", binary)
    return gtest(*command, arguments=(f"--gtest_filter={tests}",))


def output_digest(bin_dir: pathlib.Path, library: pathlib.Path, baseline: dict[str, str]) -> Result:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, ROOT / "tests" / "gpu" / "output_digest.py", "--device", "cuda"]
        done = call([*command, "--bin-dir", bin_dir, "--library", library, "--out", out.name])
        if done.returncode != 0:
            return Result(failed=1, detail=tail(done.stdout))
        digests = json.loads(pathlib.Path(out.name).read_text())
    changed = [name for name in baseline if digests.get(name) != baseline[name]]
    detail = f"other bits than the baseline: {', '.join(changed)}" if changed else ""
    return Result(int(not changed), int(bool(changed)), detail=detail, digests=digests)


def steps_of(bin_dir: pathlib.Path, baseline: dict[str, str], is_partial: bool) -> list[Step]:
    """All steps; the longest come first, so that `--jobs` ends soon. Without `is_partial` no binary may be missing."""
    # A build keeps binaries, tests and libraries in three folders, an unpacked archive in one.
    folders = [bin_dir, bin_dir.parent / "tests", bin_dir.parent / "lib"]
    found = {path.name: path for folder in folders for path in folder.glob("*")}
    library, example = "liblogprobd_torch_ops.so", "fused_example"
    missing = [name for name in (*GPU_TESTS, example, "logprobd", library) if name not in found]
    found.update({name: bin_dir / name for name in missing})
    if missing and not is_partial:
        raise SystemExit(
            f"gate.py: error: {', '.join(missing)} not found in {bin_dir} or next to it: build all targets"
            " with -DLOGPROBD_TESTS=ON and -DTorch_DIR=..., or pass --bin-dir"
        )
    unlisted = [n for n in found if n.endswith("_gpu_test") and n not in GPU_TESTS]
    if unlisted:
        raise SystemExit(
            f"gate.py: error: GPU_TESTS does not list {', '.join(unlisted)}: add each new test, delete each old binary"
        )

    steps = [
        Step(f"operator {file.stem}", partial(operator_tests, found[library], file))
        for file in sorted(OPERATOR_TESTS.glob("test_*.py"))
        if file.stem != "test_ranks"  # Ranks on CPUs; test_gpu_ranks has the GPUs.
    ]
    steps += [Step(name, partial(gtest, found[name]), alone=name in ALONE) for name in GPU_TESTS]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    steps += [
        Step(f"sanitizer {tool} {name}", partial(sanitize, sanitizer, tool, found[name], tests))
        for name, tests in SANITIZED.items()
        for tool in SANITIZER_TOOLS
    ]
    steps.append(Step("fused kernel's example", partial(program, found[example])))
    server = found["logprobd"]
    steps.append(Step("same-host client", partial(check, "cuda_ipc_client_check.py", server)))
    steps.append(Step("hung driver", partial(check, "hung_driver_check.py", server)))
    bits = partial(check, "operator_bits_check.py", server)
    steps.append(
        Step(
            "bits of operator and server", partial(bits, LINEAR_LOGPROB_LIBRARY=str(found[library]))
        )
    )
    digest = partial(output_digest, found["logprobd"].parent, found[library], baseline)
    steps.append(Step("output digest", digest))
    return steps


def run_step(step: Step) -> Result:
    started = time.monotonic()
    try:
        result = step.run()
    except Exception as error:  # One step without a result must not lose those of the others.
        result = Result(failed=1, detail=f"{type(error).__name__}: {error}")
    result.seconds = round(time.monotonic() - started, 1)
    return result


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = call(query).stdout.strip().splitlines()
    except FileNotFoundError:
        gpus = []
    if not gpus or "," not in gpus[0]:
        raise SystemExit(
            "gate.py: error: nvidia-smi lists no GPU: run the gate on a machine with one"
            " (tests/gpu/README.md says how without a build there)"
        )
    name, driver = (part.strip() for part in gpus[0].split(","))
    return {"gpu": f"{len(gpus)} x {name}", "driver": driver}


def commit_of(bin_dir: pathlib.Path) -> str:
    """The commit of the binaries: what pack.sh wrote, or the checkout's, which is built first."""
    packed = bin_dir / "COMMIT"
    if packed.exists():
        return packed.read_text().strip()
    if not (bin_dir.parent / "build.ninja").exists():
        raise SystemExit(f"gate.py: error: {bin_dir} is no folder of a build: pass --bin-dir")
    print("building ...", flush=True)
    done = call(["cmake", "--build", bin_dir.parent])
    if done.returncode != 0:
        raise SystemExit(f"gate.py: error: the build failed\n{tail(done.stdout)}")
    described = call(["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="])
    return described.stdout.strip() if described.returncode == 0 else "unknown"


def main() -> int:
    global needs_originals, step_timeout_seconds  # noqa: PLW0603
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="More: tests/gpu/README.md", allow_abbrev=False
    )
    parser.add_argument("--bin-dir", type=pathlib.Path, default=ROOT / "build" / "release" / "bin")
    parser.add_argument(
        "--only",
        default="",
        help="run only the steps whose name matches this regular expression; the result says 'partial'",
    )
    parser.add_argument(
        "--baseline",
        type=pathlib.Path,
        help="result of an earlier gate on the same kind of GPU; other output digests fail the gate",
    )
    parser.add_argument("--jobs", type=int, default=1, help="steps that run at once (default: 1)")
    parser.add_argument(
        "--step-timeout",
        type=float,
        default=step_timeout_seconds,
        metavar="SECONDS",
        help="a step that takes longer has failed (default: %(default)g)",
    )
    parser.add_argument(
        "--without-originals",
        action="store_true",
        help="pass although packages that the operator is compared with are not installed",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "build" / "gpu-gate.json",
        help="the result, as JSON",
    )
    arguments = parser.parse_args()
    bin_dir = arguments.bin_dir.resolve()
    baseline = {}
    if arguments.baseline:
        baseline = json.loads(arguments.baseline.read_text())["steps"]["output digest"]["digests"]

    host = machine()
    commit = commit_of(bin_dir)
    step_timeout_seconds = arguments.step_timeout
    needs_originals = not arguments.without_originals
    all_steps = steps_of(bin_dir, baseline, is_partial=bool(arguments.only))
    steps = [step for step in all_steps if re.search(arguments.only, step.name)]
    print(
        f"GPU gate at {commit}: {len(steps)} steps on {host['gpu']}, driver {host['driver']}",
        flush=True,
    )

    results: dict[str, Result] = {}

    def run_steps(chosen: list[Step], jobs: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(run_step, step): step for step in chosen}
            for future in concurrent.futures.as_completed(futures):
                name, result = futures[future].name, future.result()
                results[name] = result
                print(
                    f"{name:48s} {result.passed:5d} passed {result.failed:3d} failed {result.skipped:3d} skipped"
                    f" {result.seconds:7.1f} s",
                    flush=True,
                )
                if result.detail:
                    print("    " + result.detail.replace("\n", "\n    "), flush=True)

    run_steps([step for step in steps if not step.alone], arguments.jobs)
    run_steps([step for step in steps if step.alone], 1)

    passed = sum(result.passed for result in results.values())
    failed = sum(result.failed for result in results.values())
    skipped = sum(result.skipped for result in results.values())
    bad_skips = sum(result.bad_skips for result in results.values())
    gate_passed = bool(results) and failed == 0 and bad_skips == 0
    verdict = ("partial, " if arguments.only else "") + ("passed" if gate_passed else "failed")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        json.dumps(
            {
                "verdict": verdict,
                "commit": commit,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                **host,
                "only": arguments.only,
                "passed": passed,
                "failed": failed,
                "skipped": skipped,
                "steps": {
                    name: dataclasses.asdict(result) for name, result in sorted(results.items())
                },
            },
            indent=1,
        )
        + "\n"
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    print(f"GPU gate at {commit}: {verdict}; result in {arguments.out}")
    return 0 if gate_passed else 1


if __name__ == "__main__":
    sys.exit(main())
