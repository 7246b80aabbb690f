#!/usr/bin/env python3
"""Checks that commit messages have an imperative subject of at most 72 characters, a blank line and then the body.

    python3 .ci/check_commit_message.py FILE           checks the message in a file (hook commit-msg)
    python3 .ci/check_commit_message.py --since REV    checks the messages of all commits after REV except merges

Prints each rule that a message violates. Exits with 1 if there is one.
"""

import pathlib
import re
import subprocess
import sys

SUBJECT_MAX = 72
# Imperatives that end in -s, -ed or -ing.
IMPERATIVES = {
    "access", "address", "bring", "bypass", "compress", "cross", "discuss", "embed", "exceed", "express",
    "feed", "need", "pass", "press", "process", "proceed", "seed", "shed", "speed", "stress", "string",
    "suppress", "focus", "canvas", "bus", "witness",
}  # fmt: skip
NOT_VERBS = {
    "a",
    "an",
    "the",
    "this",
    "that",
    "these",
    "those",
    "it",
    "we",
    "i",
    "some",
    "all",
    "each",
    "no",
}


def problems(message: str) -> list[str]:
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if re.match(r"(fixup|squash)! |Merge |Revert ", subject):
        return []
    found = []
    if not subject.strip():
        return ["the subject is empty"]
    if len(subject) > SUBJECT_MAX:
        found.append(
            f"the subject has {len(subject)} characters, at most {SUBJECT_MAX} are allowed; move details to the body"
        )
    if subject.endswith("."):
        found.append("the subject ends with a full stop; remove it")
    first = subject.split()[0].strip(":,;")
    if not first[0].isupper():
        found.append(f"the subject starts with '{first}' in lower case; capitalize it")
    word = first.lower()
    is_other_form = re.search(r"(ed|ing|[^s]s)$", word) is not None and word not in IMPERATIVES
    if word in NOT_VERBS or is_other_form:
        found.append(
            f"the subject starts with '{first}'; use the imperative, as in 'Add', 'Fix', 'Rename'"
        )
    if len(lines) > 1 and lines[1].strip():
        found.append("the second line is not blank; put a blank line after the subject")
    return found


def messages(arguments: list[str]) -> dict[str, str]:
    if len(arguments) == 2 and arguments[0] == "--since":
        log = subprocess.run(
            ["git", "log", "--no-merges", "--format=%h%x00%B%x01", f"{arguments[1]}..HEAD"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        entries = [entry.strip("\n").split("\0") for entry in log.split("\1") if entry.strip()]
        return {commit: text for commit, text in entries}
    if len(arguments) == 1 and not arguments[0].startswith("-"):
        return {"message": pathlib.Path(arguments[0]).read_text()}
    sys.exit(__doc__)


def main() -> int:
    broken = 0
    for name, text in messages(sys.argv[1:]).items():
        for problem in problems(text):
            broken += 1
            print(f"{name}: {problem}: {text.splitlines()[0] if text else ''}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
