"""The operator's packages score in an environment that has torch, and say what is missing in others."""

import hashlib
import json
import re
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from built_packages import build_operator_packages

pytestmark = pytest.mark.timeout(1200)  # the first test builds the packages

SCORE = """
import logprobd_ops, torch

generator = torch.Generator().manual_seed(1)
hidden = torch.randn(16, 64, generator=generator, requires_grad=True)
weight = torch.randn(1003, 64, generator=generator)
target = torch.randint(1003, (16,), generator=generator)
scores = logprobd_ops.linear_logprob(hidden, weight, target)
scores.logprob.sum().backward()

exact = hidden.detach().double().requires_grad_()
logprobs = torch.log_softmax(exact @ weight.double().T, -1)
logprob = logprobs.gather(-1, target[:, None])[:, 0]
logprob.sum().backward()
entropy = -(logprobs.exp() * logprobs).sum(-1)
for ours, theirs in ((scores.logprob, logprob), (scores.entropy, entropy), (hidden.grad, exact.grad)):
    print((ours - theirs).abs().max().item())
"""
MINOR = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def python(tmp_path_factory, operator_packages) -> Path:
    """The interpreter of an environment with the operator's wheels and the packages of the tests, such as torch."""
    folder = tmp_path_factory.mktemp("operator")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    interpreter = folder / "bin" / "python"
    (own_site,) = folder.glob("lib/python3*/site-packages")
    (own_site / "tests.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = [interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    found = [f"--find-links={operator_packages}", "logprobd-ops"]
    subprocess.run([*pip, *found], check=True, timeout=300)
    return interpreter


def run(python: Path, program: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program that sees nothing of this machine's variables, such as LINEAR_LOGPROB_LIBRARY."""
    return subprocess.run(
        [python, "-c", program],
        env={"PATH": "/usr/bin:/bin", "HOME": str(python.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=check,
    )


def import_error(python: Path, before: str) -> str:
    """Returns the message of the ImportError of logprobd_ops after a program's lines."""
    program = (
        f"{before}\ntry:\n    import logprobd_ops\nexcept ImportError as error:\n    print(error)"
    )
    return run(python, program).stdout


def test_the_wheel_scores_on_a_cpu_with_gradients(python):
    errors = [float(line) for line in run(python, SCORE).stdout.split()]

    assert len(errors) == 3
    assert max(errors) < 1e-4


def test_the_import_lists_the_versions_of_torch_that_have_a_library(python):
    message = import_error(python, "import torch\ntorch.__version__ = '2.99.1'")

    assert f"no library for torch 2.99.1, only for {MINOR}:" in message
    assert "pip install --no-build-isolation" in message
    assert "--no-binary logprobd-ops logprobd-ops==" in message


def test_the_import_names_a_missing_package_of_kernels(python):
    message = import_error(python, "import sys\nsys.modules['logprobd_kernels'] = None")

    assert "pip install --force-reinstall --no-deps logprobd-kernels==" in message


def test_the_import_says_how_to_build_for_a_torch_without_the_libraries_of_cuda(python, tmp_path):
    (own_site,) = python.parents[1].glob("lib/python3*/site-packages")
    (library,) = (own_site / "logprobd_ops").glob("*.so")
    other = tmp_path / library.name
    # No torch has a library of this name, which is as long as the other, so that the file stays valid.
    other.write_bytes(library.read_bytes().replace(b"libc10_cuda.so", b"libc10_none.so"))
    before = f"import ctypes, logprobd_kernels, os\nos.environ['LINEAR_LOGPROB_LIBRARY'] = {str(other)!r}"
    before += "\nctypes.CDLL(str(logprobd_kernels.library_path()))"

    message = import_error(python, before)

    assert "libc10_none.so: cannot open shared object file" in message
    assert "for example one with CUDA. To build the library for this torch" in message


def test_the_import_refuses_kernels_of_another_version(python):
    message = import_error(
        python, "import logprobd_kernels\nlogprobd_kernels.__version__ = '0.0.1'"
    )

    assert "logprobd-kernels has version 0.0.1, not " in message
    assert "pip install --force-reinstall --no-deps logprobd-kernels==" in message


def test_the_libraries_are_hardened(python):
    names = "logprobd_kernels/lib/*.so.*", "logprobd_ops/*.so"
    (own_site,) = python.parents[1].glob("lib/python3*/site-packages")
    for name in names:
        (library,) = own_site.glob(name)
        command = ["readelf", "-ldW", library]
        described = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "GNU_RELRO" in described
        assert "NOW" in described


def test_the_wheels_are_for_one_platform_and_every_python(operator_packages):
    for name in ("logprobd_kernels", "logprobd_ops"):
        (wheel,) = operator_packages.glob(f"{name}-*.whl")
        assert re.search(r"-py3-none-manylinux_2_3\d_x86_64\.whl$", wheel.name)


def test_the_wheel_contains_no_other_library_than_that_for_this_torch(operator_packages):
    (wheel,) = operator_packages.glob("logprobd_ops-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]

    assert libraries == [f"logprobd_ops/liblogprobd_torch_ops-torch{MINOR}.so"]


def test_the_kernels_export_their_functions_only(python):
    path = run(python, "import logprobd_kernels; print(logprobd_kernels.library_path())").stdout
    command = ["nm", "--dynamic", "--defined-only", "--demangle", path.strip()]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    names = [line.split(maxsplit=2)[2] for line in symbols.splitlines()]
    assert len(names) > 10
    assert all(name.startswith("logprobd::kernels::") for name in names)


def test_the_contents_of_the_kernels_are_listed(operator_packages):
    (sbom,) = operator_packages.glob("logprobd_kernels-*.spdx.json")
    parts = {part["name"] for part in json.loads(sbom.read_text())["packages"]}

    assert parts >= {"logprobd-kernels", "nvidia-cutlass"}


def test_the_source_distribution_has_all_sources_and_no_library(operator_packages, repository):
    (archive,) = operator_packages.glob("logprobd_ops-*.tar.gz")
    with tarfile.open(archive) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}

    wanted = {
        f"csrc/{path.relative_to(repository)}"
        for path in repository.glob("kernels/torch_ops/*/*.cc")
    }
    assert len(wanted) > 10
    assert wanted <= names
    assert not any(name.endswith((".so", ".o", ".pyc")) for name in names)


def test_the_build_names_a_missing_package(operator_packages, tmp_path):
    (archive,) = operator_packages.glob("logprobd_ops-*.tar.gz")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]

    # The environment of the build has setuptools and no torch.
    done = subprocess.run([*pip, "--no-deps", archive], capture_output=True, text=True, timeout=300)

    assert done.returncode != 0
    assert (
        "torch is missing: install torch, then run pip with --no-build-isolation"
        in done.stdout + done.stderr
    )


def test_a_missing_compiler_is_named(python, operator_packages, tmp_path):
    (archive,) = operator_packages.glob("logprobd_ops-*.tar.gz")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, "-q", "setuptools>=77"], check=True, timeout=300)

    done = subprocess.run(
        [*pip, "--no-build-isolation", "--no-deps", archive],
        env={"PATH": "/usr/bin:/bin", "CXX": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode != 0
    assert (
        f"no C++ compiler {tmp_path / 'none'}: install g++, or set CXX" in done.stdout + done.stderr
    )


@pytest.mark.release
def test_two_builds_have_the_same_bytes(binaries, operator_packages, tmp_path, monkeypatch):
    # The compiler's cache would give the bytes of the first build, which lay in another folder.
    monkeypatch.setenv("CCACHE_RECACHE", "1")

    build_operator_packages(binaries, tmp_path)

    files = sorted(path.name for path in operator_packages.iterdir())
    assert len(files) == 4
    for name in files:
        digests = {
            hashlib.sha256((folder / name).read_bytes()).digest()
            for folder in (operator_packages, tmp_path)
        }
        assert len(digests) == 1, name
