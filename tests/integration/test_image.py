"""The container image is built from a Debian root and is small, and its server scores as a user without rights."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from logprobd import Client, LogprobdError, Tls
from model_folder import ModelFolder
from network_security import NetworkSecurity

# An image takes minutes while other checks use the machine.
pytestmark = pytest.mark.timeout(600)

IMAGE = "localhost/logprobd:test"
BASE = "localhost/debian:test"
USER = 10001
BYTES_MAX = 150 << 20  # compressed
READY_SECONDS_MAX = 2.0


class Builder:
    """buildah, whose images are in a folder of the test. It works without user namespaces, as in a container."""

    def __init__(self, folder: Path) -> None:
        storage = folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        )
        self.environment = os.environ | {
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(storage),
        }

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=550
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Builder:
    if os.geteuid() != 0:
        pytest.skip("debootstrap and chroot need root")
    folder = tmp_path_factory.mktemp("image")
    builder = Builder(folder)
    root = folder / "root"
    builder.run("debootstrap", "--variant=minbase", "bookworm", root)
    container = builder.run("buildah", "from", "scratch")
    builder.run("buildah", "copy", "-q", container, root, "/")
    builder.run("buildah", "commit", "-q", "--rm", container, BASE)
    return builder


@pytest.fixture(scope="module")
def image(builder, packages, repository) -> str:
    script = repository / "deploy" / "image" / "build.sh"
    builder.run("bash", script, "--base", BASE, "--packages", packages, "--tag", IMAGE, "cpu")
    return IMAGE


@pytest.fixture(scope="module")
def root(builder, image) -> Iterator[Path]:
    """The root file system of a container of the image. Programs find their libraries by /proc, as in any container."""
    root = Path(builder.run("buildah", "mount", builder.run("buildah", "from", image)))
    builder.run("mount", "-t", "proc", "proc", root / "proc")
    yield root
    builder.run("umount", "-l", root / "proc")


def test_the_compressed_image_is_small(builder, image, tmp_path):
    builder.run("buildah", "push", "-q", "--format", "v2s2", image, f"dir:{tmp_path}/image")

    files = sum(path.stat().st_size for path in (tmp_path / "image").iterdir())
    assert 10 << 20 < files < BYTES_MAX


@pytest.mark.release
def test_two_builds_have_the_same_bytes(builder, packages, repository, tmp_path):
    folder = repository / "deploy" / "image"
    digests = set()
    for name in ("first", "second"):
        archive = tmp_path / name
        build = (
            "bash",
            folder / "build.sh",
            "--base",
            BASE,
            "--packages",
            packages,
            "--tag",
            IMAGE,
        )
        builder.run(*build, "cpu")
        builder.run("buildah", "push", "-q", IMAGE, f"docker-archive:{archive}:logprobd:test")
        builder.run(sys.executable, folder / "repeatable_archive.py", archive)
        digests.add(hashlib.sha256(archive.read_bytes()).digest())
        builder.run("buildah", "pull", "-q", f"docker-archive:{archive}")  # it can be loaded

    assert len(digests) == 1


def test_the_image_runs_without_rights_and_has_a_health_check(builder, image):
    config = json.loads(builder.run("buildah", "inspect", "--type", "image", image))["Docker"][
        "config"
    ]

    assert config["User"] == f"{USER}:{USER}"
    assert config["Healthcheck"]["Test"] == ["CMD", "logprobctl", "ping"]
    assert config["Entrypoint"] == ["logprobd"]


def test_the_image_has_no_python_and_no_compiler(root):
    names = {path.name for path in (root / "usr" / "bin").iterdir()}
    assert not any(re.match(r"(python|gcc|g\+\+|pip)", name) for name in names)


def test_the_image_contains_no_private_key(root):
    folders = [root / name for name in ("etc", "opt", "usr/local", "root", "home")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    contents = {path: path.read_bytes() for path in files if not path.is_symlink()}
    keys = [path for path, content in contents.items() if b"PRIVATE KEY-----\n" in content]

    assert root / "etc/passwd" in contents
    # GnuTLS tests itself with keys that are in its library.
    assert [path for path in keys if not contents[path].startswith(b"\x7fELF")] == []


def in_image(root: Path, *command: str) -> list[str]:
    """Returns a command that runs a program of the image as the image's user."""
    program, *arguments = command
    return [
        "chroot",
        f"--userspec={USER}:{USER}",
        str(root),
        f"/usr/local/bin/{program}",
        *arguments,
    ]


