#!/usr/bin/env python3
"""Lists what is inside the programs or libraries of a package and the libraries that they load, and writes it as an
SPDX document.

    contents.py --name logprobd-server --version 0.2.0 --licenses DIR --sbom FILE [--static PREFIX] PROGRAM...

PREFIX is that of deploy/newer_grpc, whose libraries are inside the programs.
Copies the licence texts of the distribution's packages to DIR. Fails if a library belongs to a package without a known
licence, so that a new dependency is added to LICENSES first. SOURCE_DATE_EPOCH is the document's time.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

# SPDX identifiers by the source package of a distribution's package.
LICENSES = {
    "abseil": "Apache-2.0",
    "c-ares": "MIT",
    "cli11": "BSD-3-Clause",
    "gmp": "LGPL-3.0-or-later OR GPL-2.0-or-later",
    "gnutls28": "LGPL-2.1-or-later",
    "grpc": "Apache-2.0",
    "libffi": "MIT",
    "libidn2": "LGPL-3.0-or-later OR GPL-2.0-or-later",
    "libmicrohttpd": "LGPL-2.1-or-later",
    "libtasn1-6": "LGPL-2.1-or-later",
    "libunistring": "LGPL-3.0-or-later OR GPL-2.0-or-later",
    "libzstd": "BSD-3-Clause",
    "nettle": "LGPL-3.0-or-later OR GPL-2.0-or-later",
    "nlohmann-json3": "MIT",
    "openssl": "Apache-2.0",
    "p11-kit": "BSD-3-Clause",
    "prometheus-cpp": "MIT",
    "protobuf": "BSD-3-Clause",
    "re2": "BSD-3-Clause",
    "toml11": "MIT",
    "utf8-range": "MIT",
    "zlib": "Zlib",
}
# The distribution's packages of which only headers are compiled into the programs, by our package.
HEADERS = {"logprobd-server": ("libcli11-dev", "libtoml11-dev", "nlohmann-json3-dev")}
# Every system that the wheel supports has them.
SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libz)\.so\..*"
)
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Part(NamedTuple):
    """Something that is inside our programs or libraries, or that they load."""

    name: str
    version: str
    license: str
    purl: str = ""


def call(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def libraries_of(program: pathlib.Path) -> set[pathlib.Path]:
    """The shared libraries that a program loads, without those of the system."""
    paths = set()
    for line in call("ldd", program).splitlines():
        name, _, where = line.strip().partition(" => ")
        if not where or SYSTEM_LIBRARIES.fullmatch(name):
            continue
        if not where.startswith("/"):
            raise SystemExit(f"contents.py: error: {program} needs {name}, which is {where}")
        paths.add(pathlib.Path(where.split()[0]).resolve())
    return paths


def package_of(library: pathlib.Path) -> str:
    try:
        return call("dpkg-query", "--search", library).split(":", 1)[0]
    except subprocess.CalledProcessError:
        raise SystemExit(
            f"contents.py: error: {library} belongs to no package of the distribution"
        ) from None


def describe(package: str) -> Part:
    fields = call("dpkg-query", "--show", "-f", "${source:Package} ${Version}", package).split()
    source, version = fields
    return part_of(package, version, source)


def part_of(package: str, version: str, source: str) -> Part:
    if source not in LICENSES:
        raise SystemExit(
            f"contents.py: error: {package} of {source} has no known licence: add it to LICENSES"
        )
    return Part(package, version, LICENSES[source], f"pkg:deb/debian/{package}@{version}")


def static_parts(prefix: pathlib.Path) -> list[Part]:
    """The packages whose static libraries are inside the programs."""
    lines = (prefix / "contents.tsv").read_text().splitlines()
    return [part_of(*line.split("\t")) for line in lines]


def parts_of_the_build() -> list[Part]:
    """CUDA's runtime, which is linked statically, and CUTLASS, of which the kernels are made."""
    fetch = (ROOT / "deploy" / "fetch_cutlass.sh").read_text()
    cutlass = re.search(r"^version=([\d.]+)$", fetch, re.MULTILINE)
    assert cutlass is not None
    purl = f"pkg:pypi/nvidia-cutlass@{cutlass[1]}"
    parts = [Part("nvidia-cutlass", cutlass[1], "BSD-3-Clause", purl)]
    header = pathlib.Path("/usr/local/cuda/include/cuda_runtime_api.h")
    if header.exists():
        number = re.search(r"#define CUDART_VERSION +(\d+)", header.read_text())
        assert number is not None
        version = f"{int(number[1]) // 1000}.{int(number[1]) % 1000 // 10}"
        # NVIDIA's licence has no identifier in SPDX's list.
        purl = f"pkg:generic/cuda-cudart@{version}"
        parts.append(Part("cuda-cudart-static", version, "LicenseRef-NVIDIA-CUDA-EULA", purl))
    return parts


