#!/usr/bin/env python3
"""Checks on a machine with a GPU that a call to the driver that never returns ends the server in time.

    python3 tests/gpu/hung_driver_check.py SERVER_BINARY

Starts a server with a small random head, then makes cuEventQuery hang on the thread that ends batches
(tests/support/faulty_calls.c). Every request must get UNAVAILABLE, and the server must end with
status 4, within the watchdog's time and 10 s. Exits with 1 otherwise. Preloads faulty_calls.so next to
the binary, or else a library that the C compiler $CC or cc builds. Needs grpcio and ml_dtypes.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support" / "python"))

WATCHDOG_S = 1


def faulty_library(binaries: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    packed = binaries / "faulty_calls.so"
    if packed.exists():
        return packed
    built = folder / packed.name
    source = ROOT / "tests" / "support" / "faulty_calls.c"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source], check=True)
    return built


def check(binary: pathlib.Path, folder: pathlib.Path) -> dict[str, bool]:
    """Returns whether each expectation is met."""
    import grpc
    from model_folder import ModelFolder
    from scoring_rpc import Scoring, request
    from server_process import ServerProcess

    ModelFolder.write(folder, vocab=1003, hidden=64)
    switch = folder / "switch"
    switch.write_bytes(bytes(1))
    environment = {
        "LD_PRELOAD": str(faulty_library(binary.parent, folder)),
        "FAULTY_SWITCH": str(switch),
        "FAULTY_CALL": "cuEventQuery",
        "FAULTY_THREAD": "engine-finish",
    }
    options = ["--model", str(folder), "--watchdog-s", str(WATCHDOG_S)]
    server = ServerProcess(binary.parent, *options, device="cuda", environment=environment)
    server.command[0] = str(binary)
    with server, Scoring(server.grpc) as scoring:
        scoring.score(request())
        with switch.open("r+b") as file:
            file.write(b"\x01")
        started = time.monotonic()
        calls = [scoring.score_future(request().SerializeToString()) for _ in range(3)]
        codes = [call.code() for call in calls]
        status = server.wait()
        seconds = time.monotonic() - started
    print(f"answers {[code.name for code in codes]}, exit status {status} after {seconds:.1f} s")
    log = "".join(server.log)
    # The shard is named if the thread had begun with its batch when the driver hung.
    named = (
        r"the process ends: thread engine-finish, head default, replica 0(, shard 0)? has not moved"
    )
    return {
        "every answer is UNAVAILABLE": set(codes) == {grpc.StatusCode.UNAVAILABLE},
        "the exit status is 4": status == 4,
        "the end is in time": seconds < WATCHDOG_S + 10,
        f"the log says: {named}\n{log}": re.search(named, log) is not None,
    }


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = check(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(folder))
    for expectation, is_right in found.items():
        if not is_right:
            print(f"WRONG: {expectation}")
    print(f"{sum(found.values())} of {len(found)} right")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
