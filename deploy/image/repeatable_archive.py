"""Rewrites an image in a docker-archive without the random names of the containers that built it.

    repeatable_archive.py ARCHIVE.tar

The same layers and settings then give the same bytes. Loading needs only what is kept: manifest.json, the settings and
the layers.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path


def settings_without_names(text: bytes) -> bytes:
    """Returns an image's settings without the id and the host name of a container."""
    settings = json.loads(text)
    settings.pop("container", None)
    for part in ("config", "container_config"):
        settings.get(part, {}).pop("Hostname", None)
    return json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()


def rewrite(archive: Path) -> None:
    rewritten = archive.with_suffix(".part")
    with tarfile.open(archive) as old, tarfile.open(rewritten, "w") as new:

        def contents(name: str) -> io.BufferedReader:
            file = old.extractfile(name)
            assert file is not None
            return file

        def add(name: str, size: int, data: io.BufferedIOBase) -> None:
            entry = tarfile.TarInfo(name)  # owned by root, from 1970
            entry.size = size
            new.addfile(entry, data)

        (image,) = json.load(contents("manifest.json"))
        settings = settings_without_names(contents(image["Config"]).read())
        image["Config"] = f"{hashlib.sha256(settings).hexdigest()}.json"
        manifest = json.dumps([image], sort_keys=True).encode()
        for name, text in ((image["Config"], settings), ("manifest.json", manifest)):
            add(name, len(text), io.BytesIO(text))
        for name in image["Layers"]:
            add(name, old.getmember(name).size, contents(name))
    os.replace(rewritten, archive)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
