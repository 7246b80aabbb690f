"""The container image is built from a Debian root and is small, and its server scores as a user without rights."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from logprobd import Client

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
            command, env=self.environment, capture_output=True, text=True, timeout=600
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


def test_the_server_of_the_image_is_ready_soon_and_scores(root, model):
    (root / "model").mkdir()
    for file in model.path.iterdir():
        (root / "model" / file.name).write_bytes(file.read_bytes())
    started = time.monotonic()
    server = subprocess.Popen(
        ["chroot", f"--userspec={USER}:{USER}", root, "/usr/local/bin/logprobd", "--model", "/model",
         "--device", "cpu", "--listen", "127.0.0.1:0", "--http", "none"],
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        lines = iter(server.stderr)
        found = (re.search(r" ready .*grpc=([\d.:]+)", line) for line in lines)
        ready = next((match for match in found if match), None)
        assert ready, "the server exited"
        seconds = time.monotonic() - started
        ping = subprocess.run(
            [
                "chroot",
                f"--userspec={USER}:{USER}",
                root,
                "/usr/local/bin/logprobctl",
                "ping",
                "--address",
                ready[1],
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
        with Client(ready[1]) as client:
            head = client.info()
    finally:
        server.terminate()
        server.wait(30)

    assert ping.returncode == 0, ping.stderr
    assert head.vocab_size == 1003
    assert seconds < READY_SECONDS_MAX
