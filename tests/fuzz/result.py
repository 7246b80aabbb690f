"""Prints the result of run.sh as JSON: result.py SECONDS TARGET..."""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

BUILD = pathlib.Path("build/fuzz")


def processor() -> str:
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return found[1] if found else "unknown"


def result(target: str) -> dict[str, int]:
    """Reads a target's log. `edges` are the instrumented edges that its inputs reached."""
    log = (BUILD / "logs" / target).read_text()
    executions = re.findall(r"^stat::number_of_executed_units: (\d+)", log, re.MULTILINE)
    edges = re.findall(r"\bcov: (\d+)", log)
    return {
        "executions": int(executions[-1]) if executions else 0,
        "edges": int(edges[-1]) if edges else 0,
        "failures": len(list((BUILD / "found").glob(f"{target}-*"))),
    }


seconds, targets = int(sys.argv[1]), sys.argv[2:]
commit = subprocess.run(
    ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
).stdout.strip()
json.dump(
    {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit or "unknown",
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "seconds_per_target": seconds,
        "targets": {target: result(target) for target in targets},
    },
    sys.stdout,
    indent=2,
)
print()
