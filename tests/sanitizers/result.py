"""Prints the result of tests/sanitize.sh as JSON and as one line for each suite: result.py RESULTS PRESET...

RESULTS is the folder of the suites' JUnit files, PRESET-SUITE.xml, and of the sanitizers' reports, PRESET-reports.
Exits with 1 if a test failed, a sanitizer reported something, or a suite has no test.
"""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree


def processor() -> str:
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return found[1] if found else "unknown"


def suite(path: pathlib.Path) -> dict:
    """Returns the numbers of tests of a JUnit file, and the names of those that failed."""
    cases = list(xml.etree.ElementTree.parse(path).iter("testcase"))
    # CTest writes a test that did not run as a failure with this status.
    failed = [
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
        "failures": failed,
    }


def is_report(path: pathlib.Path) -> bool:
    """Returns whether a sanitizer's file tells more than that it refused to allocate what a test asked for."""
    refused = "WARNING: AddressSanitizer failed to allocate"
    return any(refused not in line for line in path.read_text(errors="replace").splitlines())


def result(folder: pathlib.Path, presets: list[str]) -> dict:
    """Returns the suites of each preset, and the number of its sanitizers' reports."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit or "unknown",
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "presets": {
            preset: {
                "suites": {
                    path.stem.removeprefix(f"{preset}-"): suite(path)
                    for path in sorted(folder.glob(f"{preset}-*.xml"))
                },
                "reports": sum(map(is_report, (folder / f"{preset}-reports").glob("*"))),
            }
            for preset in presets
        },
    }


def is_clean(found: dict) -> bool:
    """Returns whether every preset ran tests, none of which failed, and has no report."""
    return all(
        preset["reports"] == 0
        and preset["suites"]
        and all(suite["failed"] == 0 and suite["passed"] > 0 for suite in preset["suites"].values())
        for preset in found["presets"].values()
    )


def main() -> int:
    folder, presets = pathlib.Path(sys.argv[1]), sys.argv[2:]
    found = result(folder, presets)
    (folder / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    for name, preset in found["presets"].items():
        for title, tests in preset["suites"].items():
            counts = (
                f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
            )
            print(f"{name:5} {title:12} {counts}")
            for failure in tests["failures"]:
                print(f"      failed: {failure}")
        print(f"{name:5} {preset['reports']} reports in {folder / f'{name}-reports'}")
    return 0 if is_clean(found) else 1


if __name__ == "__main__":
    sys.exit(main())
