"""Tests run with this build's library and the Python package of the source tree. LINEAR_LOGPROB_DEVICE=cuda runs
them on a GPU."""

import os
import pathlib
import shutil
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[4]
BINARIES = pathlib.Path(os.environ.get("TEST_BINARIES", ROOT / "build" / "release" / "bin"))

os.environ.setdefault(
    "LINEAR_LOGPROB_LIBRARY", str(BINARIES.parent / "lib" / "liblogprobd_torch_ops.so")
)
# Compiled graphs of an earlier build may call operators with other arguments.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
DEVICE = os.environ.get("LINEAR_LOGPROB_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
# The operator is built by default only with CUDA.
IS_BUILT = (
    DEVICE != "cpu" or shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists()
)

sys.path[:0] = [
    str(ROOT / "kernels" / "torch_ops" / "python"),
    str(ROOT / "tests" / "support" / "python"),
]
from skipped_module import SkippedModule  # noqa: E402


def pytest_pycollect_makemodule(
    module_path: pathlib.Path, parent: pytest.Collector
) -> pytest.Module | None:
    if IS_BUILT:
        return None
    return SkippedModule.of(parent, module_path, "needs CUDA's compiler, which builds the operator")


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory):
    """Runs the two ranks of a gloo group, for tests that leave no state in them."""
    from rank_pool import RankPool  # noqa: PLC0415

    with RankPool(2, tmp_path_factory.mktemp("two_ranks")) as pool:
        yield pool
