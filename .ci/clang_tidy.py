#!/usr/bin/env python3
"""Runs clang-tidy on the host C++ files and caches which ones are clean.

    python3 .ci/clang_tidy.py [--build build/release] [FILE...]    default: all .cc files of kernels, server and client

A file's result is cached by a hash of everything that clang-tidy reads for it: the tool's version, .clang-tidy,
the compile command, and the contents of the file and of all headers that it includes (as ninja recorded them in the
last build). So a file is checked again only if one of these changes. The cache is in the user's cache folder
(XDG_CACHE_HOME, by default ~/.cache) and is shared by all clones.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = pathlib.Path(
    os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"), "logprobd", "clang-tidy"
)
KEEP_SECONDS = 30 * 24 * 3600
OBJECT = re.compile(r" -o (\S+)")


@functools.cache
def content_hash(path: str) -> str:
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:
        return "missing"


def recorded_includes(build: pathlib.Path) -> dict[str, list[str]]:
    """Returns the files that each object was built from, by the object's path within the build folder."""
    text = subprocess.run(
        ["ninja", "-C", build, "-t", "deps"], check=True, capture_output=True, text=True
    ).stdout
    includes: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            current.append(os.path.normpath(build / line.strip()))
        elif ": #deps" in line:
            # The list of a stale entry may lack a header that was included since; it is not used.
            current = []
            if line.endswith("(VALID)"):
                includes[line.split(": #deps")[0]] = current
    return includes


def cache_key(entry: dict[str, str], includes: list[str], tool: str) -> str:
    digest = hashlib.sha256(tool.encode())
    digest.update(content_hash(str(ROOT / ".clang-tidy")).encode())
    digest.update(entry["command"].replace(str(ROOT), ".").encode())
    # The root is cut before the sorting: where a clone lies must not change the order.
    paths = {path.replace(str(ROOT), "."): path for path in {entry["file"], *includes}}
    for name in sorted(paths):
        digest.update(f"{name} {content_hash(paths[name])}\n".encode())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("files", nargs="*", help="files to check, relative to the repository root")
    arguments = parser.parse_args()

    tool = shutil.which("clang-tidy-14") or shutil.which("clang-tidy")
    if tool is None:
        sys.exit("clang_tidy.py: error: clang-tidy was not found; install clang-tidy-14")
    version = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True).stdout
    build = arguments.build.resolve()
    wanted = arguments.files or subprocess.run(
        ["git", "ls-files", "kernels/*.cc", "server/*.cc", "client/*.cc"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    database = build / "compile_commands.json"
    if not database.exists():
        sys.exit(
            f"clang_tidy.py: error: no {database}; run bash tests/run.sh --build, which creates it"
        )
    commands = {entry["file"]: entry for entry in json.loads(database.read_text())}
    # A file that this configuration does not compile (the CUDA engine without CUDA) has no command.
    unbuilt = [file for file in wanted if str(ROOT / file) not in commands]
    if unbuilt and arguments.files:
        sys.exit(f"clang_tidy.py: error: this build does not compile {', '.join(unbuilt)}")
    entries = [commands[str(ROOT / file)] for file in wanted if file not in unbuilt]
    includes = recorded_includes(build)

    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.iterdir():
        if time.time() - old.stat().st_mtime > KEEP_SECONDS:
            old.unlink(missing_ok=True)

    def check(entry: dict[str, str]) -> str | None:
        """Returns the tool's output, an empty text for a clean file, or None if the cache records the file as clean."""
        recorded = includes.get(OBJECT.search(entry["command"])[1])
        key = CACHE / cache_key(entry, recorded, version) if recorded is not None else None
        if key is not None and key.exists():
            key.touch()
            return None
        run = subprocess.run(
            [tool, "-p", str(build), "--quiet", entry["file"]],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            return run.stdout + run.stderr
        if key is not None:
            key.touch()
        return ""

    started = time.monotonic()
    num_cached = num_failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for complaints in pool.map(check, entries):
            num_cached += complaints is None
            if complaints:
                num_failed += 1
                print(complaints, flush=True)
    seconds = time.monotonic() - started
    print(
        f"clang-tidy: {len(entries)} files, {num_cached} cached, {num_failed} with warnings,"
        f" {len(unbuilt)} not compiled by this build, {seconds:.0f} s"
    )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
