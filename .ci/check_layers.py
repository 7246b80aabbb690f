#!/usr/bin/env python3
"""Checks every #include in the C++ and CUDA files against the table of layers in ARCHITECTURE.md, and inside a folder
whose README declares layers against the table there.

Usage: check_layers.py [ROOT]. Prints each include that breaks a rule. Exits with 1 if there is one.
"""

import pathlib
import re
import sys

CUDA = {"cuda", "cuda_runtime", "cublas", "nvml", "nccl"}
GRPC = {"grpc", "grpcpp", "grpc++", "google", "logprobd/v1"}
TORCH = {"torch", "ATen", "c10"}

# Third-party libraries that each folder may include. The entry with the longest matching path applies, and a library
# that it does not list is an error. The project's own folders are in the table of ARCHITECTURE.md.
THIRD_PARTIES = {
    "kernels": {"cuda", "cuda_runtime", "cublas", "cutlass", "cute"},
    "kernels/torch_ops": TORCH | {"cuda_runtime"},
    "server/base": {"absl", "openssl"},
    "server/validation": {"absl"},
    "server/batching": {"absl"},
    "server/weights": {"absl", "nlohmann", "openssl"},
    "server/engine": {"absl"} | CUDA,
    "server/metrics": {"absl", "prometheus", "nvml"},
    "server/http": {"absl", "gnutls", "microhttpd"},
    "server/transport": {"absl", "openssl"} | GRPC,
    "server/app/options": {"absl", "CLI", "toml"},
    "server/app/heads": {"absl"},
    "server/app/run": {"absl"},
    "server/main.cc": {"absl"},
    "client/cpp": {"absl", "openssl"} | GRPC,
    "client/cli": {"absl", "CLI", "nlohmann"} | GRPC,
}

# Third-party libraries that only source files may include: a header would pass the include on to all its users.
SOURCE_ONLY = {
    "server/base": {"openssl"},
    "server/weights": {"nlohmann", "openssl"},
    "server/metrics": {"prometheus", "nvml"},
    "server/http": {"gnutls", "microhttpd"},
    "server/transport": {"openssl"},
    "client/cpp": {"openssl"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
# Headers of the system and of the C library, or their folders. C++ headers need no entry: their names have no '.'.
SYSTEM = {
    "sys",
    "netinet",
    "arpa",
    "linux",
    "bits",
    "unistd.h",
    "fcntl.h",
    "dlfcn.h",
    "signal.h",
    "poll.h",
    "pthread.h",
    "sched.h",
    "getopt.h",
    "immintrin.h",
    "cpuid.h",
    "string.h",
    "stdint.h",
    "stdlib.h",
    "stdio.h",
    "errno.h",
    "time.h",
    "math.h",
    "limits.h",
    "netdb.h",
    "ifaddrs.h",
    "termios.h",
}


def table(text: str, last_column: str) -> list[tuple[list[str], set[str]]]:
    """Returns the rows of the table with this last column, of three: the names in the first column and in the last."""
    body = text.split(f"| {last_column} |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in body.splitlines()[2:]]
    names = re.compile(r"`([^`]+?)/?`")
    return [(names.findall(first), set(names.findall(last))) for first, _, last in rows]


INNER_COLUMN = "layers that it may include"


def inner_layers(root: pathlib.Path) -> dict[str, dict[str, set[str]]]:
    """Returns for each folder whose README has a table of layers the folders in it, and those that each may include."""
    found = {}
    for folder in THIRD_PARTIES:
        readme = root / folder / "README.md"
        text = readme.read_text() if readme.exists() else ""
        if f"| {INNER_COLUMN} |" in text:
            rows = table(text, INNER_COLUMN)
            found[folder] = {name: allowed | {name} for names, allowed in rows for name in names}
    return found


def layers(root: pathlib.Path) -> dict[str, set[str]]:
    """Returns for each folder the project's folders that it may include, and itself, from the table of ARCHITECTURE.md.

    A row has the form | `folder`, ... | what | `base`, `kernels`, ... |. The last column may omit "server/".
    """
    rows = table((root / "ARCHITECTURE.md").read_text(), "project folders that it may include")
    all_names = {name for names, _ in rows for name in names}
    found = {}
    for names, given in rows:
        ours = {f"server/{name}" if f"server/{name}" in all_names else name for name in given}
        for name in names:
            found[name] = ours | {name}
    missing = THIRD_PARTIES.keys() - found.keys()
    if missing:
        raise SystemExit(
            f"the table in ARCHITECTURE.md has no row for {', '.join(sorted(missing))}; add one"
        )
    return found


def folder_of(path: str) -> str | None:
    matches = [f for f in THIRD_PARTIES if path == f or path.startswith(f + "/")]
    return max(matches, key=len) if matches else None


def third_party(include: str) -> str | None:
    """Returns the library that an include belongs to, or None for the standard library and the system."""
    first = include.split("/")[0]
    if include.startswith("logprobd/v1/"):
        return "logprobd/v1"
    if "/" not in include and "." not in include:
        return None
    if first in SYSTEM or include in SYSTEM:
        return None
    return re.sub(r"\.(h|hpp|cuh)$", "", first).removesuffix("Lt").removesuffix("_v2")


def check(root: pathlib.Path) -> list[str]:
    problems = []
    allowed, inner = layers(root), inner_layers(root)
    for path in sorted(root.glob("**/*")):
        relative = path.relative_to(root).as_posix()
        if path.suffix not in {".h", ".cc", ".cu", ".cuh", ".inc"} or relative.startswith("build"):
            continue
        folder = folder_of(relative)
        if folder is None:
            continue
        ours, others = allowed[folder], THIRD_PARTIES[folder]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            include = match.group(2)
            where = f"{relative}:{number}"
            if include.split("/")[0] in {"server", "kernels", "client", "tests"}:
                if not any(include.startswith(f + "/") for f in ours):
                    problems.append(f"{where}: {folder} may not include {include}")
                elif folder in inner and include.startswith(folder + "/"):
                    mine, other = (
                        name.removeprefix(folder + "/").split("/")[0]
                        for name in (relative, include)
                    )
                    if other not in inner[folder].get(mine, set()):
                        problems.append(f"{where}: {folder}/{mine} may not include {include}")
                continue
            library = third_party(include)
            if library is None:
                continue
            if library in TORCH and folder != "kernels/torch_ops":
                problems.append(f"{where}: only kernels/torch_ops may include {include}")
            elif not any(library == o or library.startswith(o + "_") for o in others):
                problems.append(f"{where}: {folder} may not include {include}")
            elif path.suffix == ".h" and library in SOURCE_ONLY.get(folder, set()):
                problems.append(
                    f"{where}: a header must not include {include}; include it in a source file"
                )
    return problems


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    problems = check(root)
    print("\n".join(problems) if problems else "layers: every include is allowed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
