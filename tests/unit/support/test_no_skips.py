"""The plugin no_skips fails what pytest would skip."""

import os
import subprocess
import sys

import pytest

CASES = {
    "a test": "import pytest\ndef test_a(): pytest.skip('no operator')",
    "a fixture": "import pytest\n@pytest.fixture\ndef f(): pytest.skip('no operator')\ndef test_a(f): pass",
    "a module": "import pytest\npytest.skip('no operator', allow_module_level=True)",
    "a missing package": "import pytest\ndef test_a(): pytest.importorskip('no_such_module', reason='no operator')",
}


def run(folder, repository, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_case.py").write_text(text)
    path = str(repository / "tests" / "support" / "python")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "test_case.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_skip_is_a_failure_with_its_reason(tmp_path, repository, name) -> None:
    done = run(tmp_path, repository, CASES[name], "-p", "no_skips")

    assert done.returncode != 0
    assert "no operator: nothing may be skipped here" in done.stdout, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_without_the_plugin_it_is_skipped(tmp_path, repository) -> None:
    done = run(tmp_path, repository, CASES["a fixture"])

    assert done.returncode == 0 and "1 skipped" in done.stdout


def test_tests_that_pass_or_are_expected_to_fail_stay_as_they_are(tmp_path, repository) -> None:
    text = "import pytest\ndef test_a(): pass\n@pytest.mark.xfail\ndef test_b(): assert False"

    done = run(tmp_path, repository, text, "-p", "no_skips")

    assert done.returncode == 0 and "1 passed, 1 xfailed" in done.stdout
