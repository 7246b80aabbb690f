#!/usr/bin/env python3
"""Runs everything that needs a GPU and that CI therefore skips, and writes a result that names the commit.

    python3 tests/gpu/gate.py                                     on a machine with a GPU and a build
    bash tests/gpu/run.sh build/gpu.tar.xz \\
      python3 tests/gpu/gate.py --bin-dir @BIN@ --commit ID       on a GPU machine without a build, after pack.sh

Steps: every *_gpu_test, the operator's Python tests on CUDA, the same-host client check, compute-sanitizer on the
small cases of the kernels' unit tests, and the digest of the result bits. Prints what passed, failed and was skipped
per step; a skipped C++ test counts as a failure, because this machine has a GPU. Exits with 1 unless all passed.
`--jobs N` runs N steps at once; the GPU is shared, so no step may measure time. Needs pytest, torch, grpcio and
ml_dtypes for the Python steps.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPERATOR_TESTS = ROOT / "tests" / "unit" / "kernels" / "torch_ops"
# Tests that are small enough for compute-sanitizer, which runs kernels 10 to 100 times slower.
SANITIZED = {
    "row_ops_gpu_test": "*",
    # Kernels that wait for each other across streams would time out.
    "combine_gpu_test": "-PeerExchangeTest.*:PeerScoresTest.*",
    "chunk_kernels_gpu_test": "*",
    "fused_kernel_gpu_test": "FusedScoresTest.*:ListedLogitsTest.*",
}
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclasses.dataclass
class Result:
    """Counts of tests in a step. `detail` is shown when the step did not pass."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    detail: str = ""
    seconds: float = 0.0
    digests: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Step:
    name: str
    run: Callable[[], Result]


def call(command: list[str | pathlib.Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=ROOT,
    )


def tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])


