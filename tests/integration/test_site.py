"""The documentation site is built without warnings, describes the whole API, and has no link without a target."""

import ast
import filecmp
import html
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
from scoring_rpc import ROOT

PROTO = ROOT / "proto"
PACKAGES = (
    ROOT / "client" / "python" / "logprobd",
    ROOT / "kernels" / "torch_ops" / "python" / "logprobd_ops",
)
# Faults of a document, and the warnings that they cause.
FAULTS = {
    "[a document](missing.md)": "a link 'missing.md', but the target is not found",
    "[a file](server/missing.cc)": "a link 'server/missing.cc', but the target is not found",
    "[an anchor](SECURITY.md#missing)": "'SECURITY.md' does not contain an anchor '#missing'",
    "A list:\n* right after a line": "README.md: MkDocs does not read this as an item or a row: * right",
    "* An item\n  1. in an item": "README.md: MkDocs reads this differently from GitHub:   1. in an item",
}


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", root / "deploy" / "site" / "build.sh", out],
        env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder


def listed_files(*patterns: str) -> list[Path]:
    """Returns the files of the repository, without those that git ignores."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in map(Path, listed.stdout.splitlines()) if (ROOT / path).is_file()]


def anchors(page: Path) -> set[str]:
    return {html.unescape(name) for name in re.findall(r'\bid="([^"]*)"', page.read_text())}


def test_every_document_has_a_page(site):
    for path in listed_files("*.md", ":!deploy/site/pages"):
        name = "index" if path.stem == "README" else path.stem
        assert (site / path.parent / f"{name}.html").is_file(), path


@pytest.mark.parametrize("path", sorted(PROTO.glob("**/*.proto")), ids=lambda path: path.name)
def test_the_page_of_a_proto_file_has_all_its_names(site, path):
    page = site / "proto" / path.relative_to(PROTO).with_suffix(".proto.html")
    text = path.read_text()
    names = re.findall(r"^(?:message|enum|service) (\w+)", text, re.MULTILINE)
    fields = re.findall(r"^  +(?:[\w.]+ )*(\w+) = \d+;", text, re.MULTILINE)

    assert len(names) >= 7
    assert set(names) <= anchors(page)
    assert len(fields) >= 15
    assert set(fields) <= set(re.findall(r"<strong>(\w+)</strong> = \d", page.read_text()))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_public_name_of_a_python_package_is_described(site, package):
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((package / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    described = {name.rpartition(".")[2] for name in anchors(site / f"{package.name}.html")}

    assert len(names) >= 10
    assert set(names) <= described


def test_score_is_described_with_the_arguments_that_callers_pass(site):
    text = (site / "logprobd.html").read_text()
    for client in ("Client", "AsyncClient"):
        begin = text.index(f'id="logprobd.{client}.score"')
        score = text[begin : text.index(f'id="logprobd.{client}.score_stream"')]
        assert "entropy_temperature" in score
        assert "number of best ids to return for each row" in score


def test_every_link_of_the_site_has_a_target_in_it(site):
    pages = {page: anchors(page) for page in site.glob("**/*.html") if page.name != "404.html"}
    count = 0
    for page in pages:
        for tag, link in re.findall(r'<(\w+)[^<>]*\b(?:href|src)="([^"]+)"', page.read_text()):
            if "://" in link:
                assert tag == "a", f"{page.relative_to(site)} loads {link}"
                continue
            name, _, anchor = unquote(html.unescape(link)).partition("#")
            target = Path(os.path.normpath(page.parent / name)) if name else page
            assert tag != "img" or target.suffix != ".html", (
                f"{page.relative_to(site)} shows {link}"
            )
            assert target.is_file(), f"{page.relative_to(site)}: {link}"
            assert not anchor or anchor in pages[target], f"{page.relative_to(site)}: {link}"
            count += 1
    assert count > 1000


@pytest.mark.release
def test_two_builds_have_the_same_bytes(site, tmp_path):
    assert build(ROOT, tmp_path / "again").returncode == 0

    files = {path.relative_to(site) for path in site.glob("**/*") if path.is_file()}
    again = tmp_path / "again"
    assert files == {path.relative_to(again) for path in again.glob("**/*") if path.is_file()}
    assert filecmp.cmpfiles(site, again, files, shallow=False)[0] == list(files)


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "mine").write_text("")

    done = build(ROOT, tmp_path)

    assert done.returncode == 1
    assert "has files, but not those of a site" in done.stderr
    assert (tmp_path / "mine").exists()


@pytest.fixture(scope="module")
def failed_build(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """A build of a copy of the repository whose README has all faults. It shares the installed tools."""
    copy = tmp_path_factory.mktemp("copy")
    for path in listed_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy / path)
    (copy / "build").symlink_to(ROOT / "build")
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    with (copy / "README.md").open("a") as readme:
        readme.writelines(f"\n{fault}\n" for fault in FAULTS)
    return build(copy, copy / "site")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_document_fails_the_build(failed_build, fault):
    assert failed_build.returncode == 1
    assert FAULTS[fault] in failed_build.stderr


def test_only_the_faults_cause_warnings(failed_build):
    assert failed_build.stderr.count("WARNING") == len(FAULTS)
