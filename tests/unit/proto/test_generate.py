"""proto/generate.py writes the regions of source files that follow from the proto files and contract.json."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "proto" / "generate.py"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    module = sys.modules["generate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_regions_are_current():
    check = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)

    assert (check.returncode, check.stdout) == (0, "")


@pytest.mark.parametrize("comment", ["// {}", "# {}", "<!-- {} -->"])
def test_only_the_lines_of_a_region_are_replaced(generate, comment):
    begin, end = comment.format("[generated: output_names]"), comment.format("[end]")

    text = generate.written(f"before\n  {begin}\n  stale\n  {end}\nafter\n")

    lines = text.splitlines()
    assert lines[:3] == ["before", f"  {begin}", '  "logprob",']
    assert lines[-2:] == [f"  {end}", "after"]
    assert "  stale" not in lines


def test_an_unknown_region_is_an_error(generate):
    with pytest.raises(KeyError, match="nonsense"):
        generate.written("# [generated: nonsense]\n# [end]\n")


def test_a_score_with_a_value_per_row_needs_an_output(generate):
    score = generate.Field("", "bytes", "nobody_returns_it", 99, "f32 [rows]: a score.")

    with pytest.raises(SystemExit, match="nobody_returns_it"):
        generate.outputs_of(score)


def test_a_line_that_is_not_understood_is_an_error(generate):
    with pytest.raises(SystemExit, match="in Strange: map"):
        list(generate.blocks_of("message Strange {\n  map<string, int32> names = 1;\n}\n"))


def test_a_request_field_that_no_rule_reads_is_an_error(generate):
    for each, message in [
        (generate.Field("", "string", "name", 20, "a text."), "parsed_by_hand"),
        (generate.Field("", "float", "factor", 64, "a factor."), "below 64"),
    ]:
        with pytest.raises(SystemExit, match=message):
            generate.request_member(each)


def test_the_readme_explains_every_score(generate):
    readme = (ROOT / "README.md").read_text()

    assert [score.name for score in generate.SCORES if f"`{score.name}`" not in readme] == []
