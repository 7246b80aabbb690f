"""Runs a short soak, whose checks must pass on this server and detect a server that leaks."""

import json
import pathlib
import subprocess
import sys

SOAK = pathlib.Path(__file__).resolve().parents[1] / "soak" / "soak.py"


def test_memory_does_not_grow_and_a_leak_is_detected(
    binaries: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "soak.json"
    run = [
        "--bin-dir",
        binaries,
        "--out",
        out,
        "--commit",
        "abc",
        "--hidden",
        "64",
        "--rows",
        "128",
    ]
    length = ["--minutes", "0.18", "--control-minutes", "0.18", "--sample-every-s", "0.25"]
    # A server grows until it settles after minutes. A leak of 64 KiB per message exceeds that growth in seconds.
    check = ["--resolution-factor", "6", "--leak-bytes", "65536", "--kill-every-s", "3"]

    done = subprocess.run(
        [sys.executable, SOAK, *run, *length, *check, "--processes", "2"],
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stderr
    notes = {
        entry["what"].split(": ")[-1]: entry["note"] for entry in json.loads(out.read_text())[:-1]
    }
    control = json.loads(out.read_text())[-1]
    assert set(notes) >= {"RSS", "anonymous memory", "open files", "threads"}
    assert all(note.startswith("zero within noise") for note in notes.values())
    assert "with a leak of 65536 bytes" in control["what"]
    assert control["note"].startswith("grows")
