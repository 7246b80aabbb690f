#!/usr/bin/env python3
"""Checks two rules of C++ style that neither clang-format 14 nor clang-tidy 14 knows in every file.

Usage: check_style.py [ROOT]. Prints each line that breaks a rule. Exits with 1 if there is one.

- The body of an if, else, for or while has braces, also if it is one line. (clang-tidy's
  readability-braces-around-statements does not see CUDA's host files in a build without CUDA.)
- A lock that is held to the end of its scope is const: `const absl::MutexLock lock(&mutex_)`.
"""

import pathlib
import re
import sys

# Folders that keep the rules.
FOLDERS = ["server"]
# Files of these folders that do not keep the braces yet.
NOT_YET = {"server/base/outputs.h"}

CONDITION = re.compile(r"^\s*(?:\} )?(?:else )?(?:if|for|while)(?: constexpr)? (?=\()")
ELSE = re.compile(r"^\s*(?:\} )?else (?!if\b)[^{]*;")
LOCK = re.compile(r"^\s+absl::(?:Reader|Writer)?MutexLock \w+\(")


def after_condition(text: str) -> str | None:
    """Returns what follows the condition of the statement that `text` begins with, or None if it does not end."""
    depth = 0
    quote = ""
    skip = False
    for index, char in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char == '"' or (char == "'" and not text[index - 1].isalnum()):
            quote = char
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return text[index + 1 :].strip()
    return None


def problems_of(text: str) -> list[tuple[int, str]]:
    """Returns the number and the fault of each line that breaks a rule."""
    lines = text.splitlines()
    problems = []
    for number, line in enumerate(lines, 1):
        if LOCK.match(line):
            problems.append((number, "a lock of a whole scope is const"))
        match = CONDITION.match(line)
        if match:
            rest = after_condition("\n".join(lines[number - 1 : number + 19])[match.end() :])
            is_end_of_do = line.lstrip().startswith("} while")
            if rest is not None and not rest.startswith("{") and not is_end_of_do:
                problems.append((number, "the body has no braces"))
        elif ELSE.match(line):
            problems.append((number, "the body has no braces"))
    return problems


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1])
    problems = [
        f"{path.relative_to(root)}:{number}: {fault}"
        for folder in FOLDERS
        for path in sorted((root / folder).glob("**/*"))
        if path.suffix in {".h", ".cc", ".inc"} and path.relative_to(root).as_posix() not in NOT_YET
        for number, fault in problems_of(path.read_text())
    ]
    print("\n".join(problems) if problems else "style: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
