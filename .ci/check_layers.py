#!/usr/bin/env python3
"""Checks every #include of ours against the table of layers in ARCHITECTURE.md.

Usage: check_layers.py [ROOT]. Prints each line that breaks a rule and exits 1 if there is any.
"""

import pathlib
import re
import sys

CUDA = {"cuda", "cuda_runtime", "cublas", "nvml", "nccl"}
GRPC = {"grpc", "grpcpp", "grpc++", "google", "logprobd/v1"}
TORCH = {"torch", "ATen", "c10"}

# The third parties that each folder may include; the longest matching folder decides. What no rule names is refused.
# The folders of ours that it may include stand in the table of ARCHITECTURE.md.
THIRD_PARTIES = {
    "kernels": {"cuda", "cuda_runtime", "cublas", "cutlass", "cute"},
    "kernels/torch_ops": TORCH | {"cuda_runtime"},
    "server/base": {"absl", "spdlog"},
    "server/validation": {"absl"},
    "server/batching": {"absl"},
    "server/weights": {"absl", "nlohmann", "openssl"},
    "server/engine": {"absl"} | CUDA,
    "server/metrics": {"absl", "prometheus", "nvml"},
    "server/http": {"absl", "httplib"},
    "server/transport": {"absl"} | GRPC,
    "server/app/options": {"absl", "CLI", "toml"},
    "server/app/heads": {"absl"},
    "server/app/run": {"absl"},
    "server/main.cc": {"absl"},
    "client/cpp": {"absl"} | GRPC,
    # httplib: `logprobctl bench` reads a server's metrics.
    "client/cli": {"absl", "CLI", "nlohmann", "httplib"} | GRPC,
}

# Third parties that only a source file may include, never a header: it would spread to every user.
SOURCE_ONLY = {
    "server/base": {"spdlog"},
    "server/weights": {"nlohmann", "openssl"},
    "server/metrics": {"prometheus", "nvml"},
    "server/http": {"httplib"},
    "client/cli": {"httplib"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')
# Headers of the C and C++ libraries and of the system have no dot in a first part that names a library.
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


def layers(root: pathlib.Path) -> dict[str, set[str]]:
    """For each folder the folders of ours that it may include, itself among them, by the table of ARCHITECTURE.md.

    Its rows: | `folder`, ... | what | `base`, `kernels`, ... |; a server folder may lack its "server/".
    """
    text = (root / "ARCHITECTURE.md").read_text()
    table = text.split("| may include of ours |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table.splitlines()[2:]]
    names = {n.rstrip("/") for cells in rows for n in re.findall(r"`([^`]+)`", cells[0])}
    found = {}
    for folders, _, allowed in rows:
        given = set(re.findall(r"`([^`]+)`", allowed))
        ours = {f"server/{name}" if f"server/{name}" in names else name for name in given}
        for name in re.findall(r"`([^`]+)`", folders):
            found[name.rstrip("/")] = ours | {name.rstrip("/")}
    missing = THIRD_PARTIES.keys() - found.keys()
    if missing:
        raise SystemExit(f"ARCHITECTURE.md has no row for {', '.join(sorted(missing))}")
    return found


def folder_of(path: str) -> str | None:
    matches = [f for f in THIRD_PARTIES if path == f or path.startswith(f + "/")]
    return max(matches, key=len) if matches else None


def third_party(include: str) -> str | None:
    """The library that an include belongs to, or None for the standard library and the system."""
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
    allowed = layers(root)
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
                continue
            library = third_party(include)
            if library is None:
                continue
            if library in TORCH and folder != "kernels/torch_ops":
                problems.append(f"{where}: only kernels/torch_ops may include {include}")
            elif not any(library == o or library.startswith(o + "_") for o in others):
                problems.append(f"{where}: {folder} may not include {include}")
            elif path.suffix == ".h" and library in SOURCE_ONLY.get(folder, set()):
                problems.append(f"{where}: {include} belongs into a source file, not a header")
    return problems


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    problems = check(root)
    print("\n".join(problems) if problems else "layers: every include is allowed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
