"""The kernels of logprobd as one shared library that needs neither Python nor PyTorch.

`library_path()` is the library, `include_path()` the folder of the headers that describe its functions. The CUDA
runtime is inside the library; it needs a driver for CUDA 13 (580 or newer) when a function for GPUs is called.
"""

import pathlib

__version__ = "0.2.0"
__all__ = ["include_path", "library_path"]


def library_path() -> pathlib.Path:
    """Returns the path of the shared library. Its soname ends with the version of this package."""
    return pathlib.Path(__file__).with_name("lib") / f"liblogprobd_kernels.so.{__version__}"


def include_path() -> pathlib.Path:
    """Returns the folder to which `#include "kernels/..."` is relative."""
    return pathlib.Path(__file__).with_name("include")
