#!/usr/bin/env python3
"""Checks rules of C++ style that neither clang-format 14 nor clang-tidy 14 checks in every file.

Usage: check_style.py [--fix] [FILE...]. Prints each line that breaks a rule; exits with 1 if there is one. --fix
mends braces. By default all files of server, client and kernels are checked.

- The body of an if or a loop without else stands on the same line, without braces, if it is one statement that fits;
  any other body has braces.
- A lock that is held to the end of its scope is const: `const absl::MutexLock lock(&mutex_)`.
"""

import argparse
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
COLUMNS_MAX = 100
HEAD = re.compile(r"(\s*)(?:\} )?((?:else )?(?:if(?: constexpr)?|for|while) \(.*\)|else)")
LOCK = re.compile(r"\s+absl::(?:Reader|Writer)?MutexLock \w+\(")
# A macro may be several statements; a nested statement and a comment need lines of their own.
NO_BODY = re.compile(r"\s*([A-Z_]+\(|//|\}|(if|for|while|do|switch|else)\b)|.*//")


def one_line(lines: list[str]) -> str | None:
    """Returns the first three lines as one without braces, or None where they need them."""
    first, body, last = (*lines, "", "", "")[:3]
    head = HEAD.match(first)
    if head is None or first != head[0] + " {" or head[2].startswith("else") or "} " in head[0]:
        return None
    if last != head[1] + "}" or NO_BODY.match(body) or not body.endswith(";"):
        return None
    joined = f"{head[0]} {body.strip()}"
    balanced = head[0].count("(") == head[0].count(")")
    return joined if balanced and len(joined) <= COLUMNS_MAX else None


def check(path: pathlib.Path, fix: bool) -> list[str]:
    lines, problems, number = path.read_text().split("\n"), [], 0
    while number < len(lines):
        joined = one_line(lines[number : number + 3])
        if joined is not None and fix:
            lines[number : number + 3] = [joined]
        elif joined is not None:
            problems.append(f"{path}:{number + 1}: braces around a body that fits on the line")
        head = HEAD.match(lines[number])
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        if head and head[0] == lines[number] and following[:1] not in ("", "{", "&", "|", "?", "/"):
            problems.append(f"{path}:{number + 1}: a body on a line of its own has no braces")
        if LOCK.match(lines[number]):
            problems.append(f"{path}:{number + 1}: a lock of a whole scope is not const")
        number += 1
    if fix:
        path.write_text("\n".join(lines))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fix", action="store_true", help="write bodies that fit on one line")
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    command = ["git", "ls-files", "-co", "--exclude-standard", "server", "client", "kernels"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = [ROOT / name for name in listed.split() if name.endswith((".h", ".cc", ".cu", ".cuh"))]
    problems = [
        problem
        for path in arguments.files or found
        if path.exists()
        for problem in check(path, arguments.fix)
    ]
    print("\n".join(problems) if problems else "style: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
