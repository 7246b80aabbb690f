#!/usr/bin/env python3
"""Keeps the Debian packages of the newer gRPC: pinned by version and sha256 in packages.tsv.

    packages.py fetch [--pinned] FOLDER   fetches the pinned packages that FOLDER lacks, and lists what lies there
    packages.py check                     names pins that are older than 90 days or that a newer package replaces
    packages.py pin FOLDER                fetches the newest packages and writes packages.tsv anew

fetch takes the suites' newest packages when a pinned one is gone, and says which hashes differ; with --pinned that is
an error. Everything is fetched by apt-get from this machine's mirror of Debian, with an apt configuration of its own,
and nothing is installed.
"""

import argparse
import datetime
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple, NoReturn

PINS = pathlib.Path(__file__).with_name("packages.tsv")
DAYS_MAX = 90
# apt-get finds what these depend on.
ROOTS = (
    "libgrpc++-dev",
    "protobuf-compiler-grpc",
    "libprotobuf-dev",
    "protobuf-compiler",
    "libabsl-dev",
    "libssl-dev",
    "libzstd-dev",
)
# The build uses this system's C library, kernel headers and pkg-config, and no provider of OpenSSL's old ciphers.
NOT_USED = re.compile(
    r"libc6-dev|libc-dev-bin|linux-libc-dev|libc-gconv-modules-extra|openssl-provider-legacy|(lib)?pkgconf.*"
)
# Only gRPC and Protobuf are newer in experimental. Its Abseil and OpenSSL do not fit them.
PREFERENCES = """Package: src:grpc src:protobuf
Pin: release a=experimental
Pin-Priority: 990
"""


class Pin(NamedTuple):
    """A package as a file: its name, version and sha256."""

    package: str
    version: str
    sha256: str


def fail(message: str) -> NoReturn:
    raise SystemExit(f"packages.py: error: {message}")


def read_pins(path: pathlib.Path = PINS) -> tuple[datetime.date, list[Pin]]:
    """Returns the day of the pins, and the pins."""
    first, *lines = path.read_text().splitlines()
    day = re.fullmatch(r"# Pinned on (\d{4}-\d{2}-\d{2})\.", first)
    if day is None:
        fail(f"the first line of {path} is '{first}', not '# Pinned on YYYY-MM-DD.'")
    return datetime.date.fromisoformat(day[1]), [Pin(*line.split("\t")) for line in lines]


def write_pins(path: pathlib.Path, day: datetime.date, pins: list[Pin]) -> None:
    lines = [f"# Pinned on {day}.", *("\t".join(pin) for pin in sorted(pins))]
    path.write_text("\n".join(lines) + "\n")


