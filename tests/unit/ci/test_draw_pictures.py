"""The pictures of ARCHITECTURE.md are drawn from its comments by .ci/draw_pictures.py, and are up to date."""

import pathlib
import subprocess
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[3]
DOCUMENT = """# Parts

<!-- picture: parts.svg
one: sends a < b | two: receives
_ | three: ends
one -> two
one -> three: a note
-->
"""


def draw(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / ".ci" / "draw_pictures.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_pictures_of_this_repository_are_up_to_date() -> None:
    assert draw("--check").stderr == ""


def test_a_picture_has_its_boxes_arrows_and_texts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ARCHITECTURE.md").write_text(DOCUMENT)

    assert draw(tmp_path).returncode == 0

    picture = xml.etree.ElementTree.parse(tmp_path / "parts.svg")
    texts = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    arrows = [
        node.get("points").split() for node in picture.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert texts == ["one", "sends a < b", "two", "receives", "three", "ends", "a note"]
    assert [len(points) for points in arrows] == [2, 3]  # straight, and around a corner


def test_a_picture_that_is_missing_or_differs_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ARCHITECTURE.md").write_text(DOCUMENT)
    assert "parts.svg is out of date" in draw("--check", tmp_path).stderr
    draw(tmp_path)
    assert draw("--check", tmp_path).returncode == 0

    (tmp_path / "ARCHITECTURE.md").write_text(DOCUMENT.replace("receives", "waits"))

    assert "parts.svg is out of date" in draw("--check", tmp_path).stderr
