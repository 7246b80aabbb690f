"""Builds the operator's library for the torch that is installed.

It needs a C++20 compiler ($CXX, default: c++) and logprobd-kernels, but no CUDA compiler: the kernels are in
logprobd-kernels, and this compiles what connects them to torch. For a torch with CUDA it uses the headers of the
packages nvidia-cuda-runtime and triton, on which that torch depends. A wheel contains the libraries that already lie in
the package, for example those of several versions of torch; only if there are none, a library is compiled.
"""

import concurrent.futures
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE / "logprobd_ops"
LIBRARY_PREFIX = "liblogprobd_torch_ops-torch"
# A source distribution contains the sources; elsewhere they lie around this folder.
ROOT = HERE / "csrc" if (HERE / "csrc").is_dir() else HERE.parents[2]
SOURCES = ROOT / "kernels" / "torch_ops"
# Sources that include CUDA's headers are left out for a torch without CUDA.
NEEDS_CUDA = re.compile(r"^#include <(c10/cuda/|cuda_)", re.MULTILINE)
REMEDY = "install {0}, then run pip with --no-build-isolation, so that the build uses the {0} that is installed"


def package_folder(name: str, distribution: str) -> pathlib.Path:
    """Returns the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"setup.py: error: {distribution} is missing: {REMEDY.format(distribution)}"
        )
    return pathlib.Path(spec.submodule_search_locations[0])


class BuildOperator(build_ext):
    """Compiles the sources with as many processes as there are CPUs, and links the library."""

    def run(self) -> None:
        if not self.inplace and any(PACKAGE.glob(f"{LIBRARY_PREFIX}*.so")):
            return
        torch = package_folder("torch", "torch")
        kernels = package_folder("logprobd_kernels", "logprobd-kernels")
        about_torch = (torch / "version.py").read_text()
        (version,) = re.findall(r"^__version__ = '(\d+\.\d+)", about_torch, re.MULTILINE)
        own_version = self.distribution.get_version()
        kernel_library = kernels / "lib" / f"liblogprobd_kernels.so.{own_version}"
        if not kernel_library.exists():
            raise SystemExit(
                f"setup.py: error: no {kernel_library}: install logprobd-kernels=={own_version}"
            )
        has_cuda = (torch / "lib" / "libtorch_cuda.so").exists()
        sources = [
            path.relative_to(ROOT)
            for path in sorted(SOURCES.glob("*/*.cc"))
            if has_cuda or not NEEDS_CUDA.search(path.read_text())
        ]
        includes = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
        if has_cuda:
            includes += self.cuda_includes(torch, about_torch)
        flags = [
            *("-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"),
            *("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"),
            # ATen's parallel loops need OpenMP. The functions that the compiler calls are those of torch's own OpenMP
            # library, so it is not linked.
            "-fopenmp",
            f"-DLOGPROBD_TORCH_OPS_CUDA={int(has_cuda)}",
            "-I.",
            f"-I{kernels / 'include'}",
            *(f"-isystem{path}" for path in includes),
            # Messages of errors name source files. The folder of torch must not make two builds differ.
            f"-ffile-prefix-map={torch.parent}/=",
        ]
        objects = self.compile(sources, flags)
        package = (
            PACKAGE if self.inplace else pathlib.Path(self.build_lib, "logprobd_ops").resolve()
        )
        library = package / f"{LIBRARY_PREFIX}{version}.so"
        package.mkdir(parents=True, exist_ok=True)
        libraries = ["torch", "torch_cpu", "c10"] + (["torch_cuda", "c10_cuda"] if has_cuda else [])
        self.call(
            *self.compiler_command(),
            *("-shared", "-s", "-Wl,-z,relro,-z,now", "-o", library, *objects, kernel_library),
            *(f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries)),
            # The libraries of CUDA that torch's depend on are found when torch loads them.
            "-Wl,--allow-shlib-undefined",
        )
        print(f"built {library} for torch {version} {'with' if has_cuda else 'without'} CUDA")

    def compile(
        self, sources: list[pathlib.Path], flags: list[str | pathlib.Path]
    ) -> list[pathlib.Path]:
        """Compiles sources, whose paths are relative to ROOT, and prints the name of each."""
        folder = pathlib.Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        objects = [folder / (source.parent.name + "_" + source.stem + ".o") for source in sources]
        jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            commands = [
                pool.submit(
                    self.call, *self.compiler_command(), *flags, "-c", source, "-o", compiled
                )
                for source, compiled in zip(sources, objects, strict=True)
            ]
            try:
                for done, command in enumerate(concurrent.futures.as_completed(commands), 1):
                    command.result()
                    print(f"[{done}/{len(sources)}] {sources[commands.index(command)]}", flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return objects

    @staticmethod
    def compiler_command() -> list[str]:
        return shlex.split(os.environ.get("CXX", "c++"))

    @staticmethod
    def call(*command: str | pathlib.Path) -> None:
        try:
            failed = subprocess.run(command, cwd=ROOT, check=False).returncode != 0
        except FileNotFoundError:
            raise SystemExit(
                f"setup.py: error: no C++ compiler {command[0]}: install g++, or set CXX to a compiler"
            ) from None
        if failed:
            raise SystemExit(f"setup.py: error: failed: {shlex.join(map(str, command))}")

    @staticmethod
    def cuda_includes(torch: pathlib.Path, about_torch: str) -> list[pathlib.Path]:
        """Returns folders with the headers of the CUDA runtime that torch was built with. Some of the headers are those
        that Triton contains, on which a torch with CUDA depends, because NVIDIA's package of the runtime lacks them."""
        (major,) = re.findall(r"^cuda.* = '(\d+)\.", about_torch, re.MULTILINE)
        nvidia = torch.parent / "nvidia"
        folders = [
            nvidia / f"cu{major}" / "include",  # from CUDA 13 on
            nvidia / "cuda_runtime" / "include",
            nvidia / "cuda_nvcc" / "include",
            torch.parent / "triton" / "backends" / "nvidia" / "include",
        ]
        if home := os.environ.get("CUDA_HOME"):
            folders.append(pathlib.Path(home, "include"))
        for header in ("cuda_runtime_api.h", "crt/host_config.h"):
            if not any((folder / header).exists() for folder in folders):
                raise SystemExit(
                    f"setup.py: error: no {header} in {', '.join(map(str, folders))}: install the nvidia-cuda-runtime and "
                    f"the triton on which this torch depends, or set CUDA_HOME to a CUDA toolkit {major}"
                )
        return folders


class PlatformWheel(bdist_wheel):
    """The library is for one platform, and for every Python, because torch loads it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if sys.platform != "linux":
    raise SystemExit("setup.py: error: logprobd-ops runs on Linux only")
setup(
    # The extension has no sources: BuildOperator finds them. It makes the wheel one for a platform.
    ext_modules=[Extension("logprobd_ops.library", [])],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildOperator},
)
