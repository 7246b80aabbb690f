"""The operator of this build, from the source tree."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[4]
BINARIES = pathlib.Path(os.environ.get("TEST_BINARIES", ROOT / "build" / "release" / "bin"))

os.environ.setdefault(
    "LINEAR_LOGPROB_LIBRARY", str(BINARIES.parent / "lib" / "liblogprobd_torch_ops.so")
)
sys.path[:0] = [
    str(ROOT / "kernels" / "torch_ops" / "python"),
    str(ROOT / "tests" / "support" / "python"),
]
