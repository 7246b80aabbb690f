"""Documents have lines that fit a screen, and .ci/check_documents.py finds and wraps those that do not."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
WORDS = " ".join(["seven77"] * 20)  # 159 columns
ENTRY = "# Decisions\n\n## 7. A choice\n" + "* a line\n" * 8


def check(folder: pathlib.Path, *options: str, **documents: str) -> str:
    """Returns what the check says about a repository of these documents, without their ending."""
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    for name, text in documents.items():
        (folder / f"{name}.md").write_text(text)
    return run(*options, str(folder))


def run(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / ".ci" / "check_documents.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (done.stderr == "")
    return done.stderr


def test_the_documents_of_this_repository_pass() -> None:
    assert run() == ""


def test_a_prose_line_above_140_columns_is_named(tmp_path: pathlib.Path) -> None:
    assert check(tmp_path, A="x " * 70 + "\n") == ""  # 139 columns and a space
    assert "A.md:3: 141 columns, at most 140" in check(tmp_path, A="\n\n" + "x" * 141 + "\n")


def test_tables_code_headings_and_comments_may_be_wider(tmp_path: pathlib.Path) -> None:
    comments = [f"<!-- {WORDS} -->", f"<!-- one\n{WORDS}\n-->"]
    wide = [f"# {WORDS}", f"| {WORDS} |", *comments, f"```\n{WORDS}\n```", f"    {WORDS}"]

    assert check(tmp_path, A="\n\n".join(wide)) == ""


def test_wrapping_keeps_items_code_and_narrow_paragraphs(tmp_path: pathlib.Path) -> None:
    text = f"A narrow\nparagraph.\n\n* {WORDS[:130]} `a b c d e f` 1. two\n* next\n    1. {WORDS}\n"

    assert check(tmp_path, "--fix", A=text) == ""

    assert (tmp_path / "A.md").read_text().splitlines() == [
        "A narrow",
        "paragraph.",
        "",
        f"* {WORDS[:130]}",
        "  `a b c d e f` 1. two",
        "* next",
        f"    1. {WORDS[:127]}",
        f"       {WORDS[128:]}",
    ]


def test_a_line_that_is_wrapped_never_begins_like_an_item(tmp_path: pathlib.Path) -> None:
    check(tmp_path, "--fix", A=f"{WORDS[:135]} 1. - two\n")

    assert "\n1. " not in (tmp_path / "A.md").read_text()
    assert "\n- " not in (tmp_path / "A.md").read_text()


def test_an_entry_of_the_decisions_with_nine_lines_is_named(tmp_path: pathlib.Path) -> None:
    assert check(tmp_path, DECISIONS=ENTRY) == ""
    assert "entry '7. A choice' has 9 lines" in check(tmp_path, DECISIONS=ENTRY + "* a ninth\n")
