"""Tests the systemd unit, the Debian package, and what a server tells the service manager."""

import hashlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess

import logprobd
import pytest
from built_packages import has_newer_grpc
from network_security import NetworkSecurity
from scoring_rpc import ROOT

SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = SYSTEMD / "logprobd.service"
CREDENTIALS = SYSTEMD / "tls.conf"


def run(*command: object, **options) -> str:
    """Runs a command, which must succeed, and returns its output."""
    tool = str(command[0])
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is missing: install the test packages of deploy/debian_packages.sh")
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=150, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def settings(name: str) -> list[str]:
    """Returns the values of a setting of the unit, in order."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def help_text(binaries) -> str:
    return run(binaries / "logprobd", "--help")


def verify(folder: pathlib.Path, binaries: pathlib.Path, drop_in: str) -> str:
    """Returns what systemd says about the unit with a drop-in."""
    # The program is not installed here, and the manual page that the unit names is not either.
    unit = folder / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/bin/logprobd", str(binaries / "logprobd")))
    (folder / f"{UNIT.name}.d").mkdir(exist_ok=True)
    (folder / f"{UNIT.name}.d" / CREDENTIALS.name).write_text(drop_in)
    return run("systemd-analyze", "verify", "--man=no", unit)


def test_the_unit_is_valid(binaries, tmp_path) -> None:
    assert verify(tmp_path, binaries, "") == ""


def test_the_drop_in_of_credentials_is_valid_with_all_its_lines(binaries, tmp_path) -> None:
    text = CREDENTIALS.read_text()
    whole = re.sub(r"^#(?=\w+=)", "", text, flags=re.MULTILINE)
    assert whole.count("LoadCredential=") == text.count("\nLoadCredential=") + 1
    for drop_in in (text, whole):
        assert verify(tmp_path, binaries, drop_in) == ""
    wrong = whole.replace("LoadCredential=", "LoadSecret=")
    assert "LoadSecret" in verify(tmp_path, binaries, wrong)


def test_a_server_starts_with_the_credentials_of_the_drop_in(start_server, model, tmp_path) -> None:
    security = NetworkSecurity(tmp_path)
    sources = {
        "tls.pem": security.server_cert,
        "tls.key": security.server_key,
        "tokens.toml": security.tokens.path,
        "clients.pem": security.ca,
    }
    whole = re.sub(r"^#(?=\w+=)", "", CREDENTIALS.read_text(), flags=re.MULTILINE)
    loaded = tmp_path / "credentials"  # as systemd makes it
    loaded.mkdir()
    for name, path in re.findall(r"^LoadCredential=(\S+):/etc/logprobd/(\S+)$", whole, re.M):
        shutil.copy(sources[path], loaded / name)
        (loaded / name).chmod(0o400)
    loaded.chmod(0o500)
    variables = dict(re.findall(r"^Environment=(\w+)=%d(\S+)$", whole, re.MULTILINE))
    assert len(variables) == len(sources)

    environment = {name: f"{loaded}{path}" for name, path in variables.items()}
    server = start_server("--model", str(model.path), environment=environment)

    tls = logprobd.Tls(security.ca, security.client_cert, security.client_key)
    with logprobd.Client(server.grpc, tls=tls, token=security.token, timeout=20) as client:
        assert client.list_heads()
    with logprobd.Client(server.grpc, tls=tls, timeout=20) as client:
        with pytest.raises(logprobd.LogprobdError, match="needs a token"):
            client.list_heads()


def test_the_unit_exposes_little() -> None:
    report = run("systemd-analyze", "security", "--offline=true", "--no-pager", UNIT)
    assert float(re.search(r"Overall exposure level for \S+: (\S+)", report)[1]) <= 2.0


def test_the_unit_s_settings_are_known_to_the_server(help_text) -> None:
    flags = re.findall(r"--[\w-]+", settings("ExecStart")[0])
    variables = re.findall(r"LOGPROBD_(\w+)=", (SYSTEMD / "logprobd.default").read_text())
    assert flags and variables
    for flag in flags + ["--" + name.lower().replace("_", "-") for name in variables]:
        assert re.search(rf"^  {flag} ", help_text, re.MULTILINE), flag


def test_systemd_waits_longer_than_the_server_drains(help_text) -> None:
    grace = re.search(r"--grace-s .*?Default: (\d+)\.", help_text, re.DOTALL)[1]
    assert int(settings("TimeoutStopSec")[0].removesuffix("s")) > int(grace)


def test_systemd_leaves_the_server_time_to_end_by_itself_when_a_thread_hangs(help_text) -> None:
    default = re.search(r"--watchdog-s .*?0\s+means\s+(\d+)\s+s;", help_text, re.DOTALL)[1]
    minutes = re.fullmatch(r"(\d+)min", settings("WatchdogSec")[0])[1]
    assert int(minutes) * 60 > int(default) + 10
    assert "4" not in settings("RestartPreventExitStatus")[0].split()


class Package:
    """The Debian package, built from the tests' binaries and unpacked."""

    def __init__(self, binaries: pathlib.Path, folder: pathlib.Path) -> None:
        self.deb = self.build(binaries, folder / "out")
        self.root = folder / "root"
        run("dpkg-deb", "--raw-extract", self.deb, self.root)

    @staticmethod
    def build(binaries: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
        for tool in ("dpkg-shlibdeps", "help2man"):
            run(tool, "--version")
        out.mkdir()
        script = ROOT / "deploy" / "debian" / "make_deb.sh"
        environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
        run("bash", script, binaries.parent, out, env=environment, cwd=out)
        return next(out.glob("*.deb"))

    def field(self, name: str) -> str:
        return run("dpkg-deb", "--field", self.deb, name).strip()


@pytest.fixture(scope="module")
def package(binaries, tmp_path_factory) -> Package:
    return Package(binaries, tmp_path_factory.mktemp("package"))


def test_the_package_contains_what_an_operator_needs(package, binaries) -> None:
    version = re.search(
        r"^project\(logprobd VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.M
    )[1]
    assert package.deb.name == f"logprobd_{version}_{package.field('Architecture')}.deb"
    assert package.field("Version") == version
    libraries = ("libc6",) if has_newer_grpc(binaries) else ("libc6", "libgrpc++", "libprotobuf")
    assert all(library in package.field("Depends") for library in libraries)
    files = {str(p.relative_to(package.root)) for p in package.root.rglob("*") if p.is_file()}
    assert files == {
        "DEBIAN/conffiles",
        "DEBIAN/control",
        "DEBIAN/md5sums",
        "DEBIAN/postinst",
        "DEBIAN/postrm",
        "DEBIAN/prerm",
        "etc/default/logprobd",
        "etc/logprobd/logprobd.toml",
        "usr/bin/logprobctl",
        "usr/bin/logprobd",
        "usr/lib/systemd/system/logprobd.service",
        "usr/lib/sysusers.d/logprobd.conf",
        "usr/lib/tmpfiles.d/logprobd.conf",
        "usr/share/doc/logprobd/changelog.gz",
        "usr/share/doc/logprobd/copyright",
        "usr/share/doc/logprobd/examples/tls.conf",
        "usr/share/man/man1/logprobctl.1.gz",
        "usr/share/man/man1/logprobd.1.gz",
    }
    assert (package.root / "DEBIAN/conffiles").read_text().split() == [
        "/etc/default/logprobd",
        "/etc/logprobd/logprobd.toml",
    ]
    for line in run("dpkg-deb", "--contents", package.deb).splitlines():
        assert line.split()[1] == "root/root", line
    for script in ("postinst", "prerm", "postrm"):
        run("sh", "-n", package.root / "DEBIAN" / script)
    run("md5sum", "--check", "--quiet", "DEBIAN/md5sums", cwd=package.root)


def test_the_package_s_programs_and_manual_pages_are_complete(package, binaries) -> None:
    for program in ("logprobd", "logprobctl"):
        installed = run(package.root / "usr/bin" / program, "--version")
        assert installed == run(binaries / program, "--version")
        page = run("zcat", package.root / f"usr/share/man/man1/{program}.1.gz")
        assert f".SH NAME\n{program} \\- " in page
    page = run("zcat", package.root / "usr/share/man/man1/logprobd.1.gz").replace("\\-", "-")
    for flag in re.findall(r"^  (--[\w-]+)", run(binaries / "logprobd", "--help"), re.MULTILINE):
        assert flag in page, flag


def test_the_installed_configuration_waits_for_a_model(package) -> None:
    # Status 2 is not followed by a restart.
    command = [
        package.root / "usr/bin/logprobd",
        "--config",
        package.root / "etc/logprobd/logprobd.toml",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2, result.stderr
    assert "--model is missing" in result.stderr
    assert "2" in settings("RestartPreventExitStatus")[0].split()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user")
def test_the_package_makes_its_user_and_folders(package, tmp_path) -> None:
    for folder in ("usr/lib/sysusers.d", "usr/lib/tmpfiles.d"):
        shutil.copytree(package.root / folder, tmp_path / folder)
    for folder in ("etc", "var/lib"):
        (tmp_path / folder).mkdir(parents=True)
    run("systemd-sysusers", f"--root={tmp_path}", "logprobd.conf")
    run("systemd-tmpfiles", f"--root={tmp_path}", "--create", "logprobd.conf")
    user = (tmp_path / "etc/passwd").read_text().split(":")
    assert user[0] == settings("User")[0]
    assert user[5:] == ["/var/lib/" + settings("StateDirectory")[0], "/usr/sbin/nologin\n"]
    assert (tmp_path / "var/lib/logprobd/models").stat().st_uid == int(user[2])


@pytest.mark.release
def test_two_builds_give_the_same_package(package, binaries, tmp_path) -> None:
    again = Package.build(binaries, tmp_path / "again")
    first, second = (hashlib.sha256(p.read_bytes()).hexdigest() for p in (package.deb, again))
    assert first == second


def test_a_server_tells_the_service_manager_its_state(start_server, model, tmp_path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(30)

        def next_message() -> list[str]:
            return manager.recv(4096).decode().splitlines()

        def await_message(line: str) -> list[str]:
            """Returns the next message with `line`; before it only the state may be reported."""
            while line not in (message := next_message()):
                assert [each.partition("=")[0] for each in message] == ["STATUS"], message
            return message

        server = start_server(
            "--model", str(model.path), environment={"NOTIFY_SOCKET": str(path)}, wait=False
        )
        assert next_message() == ["STATUS=loading the weights"]
        assert await_message("READY=1") == ["READY=1", "STATUS=ready"]
        server.wait_for_log(" ready ")
        assert server.get("/readyz")[0] == 200
        server.signal(signal.SIGHUP)
        assert "STATUS=ready" in await_message("RELOADING=1")
        assert await_message("READY=1") == ["READY=1", "STATUS=ready"]
        server.signal()
        assert await_message("STOPPING=1") == [
            "STOPPING=1",
            "EXTEND_TIMEOUT_USEC=60000000",
            "STATUS=finishing the work in flight, at most 30 s",
        ]
        assert server.wait() == 0