def pin_of(file: pathlib.Path) -> Pin:
    fields = subprocess.run(
        ["dpkg-deb", "--showformat", "${Package}\t${Version}", "--show", file],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\t")
    return Pin(fields[0], fields[1], hashlib.sha256(file.read_bytes()).hexdigest())


class Apt:
    """apt-get with Debian's unstable and experimental suites, in a folder of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def _configure(self) -> None:
        folder = self._folder
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "preferences").write_text(PREFERENCES)
        (folder / "sources.list").write_text(
            "".join(
                f"deb {self._mirror()} {suite} main\n" for suite in ("unstable", "experimental")
            )
        )
        # The rest of the system's configuration stays in force, such as a proxy. A mirror may be weeks old.
        (folder / "apt.conf").write_text(
            f'Dir::State "{folder}/state";\n'
            f'Dir::State::status "{folder}/status";\n'
            f'Dir::Cache "{folder}/cache";\n'
            f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
            'Dir::Etc::sourceparts "/dev/null";\n'
            f'Dir::Etc::preferences "{folder}/preferences";\n'
            'Dir::Etc::preferencesparts "/dev/null";\n'
            'Acquire::Check-Valid-Until "false";\n'
            'Acquire::Languages "none";\n'
            'APT::Install-Recommends "false";\n'
            'APT::Sandbox::User "root";\n'
        )

    @staticmethod
    def _mirror() -> str:
        """The address of the mirror that this system takes its own release from."""
        release = dict(
            line.split("=", 1)
            for line in pathlib.Path("/etc/os-release").read_text().splitlines()
            if "=" in line
        )
        codename = release.get("VERSION_CODENAME", "")
        listed = subprocess.run(
            ["apt-get", "update", "--print-uris"], check=True, capture_output=True, text=True
        ).stdout
        found = re.search(rf"^'([^']+)/dists/{codename}/InRelease'", listed, re.MULTILINE)
        if found is None:
            fail(f"apt has no mirror of Debian's {codename}: add one to its sources")
        return found[1]

    def _run(self, *arguments: str, folder: pathlib.Path | None = None) -> str | None:
        """Runs apt-get and returns what it prints, or None if it fails."""
        if not (self._folder / "apt.conf").exists():
            self._configure()
            if self._run("update", "-q") is None:
                fail("apt-get update failed: is the mirror of Debian reached?")
        done = subprocess.run(
            ["apt-get", *arguments],
            env=os.environ | {"APT_CONFIG": str(self._folder / "apt.conf"), "LC_ALL": "C"},
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.stderr.write(done.stderr)
        return done.stdout if done.returncode == 0 else None

    def newest(self) -> dict[str, str]:
        """The versions that the suites have, by package, of all that the build needs."""
        printed = self._run("install", "--print-uris", "-qq", "-y", *ROOTS)
        if printed is None:
            fail("the suites have no set of packages that fit each other")
        found = re.findall(r"^'[^']+' ([^_\s]+)_([^_\s]+)_[^_\s]+\.deb ", printed, re.MULTILINE)
        return {
            name: version.replace("%3a", ":")
            for name, version in found
            if not NOT_USED.fullmatch(name)
        }

    def download(self, versions: dict[str, str], folder: pathlib.Path) -> None:
        """Writes packages that the suites have to `folder`."""
        names = [f"{package}={version}" for package, version in versions.items()]
        if names and self._run("download", "-q", *names, folder=folder) is None:
            fail(f"could not fetch {' '.join(names)}")


def fetch(folder: pathlib.Path, apt: Apt, pins: list[Pin], *, only_pinned: bool) -> list[Pin]:
    """Makes `folder` hold exactly one file of each package, and returns what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = set(pins)
    for file in folder.glob("*.deb"):
        pin = pin_of(file)
        if pin in missing:
            missing.remove(pin)
        else:
            file.unlink()
    if missing:
        newest = apt.newest()
        listed = [pin for pin in missing if newest.get(pin.package) == pin.version]
        apt.download({pin.package: pin.version for pin in listed}, folder)
        missing -= {pin_of(file) for file in folder.glob("*.deb")}
    if not missing:
        return sorted(pins)
    gone = ", ".join(f"{pin.package} {pin.version}" for pin in sorted(missing))
    if only_pinned:
        fail(f"neither {folder} nor the suites have these pinned packages: {gone}")
    # Packages fit each other only within one state of the suites, so all of them are replaced.
    print(f"gone: {gone}; taking the newest of all packages instead")
    return fetch_newest(folder, apt, pins)


def fetch_newest(folder: pathlib.Path, apt: Apt, pins: list[Pin]) -> list[Pin]:
    """Replaces the packages in `folder` by the newest, and says what differs from `pins`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.deb"):
        file.unlink()
    apt.download(apt.newest(), folder)
    taken = sorted(pin_of(file) for file in folder.glob("*.deb"))
    pinned = {pin.package: pin for pin in pins}
    for pin in taken:
        before = pinned.pop(pin.package, None)
        if before is None:
            print(f"not pinned: {pin.package} {pin.version} {pin.sha256}")
        elif before != pin:
            print(f"differs: {pin.package} {pin.version} {pin.sha256}")
            print(f" pinned: {before.package} {before.version} {before.sha256}")
    for package in pinned:
        print(f"no longer needed: {package}")
    return taken


def findings(
    day: datetime.date, pins: list[Pin], today: datetime.date, newest: dict[str, str]
) -> list[str]:
    """What is wrong with the pins: their age, and newer versions of what the programs contain.

    They contain what is in the packages with names in -dev; others only run protoc.
    """
    found = []
    age = (today - day).days
    if age > DAYS_MAX:
        found.append(f"the pins are {age} days old, more than {DAYS_MAX}")
    pinned = {pin.package: pin.version for pin in pins if pin.package.endswith("-dev")}
    newest = {each: version for each, version in newest.items() if each.endswith("-dev")}
    for package, version in sorted(pinned.items()):
        if package not in newest:
            found.append(f"{package} {version} is no longer needed")
        elif newest[package] != version:
            found.append(f"{package} {version} is replaced by {newest[package]}")
    found += [f"{each} is needed and not pinned" for each in sorted(newest.keys() - pinned.keys())]
    return found


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch")
    fetching.add_argument("--pinned", action="store_true", help="fail if a pinned package is gone")
    fetching.add_argument("folder", type=pathlib.Path)
    commands.add_parser("check")
    commands.add_parser("pin").add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    day, pins = read_pins()
    with tempfile.TemporaryDirectory() as folder:
        apt = Apt(pathlib.Path(folder))
        if arguments.command == "check":
            found = findings(day, pins, datetime.datetime.now(datetime.UTC).date(), apt.newest())
            print("\n".join(found) or f"{len(pins)} packages of {day}: none is old or replaced")
            return 1 if found else 0
        if arguments.command == "fetch":
            taken = fetch(arguments.folder, apt, pins, only_pinned=arguments.pinned)
            write_pins(arguments.folder / "packages.tsv", day, taken)
            return 0
        today = datetime.datetime.now(datetime.UTC).date()
        write_pins(PINS, today, fetch_newest(arguments.folder, apt, pins))
    return 0


if __name__ == "__main__":
    sys.exit(main())
