"""The packages of the newer gRPC are fetched by their hashes, and what has changed is named."""

import datetime
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[4]
SCRIPT = ROOT / "deploy" / "newer_grpc" / "packages.py"
spec = importlib.util.spec_from_file_location("newer_grpc_packages", SCRIPT)
packages = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = packages
spec.loader.exec_module(packages)
Pin = packages.Pin
DAY = datetime.date(2026, 11, 28)

# Lists and copies the packages of the folder SUITE, like apt-get with a mirror of Debian.
APT_GET = """#!/bin/bash
set -e
echo "$*" >>"$SUITE/calls"
case "$*" in
  "update --print-uris")
    . /etc/os-release
    echo "'http://mirror.test/debian/dists/$VERSION_CODENAME/InRelease' x 0 " ;;
  update*) ;;
  install*)
    for file in "$SUITE"/*.deb; do
      name=$(basename "$file")
      echo "'http://mirror.test/$name' $name 1 SHA256:0"
    done ;;
  download*)
    shift 2
    for each in "$@"; do cp "$SUITE/${each%%=*}_${each#*=}_amd64.deb" .; done ;;
esac
"""


class Suite:
    """A folder that stands for Debian's suites."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, package: str, version: str, text: str = "") -> Pin:
        root = self.folder / "root"
        (root / "DEBIAN").mkdir(parents=True, exist_ok=True)
        (root / "DEBIAN" / "control").write_text(
            f"Package: {package}\nVersion: {version}\nArchitecture: amd64\n"
            f"Maintainer: test <test@example.com>\nDescription: test {text}\n"
        )
        file = self.folder / f"{package}_{version}_amd64.deb"
        subprocess.run(["dpkg-deb", "-b", root, file], check=True, capture_output=True)
        return packages.pin_of(file)

    def remove(self, pin: Pin) -> None:
        (self.folder / f"{pin.package}_{pin.version}_amd64.deb").unlink()

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def suite(tmp_path, monkeypatch) -> Suite:
    suite = Suite(tmp_path / "suite")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "apt-get").write_text(APT_GET)
    (programs / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SUITE", str(suite.folder))
    return suite


@pytest.fixture
def apt(tmp_path) -> "packages.Apt":
    (tmp_path / "apt").mkdir()
    return packages.Apt(tmp_path / "apt")


def held(folder: pathlib.Path) -> set[Pin]:
    return {packages.pin_of(file) for file in folder.glob("*.deb")}


def test_pinned_packages_are_fetched_once(suite, apt, tmp_path):
    pins = [suite.add("libgrpc-dev", "1.83"), suite.add("libabsl-dev", "20260526")]
    folder = tmp_path / "kept"

    assert packages.fetch(folder, apt, pins, only_pinned=True) == sorted(pins)
    calls = len(suite.calls)
    assert packages.fetch(folder, apt, pins, only_pinned=True) == sorted(pins)

    assert held(folder) == set(pins)
    assert len(suite.calls) == calls


def test_kept_packages_serve_when_the_suites_have_newer_ones(suite, apt, tmp_path):
    old = suite.add("libgrpc-dev", "1.83")
    folder = tmp_path / "kept"
    packages.fetch(folder, apt, [old], only_pinned=True)
    suite.remove(old)
    suite.add("libgrpc-dev", "1.84")

    assert packages.fetch(folder, apt, [old], only_pinned=False) == [old]


def test_the_newest_packages_replace_a_pinned_one_that_is_gone(suite, apt, tmp_path, capsys):
    old, absl = suite.add("libgrpc-dev", "1.83"), suite.add("libabsl-dev", "20260526")
    suite.remove(old)
    new, other = suite.add("libgrpc-dev", "1.84"), suite.add("libgrpc57", "1.84")
    gone = Pin("libgrpc56", "1.83", "0" * 64)
    folder = tmp_path / "kept"

    taken = packages.fetch(folder, apt, [old, absl, gone], only_pinned=False)

    assert taken == sorted([new, absl, other])
    assert held(folder) == set(taken)
    assert capsys.readouterr().out.splitlines() == [
        "gone: libgrpc-dev 1.83, libgrpc56 1.83; taking the newest of all packages instead",
        f"differs: libgrpc-dev 1.84 {new.sha256}",
        f" pinned: libgrpc-dev 1.83 {old.sha256}",
        f"not pinned: libgrpc57 1.84 {other.sha256}",
        "no longer needed: libgrpc56",
    ]


def test_a_package_with_another_hash_is_not_taken_for_the_pinned_one(suite, apt, tmp_path):
    pin = suite.add("libgrpc-dev", "1.83")
    suite.add("libgrpc-dev", "1.83", "changed")

    with pytest.raises(SystemExit, match=r"these pinned packages: libgrpc-dev 1\.83"):
        packages.fetch(tmp_path / "kept", apt, [pin], only_pinned=True)


def test_a_file_that_was_changed_after_it_was_fetched_is_fetched_again(suite, apt, tmp_path):
    pin = suite.add("libgrpc-dev", "1.83")
    folder = tmp_path / "kept"
    packages.fetch(folder, apt, [pin], only_pinned=True)
    suite_file, (file,) = suite.folder / "libgrpc-dev_1.83_amd64.deb", folder.glob("*.deb")
    right = suite_file.read_bytes()
    suite.add("libgrpc-dev", "1.83", "changed")
    file.write_bytes(suite_file.read_bytes())
    suite_file.write_bytes(right)

    assert packages.fetch(folder, apt, [pin], only_pinned=True) == [pin]

    assert held(folder) == {pin}


def test_packages_of_the_system_s_own_c_library_are_left_out(suite, apt):
    for name in ("libc6-dev", "linux-libc-dev", "pkgconf", "libpkgconf7", "libc6"):
        suite.add(name, "1")

    assert apt.newest() == {"libc6": "1"}


def test_the_check_names_what_is_old_or_replaced():
    pins = [Pin(f"{each}-dev", "1", "") for each in "abc"] + [Pin("program", "1", "")]
    newest = {"a-dev": "1", "b-dev": "2", "d-dev": "1", "program": "2", "other": "1"}

    fresh = packages.findings(DAY, pins, DAY + datetime.timedelta(days=90), newest)
    old = packages.findings(DAY, pins[:1], DAY + datetime.timedelta(days=91), {"a-dev": "1"})

    assert fresh == [
        "b-dev 1 is replaced by 2",
        "c-dev 1 is no longer needed",
        "d-dev is needed and not pinned",
    ]
    assert old == ["the pins are 91 days old, more than 90"]


def test_the_committed_pins_are_complete():
    day, pins = packages.read_pins()

    assert day <= datetime.datetime.now(datetime.UTC).date()
    assert {"libgrpc++-dev", "libprotobuf-dev", "libabsl-dev", "libssl-dev"} <= {
        pin.package for pin in pins
    }
    assert len({pin.package for pin in pins}) == len(pins)
    assert all(len(pin.sha256) == 64 for pin in pins)