def gtest(binary: pathlib.Path) -> Result:
    """A GoogleTest binary. A skipped test is a failure: on a machine with a GPU every test must run."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        done = call([binary, "--gtest_brief=1", f"--gtest_output=json:{report.name}"])
        text = pathlib.Path(report.name).read_text()
    try:
        suites = json.loads(text)["testsuites"]
    except json.JSONDecodeError:
        return Result(
            failed=1, detail=f"exit {done.returncode} before the report\n{tail(done.stdout)}"
        )
    cases = [case for suite in suites for case in suite["testsuite"]]
    failed = [f"{case['classname']}.{case['name']}" for case in cases if case.get("failures")]
    skipped = [
        f"{case['classname']}.{case['name']}" for case in cases if case.get("result") == "SKIPPED"
    ]
    result = Result(len(cases) - len(failed) - len(skipped), len(failed), len(skipped))
    if done.returncode != 0 and not failed:
        result.failed += 1
    if result.failed or result.skipped:
        names = "\n".join(
            [*(f"failed: {name}" for name in failed), *(f"skipped: {name}" for name in skipped)]
        )
        result.detail = f"exit {done.returncode}\n{names}\n{tail(done.stdout)}"
    return result


def operator_tests(library: pathlib.Path, file: pathlib.Path) -> Result:
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        done = call(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                file,
                f"--junitxml={report.name}",
            ],
            LINEAR_LOGPROB_DEVICE="cuda",
            LINEAR_LOGPROB_LIBRARY=str(library),
        )
        text = pathlib.Path(report.name).read_text()
    if not text:
        return Result(
            failed=1, detail=f"exit {done.returncode} before the report\n{tail(done.stdout)}"
        )
    suite = ElementTree.fromstring(text).find("testsuite")
    assert suite is not None
    total, failed, errors, skipped = (
        int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")
    )
    bad = failed + errors
    result = Result(total - bad - skipped, bad, skipped)
    if bad or done.returncode not in (0, 5):  # 5: the file has no test for this device
        result.failed = max(bad, 1)
        result.detail = tail(done.stdout, 80)
    return result


def client_check(server: pathlib.Path) -> Result:
    done = call([sys.executable, ROOT / "tests" / "gpu" / "cuda_ipc_client_check.py", server])
    match = re.search(r"^(\d+) of (\d+) right$", done.stdout, re.MULTILINE)
    if match is None:
        return Result(failed=1, detail=f"exit {done.returncode}\n{tail(done.stdout)}")
    right, total = int(match[1]), int(match[2])
    failed = max(total - right, int(done.returncode != 0))
    return Result(right, failed, detail=tail(done.stdout, 80) if failed else "")


def sanitize(sanitizer: str, tool: str, binary: pathlib.Path, tests: str) -> Result:
    done = call(
        [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            binary,
            "--gtest_brief=1",
            f"--gtest_filter={tests}",
        ]
    )
    ran = re.search(r"(\d+) tests? from \d+ test suites? ran|PASSED\s*\]\s*(\d+) test", done.stdout)
    count = int(ran[1] or ran[2]) if ran else 0
    if done.returncode != 0 or count == 0:
        return Result(
            failed=1, detail=f"exit {done.returncode}, {count} tests\n{tail(done.stdout, 60)}"
        )
    return Result(passed=count)


def output_digest(bin_dir: pathlib.Path, library: pathlib.Path) -> Result:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, ROOT / "tests" / "gpu" / "output_digest.py", "--device", "cuda"]
        done = call([*command, "--bin-dir", bin_dir, "--library", library, "--out", out.name])
        if done.returncode != 0:
            return Result(failed=1, detail=tail(done.stdout))
        return Result(passed=1, digests=json.loads(pathlib.Path(out.name).read_text()))


def find(folders: list[pathlib.Path], name: str) -> pathlib.Path:
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise SystemExit(
        f"gate.py: error: {name} is in none of {', '.join(map(str, folders))}: build it, or pass --bin-dir"
    )


def steps_of(bin_dir: pathlib.Path) -> list[Step]:
    """All steps; the longest come first, so that `--jobs` ends soon."""
    # A build keeps binaries, tests and libraries in three folders, an unpacked archive in one.
    folders = [bin_dir, bin_dir.parent / "tests", bin_dir.parent / "lib"]
    tests = {path.name: path for folder in folders for path in sorted(folder.glob("*_gpu_test"))}
    if not tests:
        find(folders, "*_gpu_test")
    server = find(folders, "logprobd")
    library = find(folders, "liblogprobd_torch_ops.so")

    steps = [
        Step(f"operator {file.stem}", lambda file=file: operator_tests(library, file))
        for file in sorted(OPERATOR_TESTS.glob("test_*.py"))
    ]
    steps += [Step(name, lambda binary=binary: gtest(binary)) for name, binary in tests.items()]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for name, filter_ in SANITIZED.items():
        for tool in SANITIZER_TOOLS:
            binary = tests[name]
            steps.append(
                Step(
                    f"sanitizer {tool} {name}",
                    lambda tool=tool, binary=binary, filter_=filter_: sanitize(
                        sanitizer, tool, binary, filter_
                    ),
                )
            )
    steps.append(Step("same-host client", lambda: client_check(server)))
    steps.append(Step("output digest", lambda: output_digest(server.parent, library)))
    return steps


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = call(query).stdout.strip().splitlines()
    name, driver = (part.strip() for part in gpus[0].split(","))
    return {"gpu": f"{len(gpus)} x {name}", "driver": driver}


def current_commit() -> str:
    done = call(["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="])
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="More: tests/gpu/README.md", allow_abbrev=False
    )
    parser.add_argument("--bin-dir", type=pathlib.Path, default=ROOT / "build" / "release" / "bin")
    parser.add_argument(
        "--commit", default="", help="commit of the binaries; by default the checkout's"
    )
    parser.add_argument(
        "--only", default="", help="run only the steps whose name matches this regular expression"
    )
    parser.add_argument("--jobs", type=int, default=1, help="steps that run at once (default: 1)")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "build" / "gpu-gate.json",
        help="the result, as JSON",
    )
    arguments = parser.parse_args()
    commit = arguments.commit or current_commit()
    if not commit:
        parser.error("this is no git checkout: name the commit of the binaries with --commit")

    host = machine()
    steps = [
        step
        for step in steps_of(arguments.bin_dir.resolve())
        if re.search(arguments.only, step.name)
    ]
    print(
        f"GPU gate at {commit}: {len(steps)} steps on {host['gpu']}, driver {host['driver']}",
        flush=True,
    )

    def timed(step: Step) -> Result:
        started = time.monotonic()
        result = step.run()
        result.seconds = round(time.monotonic() - started, 1)
        return result

    results: dict[str, Result] = {}
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(timed, step): step for step in steps}
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

    passed = sum(result.passed for result in results.values())
    failed = sum(result.failed for result in results.values())
    skipped = sum(result.skipped for result in results.values())
    # Python tests skip what needs several GPUs or another package; C++ tests have no reason to skip here.
    bad_skips = sum(
        result.skipped for name, result in results.items() if name.endswith("_gpu_test")
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        json.dumps(
            {
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
    gate_passed = bool(results) and failed == 0 and bad_skips == 0
    print(
        f"GPU gate at {commit}: {'passed' if gate_passed else 'FAILED'}; result in {arguments.out}"
    )
    return 0 if gate_passed else 1


if __name__ == "__main__":
    sys.exit(main())
