#!/usr/bin/env python3
"""Replaces a server's certificate a thousand times while clients make new TLS connections; no call may fail.

    rotate_certificates.py --out tests/soak/rotate_certificates.json

Every second certificate is replaced at once, and the server is seen to show each other one. Memory and open files are
read after a warm-up and at the end. Prints the result, or writes it to --out.

Exits with 1 if a call failed, or if memory or open files have grown.
"""

import argparse
import pathlib
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(TESTS / "support" / "python"),
    str(TESTS / "bench"),
    str(TESTS.parent / "client" / "python"),
]

import suite_result  # noqa: E402
from certificate_rotation import Rotation, install, rotate  # noqa: E402
from e2e.processes import running  # noqa: E402
from model_folder import ModelFolder  # noqa: E402
from sampler import counts_of, memory_of  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from tls_certificates import Authority  # noqa: E402

AWAIT_EVERY = 2
WARM_UP = 20  # certificates
SETTLES_WITHIN_S = 20  # time for the connections of the clients to be closed
# A connection leaves nothing behind. The server's memory settles after some thousands of connections.
GROWTH_MIB_MAX = 32.0
GROWTH_FILES_MAX = 4.0


def problems(result: dict) -> list[str]:
    """Returns what is wrong with a result, in words."""
    found = []
    if result["failed_calls"]:
        found.append(f"{result['failed_calls']} calls failed, first: {result['first_failure']}")
    if result["served"] < result["rotations"]:
        found.append(f"only {result['served']} of {result['rotations']} certificates were served")
    for name, limit in (("resident_mib", GROWTH_MIB_MAX), ("open_files", GROWTH_FILES_MAX)):
        growth = result[f"{name}_after"] - result[f"{name}_before"]
        if growth > limit:
            found.append(f"{name} grew by {growth:g}, which is more than {limit:g}")
    return found


def footprint(server: ServerProcess) -> tuple[float, float]:
    """Returns the resident memory in MiB and the number of open files."""
    pid = server.process.pid
    return memory_of(pid)["RSS"], counts_of(pid)["open files"]


def measure(binaries: pathlib.Path, rotations: int, work: pathlib.Path) -> dict:
    """Returns the result of `rotations` certificates that are served, and as many that are replaced at once."""
    authority = Authority(work)
    live = (work / "live.pem", work / "live.key")
    install(authority.issue("first"), live)
    model = ModelFolder.write(work, vocab=1003, hidden=64)
    options = ("--model", str(model.path), "--tls-cert", str(live[0]), "--tls-key", str(live[1]))
    with running(ServerProcess(binaries, *options), "logprobd") as server:

        def run(count: int) -> Rotation:
            return rotate(server, authority, live, count=count, await_every=AWAIT_EVERY)

        idle_files = footprint(server)[1]

        def settled_footprint() -> tuple[float, float]:
            server.eventually(lambda: footprint(server)[1] <= idle_files, SETTLES_WITHIN_S)
            return footprint(server)

        run(WARM_UP)
        memory_before, files_before = settled_footprint()
        begin = time.monotonic()
        rotation = run(rotations * AWAIT_EVERY)
        seconds = time.monotonic() - begin
        memory_after, files_after = settled_footprint()
        reloads = {
            name: server.metric("logprobd_tls_reloads_total", result=name)
            for name in ("ok", "failed")
        }
    return {
        "seconds": round(seconds),
        "rotations": rotations,
        "installed": rotation.installed,
        "served": rotation.served,
        "reloads": reloads,
        "calls": sum(rotation.calls),
        "failed_calls": len(rotation.failures),
        "first_failure": next(iter(rotation.failures), ""),
        "resident_mib_before": round(memory_before, 1),
        "resident_mib_after": round(memory_after, 1),
        "open_files_before": files_before,
        "open_files_after": files_after,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    suite_result.add_arguments(parser)
    parser.add_argument(
        "--rotations", type=int, default=1000, help="certificates that are served; default: 1000"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="logprobd_certificates_") as work:
        result = measure(args.bin_dir, args.rotations, pathlib.Path(work))
    return suite_result.write(result, problems(result), args)


if __name__ == "__main__":
    sys.exit(main())
