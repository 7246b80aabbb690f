"""C++ tests take their files and sockets from TempFolder: ctest runs them at the same time."""

import re


def test_no_test_names_a_path_in_the_shared_folder(repository):
    # Regression: two tests of one program listened on the same socket, and failed when they met.
    names_a_path = re.compile(r"\bTempDir\(\)|\bmkdtemp\(")
    files = [f for f in (repository / "tests").rglob("*") if f.suffix in {".cc", ".h", ".cu"}]
    assert len(files) > 100
    found = [
        str(f) for f in files if names_a_path.search(f.read_text()) and f.name != "temp_folder.h"
    ]
    assert not found, "use TempFolder of tests/support/temp_folder.h"