def spdx(name: str, version: str, parts: list[Part]) -> dict[str, object]:
    created = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.UTC)
    packages = []
    for part in [Part(name, version, "Apache-2.0"), *parts]:
        package: dict[str, object] = {
            "SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.]", "-", part.name),
            "name": part.name,
            "versionInfo": part.version,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False,
            "licenseConcluded": part.license,
            "licenseDeclared": part.license,
            "copyrightText": "NOASSERTION",
        }
        if part.purl:
            package["externalRefs"] = [
                {
                    "referenceCategory": "PACKAGE-MANAGER",
                    "referenceType": "purl",
                    "referenceLocator": part.purl,
                }
            ]
        packages.append(package)
    ours, *others = (package["SPDXID"] for package in packages)
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", ours)]
    relations += [(ours, "CONTAINS", each) for each in others]
    document: dict[str, object] = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{name}-{version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/{name}-{version}-{created:%Y%m%d%H%M%S}",
        "creationInfo": {
            "created": f"{created:%Y-%m-%dT%H:%M:%SZ}",
            "creators": ["Tool: contents.py"],
        },
        "packages": packages,
        "relationships": [
            {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}
            for one, kind, other in relations
        ],
    }
    if any(part.license.startswith("LicenseRef-") for part in parts):
        document["hasExtractedLicensingInfos"] = [
            {
                "licenseId": "LicenseRef-NVIDIA-CUDA-EULA",
                "name": "NVIDIA CUDA Toolkit EULA",
                "extractedText": "https://docs.nvidia.com/cuda/eula/",
            }
        ]
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("programs", type=pathlib.Path, nargs="+")
    parser.add_argument("--name", required=True, help="name of our package")
    parser.add_argument("--version", required=True, help="version of our package")
    parser.add_argument("--licenses", type=pathlib.Path, required=True, help="folder to write")
    parser.add_argument("--sbom", type=pathlib.Path, required=True, help="file to write")
    parser.add_argument("--static", type=pathlib.Path, help="prefix of static libraries")
    arguments = parser.parse_args()
    libraries = set().union(*(libraries_of(program) for program in arguments.programs))
    packages = sorted(
        {package_of(library) for library in libraries} | set(HEADERS.get(arguments.name, ()))
    )
    arguments.licenses.mkdir(parents=True, exist_ok=True)
    for package in packages:
        text = pathlib.Path("/usr/share/doc") / package / "copyright"
        shutil.copyfile(text, arguments.licenses / f"{package}.txt")
    # CUTLASS's package has its licence only in the headers.
    for header in ROOT.glob("build/cutlass/**/include/cutlass/cutlass.h"):
        notice = header.read_text().split("*/", maxsplit=1)[0]
        text = re.sub(r"^[/* ]*", "", notice, flags=re.MULTILINE).strip() + "\n"
        (arguments.licenses / "nvidia-cutlass.txt").write_text(text)
    linked = [] if arguments.static is None else static_parts(arguments.static)
    for part in linked:
        text = arguments.static / "licenses" / f"{part.name}.txt"
        shutil.copyfile(text, arguments.licenses / text.name)
    parts = [describe(package) for package in packages] + linked + parts_of_the_build()
    arguments.sbom.write_text(
        json.dumps(spdx(arguments.name, arguments.version, parts), indent=1) + "\n"
    )
    print(f"{arguments.sbom}: {len(parts)} parts")


if __name__ == "__main__":
    main()
