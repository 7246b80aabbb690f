"""The wheels work in an empty environment, contain what they need, and are the same in every build."""

import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TEST_BINARIES", ROOT / "build" / "release" / "bin")).parent
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


def build_packages(out: Path) -> dict[str, Path]:
    """Returns the built files by what they are."""
    script = ROOT / "deploy" / "packages" / "build_wheels.sh"
    subprocess.run(["bash", script, BUILD, out], check=True, capture_output=True, timeout=600)
    return {
        "server": next(out.glob("logprobd_server-*.whl")),
        "client": next(out.glob("logprobd-*.whl")),
        "client source": next(out.glob("logprobd-*.tar.gz")),
    }


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    return build_packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory, packages) -> Path:
    """An environment that has only both wheels and what they depend on."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, packages["server"], packages["client"]], check=True, timeout=300)
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
    assert re.search(r"-py3-none-manylinux_2_3\d_x86_64\.whl$", packages["server"].name)
    assert packages["client"].name.endswith("-py3-none-any.whl")


def test_two_builds_have_the_same_bytes(packages, tmp_path):
    again = build_packages(tmp_path)

    for kind, path in packages.items():
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, again[kind])]
        assert digests[0] == digests[1], kind