@contextlib.contextmanager
def serving(root: Path, model: ModelFolder, *options: str) -> Iterator[str]:
    """Runs the server of the image with further options, and yields its address once it is ready."""
    (root / "model").mkdir(exist_ok=True)
    for file in model.path.iterdir():
        shutil.copyfile(file, root / "model" / file.name)
    server = subprocess.Popen(
        in_image(root, "logprobd", "--model", "/model", "--device", "cpu", "--http", "none", *options),
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        log = ""
        while not (ready := re.search(r" ready .*grpc=([\d.:]+)", log)):
            line = server.stderr.readline()
            assert line, f"the server exited:\n{log}"
            log += line
        yield ready[1]
    finally:
        server.terminate()
        server.wait(30)


def ping(root: Path, *options: str) -> subprocess.CompletedProcess:
    command = in_image(root, "logprobctl", "ping", *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_the_server_of_the_image_is_ready_soon_and_scores(root, model):
    started = time.monotonic()
    with serving(root, model, "--listen", "127.0.0.1:0") as address:
        seconds = time.monotonic() - started
        pinged = ping(root, "--address", address)
        with Client(address) as client:
            head = client.info()

    assert pinged.returncode == 0, pinged.stderr
    assert head.vocab_size == 1003
    assert seconds < READY_SECONDS_MAX


@pytest.fixture
def mounted(builder, root, tmp_path) -> Iterator[NetworkSecurity]:
    """Mounts certificates and tokens in the container, read-only, under the names of the README. The server's
    certificate has the name NAME."""
    security = NetworkSecurity(tmp_path, hosts="DNS:NAME")
    files = {
        "tls/ca.crt": security.ca,
        "tls/tls.crt": security.server_cert,
        "tls/tls.key": security.server_key,
        "tokens/tokens.toml": security.tokens.path,
        "tokens/health": security.token_file,
    }
    etc = tmp_path / "etc"
    for name, source in files.items():
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, etc / name)
        os.chown(etc / name, USER, USER)
        (etc / name).chmod(0o400)
    target = root / "etc" / "logprobd"
    target.mkdir(exist_ok=True)
    builder.run("mount", "--bind", "-o", "ro", etc, target)
    yield security
    builder.run("umount", target)


def test_the_image_serves_tls_with_mounted_keys_and_tokens_as_the_readme_says(
    root, model, mounted, repository
):
    text = (repository / "deploy" / "image" / "README.md").read_text()
    (block,) = (
        each for each in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "--tls" in each
    )
    podman = shlex.split(block.replace("\\\n", " "))
    health = shlex.split(podman[podman.index("--health-cmd") + 1])
    flags = podman[podman.index("--tls-cert") :]
    assert health[:2] == ["logprobctl", "ping"] and "--tokens" in flags

    with serving(root, model, "--listen", "0.0.0.0:0", *flags) as listening:
        address = f"127.0.0.1:{listening.rpartition(':')[2]}"
        healthy = ping(root, *health[2:], "--address", address)
        without_tls = ping(root, "--address", address)
        tls = Tls(ca=mounted.ca, server_name="NAME")
        with Client(address, tls=tls, token=mounted.token) as client:
            head = client.info()
        with (
            Client(address, tls=tls) as client,
            pytest.raises(LogprobdError, match="needs a token"),
        ):
            client.info()

    assert healthy.returncode == 0, healthy.stderr
    assert without_tls.returncode == 1
    assert head.vocab_size == 1003
