"""C++ has one style of braces and locks, and .ci/check_style.py finds and mends what breaks it."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def run(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / ".ci" / "check_style.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def source(folder: pathlib.Path, body: str) -> pathlib.Path:
    path = folder / "clock.cc"
    path.write_text(f"void F() {{\n{body}\n}}\n")
    return path


def test_the_sources_of_this_repository_pass() -> None:
    assert run().stdout == "style: ok\n"


@pytest.mark.parametrize(
    "body, fault",
    [
        ("  if (a) {\n    return;\n  }", "braces around a body that fits"),
        ("  for (int i : all) {\n    Add(i);\n  }", "braces around a body that fits"),
        ("  for (int i : all)\n    Add(i);", "has no braces"),
        ("  } else\n    Stop();", "has no braces"),
        ("  absl::MutexLock lock(&mutex_);", "not const"),
    ],
)
def test_a_line_that_breaks_the_style_is_found(
    tmp_path: pathlib.Path, body: str, fault: str
) -> None:
    done = run(source(tmp_path, body))

    assert fault in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    "body",
    [
        "  if (a) return;",
        "  if (a &&\n      b) {\n    return;\n  }",
        f"  if ({'a' * 80}) {{\n    return Something();\n  }}",
        "  if (a) {\n    return;\n  } else {\n    Stop();\n  }",
        "  if (a) {\n    for (int i : all) Add(i);\n  }",
        "  if (a) {\n    Stop();  // why\n  }",
        "  if (a) {\n    LOGPROBD_RETURN_IF_ERROR(Stop());\n  }",
        "  do {\n    Add(1);\n  } while (a);",
        "  const absl::MutexLock lock(&mutex_);",
    ],
)
def test_what_needs_braces_or_has_none_passes(tmp_path: pathlib.Path, body: str) -> None:
    assert run(source(tmp_path, body)).stdout == "style: ok\n"


def test_fix_joins_a_body_with_its_condition(tmp_path: pathlib.Path) -> None:
    path = source(tmp_path, "  if (a) {\n    return;\n  }")

    run("--fix", path)

    assert path.read_text() == "void F() {\n  if (a) return;\n}\n"
