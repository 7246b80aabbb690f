"""The wheels work in an empty environment, contain what they need, and are the same in every build."""

import hashlib
import json
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from built_packages import build_packages, has_newer_grpc

PROGRAMS = ("logprobd", "logprobctl")
# Every system that the wheel supports has the C and C++ libraries and zlib.
SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libz)\.so\.\d+|linux-vdso\.so\.1"
)
SCORE = """
import logprobd, numpy as np
from logprobd import demo_model

with logprobd.serve(device="cpu") as client:
    hidden = np.random.default_rng(1).standard_normal((8, 512)).astype(np.float32)
    targets = np.arange(8)
    result = client.score(hidden, targets)
bits = demo_model.make_tensors(demo_model.VOCAB_SIZE, demo_model.HIDDEN_SIZE, seed=0)[demo_model.HEAD]
weight = (bits.astype(np.uint32) << 16).view(np.float32)
logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
top = logits.max(axis=1)
lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
print(abs(result.logprob - (logits[np.arange(8), targets] - lse)).max())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory, packages) -> Path:
    """An environment that has only the server's and the client's wheel and what they depend on."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    wheels = [*packages.glob("logprobd-*.whl"), *packages.glob("logprobd_server-*.whl")]
    subprocess.run([*pip, *wheels], check=True, timeout=300)
    return folder


def run(environment: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees nothing of this machine's variables, such as LD_LIBRARY_PATH."""
    variables = {"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "HOME": str(environment)}
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=120, check=True
    )


def program_paths(environment: Path) -> list[Path]:
    (folder,) = environment.glob("lib/python3*/site-packages/logprobd_server/bin")
    return [folder / name for name in PROGRAMS]


def test_rows_are_scored_within_a_minute_of_the_installation(environment):
    started = time.monotonic()
    done = run(environment, environment / "bin" / "python", "-c", SCORE)

    assert float(done.stdout) < 1e-4
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_a_command(environment, name):
    assert run(environment, environment / "bin" / name, "--version").stdout.startswith(name)


def test_programs_load_only_libraries_of_the_wheel_and_the_c_libraries(environment):
    for path in program_paths(environment):
        lines = run(environment, "ldd", path).stdout.splitlines()
        assert len(lines) > 10
        for line in lines:
            name, _, where = line.strip().partition(" => ")
            is_ours = where.startswith(str(environment))
            assert is_ours or SYSTEM_LIBRARIES.fullmatch(Path(name.split()[0]).name), line


def test_programs_are_hardened(environment):
    for path in program_paths(environment):
        described = run(environment, "readelf", "-hldW", path).stdout
        assert "Position-Independent Executable" in described
        assert "GNU_RELRO" in described
        assert "NOW" in described
        assert "_chk@" in run(environment, "readelf", "-sW", "--dyn-syms", path).stdout


def test_the_wheel_is_for_one_platform_and_every_python(packages):
    (server,) = packages.glob("logprobd_server-*.whl")
    (client,) = packages.glob("logprobd-*.whl")

    assert re.search(r"-py3-none-manylinux_2_3[45]_x86_64\.whl$", server.name)
    assert client.name.endswith("-py3-none-any.whl")


def test_the_contents_of_the_server_s_wheel_are_listed_with_their_licences(binaries, packages):
    (server,) = packages.glob("logprobd_server-*.whl")
    (sbom,) = packages.glob("logprobd_server-*.spdx.json")
    parts = {part["name"]: part for part in json.loads(sbom.read_text())["packages"]}
    with zipfile.ZipFile(server) as wheel:
        names = wheel.namelist()

    is_static = has_newer_grpc(binaries)
    grpc, protobuf = (
        ("libgrpc-dev", "libprotobuf-dev") if is_static else ("libgrpc29", "libprotobuf32")
    )
    assert {"logprobd-server", grpc, protobuf, "nlohmann-json3-dev"} <= parts.keys()
    assert all(part["versionInfo"] and part["licenseDeclared"] for part in parts.values())
    assert any(name.endswith(f"/licenses/{grpc}.txt") for name in names)
    assert any(name.endswith("/licenses/nvidia-cutlass.txt") for name in names)
    copied = [name for name in names if name.startswith("logprobd_server.libs/")]
    assert any("libmicrohttpd" in name for name in copied)
    assert any("libgrpc" in name for name in copied) != is_static
    assert any("libssl" in name for name in copied) != is_static
    assert not any("cublas" in name for name in names)


def test_no_library_of_the_process_can_use_what_is_inside_the_programs(environment):
    for path in program_paths(environment):
        listed = run(environment, "nm", "--dynamic", "--defined-only", path).stdout
        names = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
        taken = re.compile(
            r"(SSL|EVP|OPENSSL|ares|grpc|upb|ZSTD)_.*|deflate.*|inflate.*|arc4random.*"
        )
        assert not [name for name in names if taken.fullmatch(name)]


@pytest.mark.release
def test_two_builds_have_the_same_bytes(binaries, packages, tmp_path):
    build_packages(binaries, tmp_path)

    files = sorted(path.name for path in packages.iterdir())
    assert len(files) == 6
    for name in files:
        digests = {
            hashlib.sha256((folder / name).read_bytes()).digest() for folder in (packages, tmp_path)
        }
        assert len(digests) == 1, name


def release(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = repository / "deploy" / "release.sh"
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, timeout=60)


def version_of(repository: Path) -> str:
    text = (repository / "CMakeLists.txt").read_text()
    return re.search(r"project\(logprobd VERSION ([\d.]+)", text)[1]


def test_a_release_of_this_version_is_consistent(repository):
    done = release(repository, "--dry-run", version_of(repository))

    assert done.returncode == 0, done.stderr
    assert "consistent" in done.stdout


def test_a_release_of_another_version_is_refused(repository):
    done = release(repository, "--dry-run", "9.9.9")

    assert done.returncode == 1
    assert f"CMakeLists.txt has version {version_of(repository)}, not 9.9.9" in done.stderr
