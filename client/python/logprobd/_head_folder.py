"""Writes the folder of a head that is stored alone, in the format of `logprobctl export-head`.

The folder contains model.safetensors, config.json (head_config.py) and manifest.json. The same
input gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logprobd.errors import LogprobdError
from logprobd.head_config import CONFIG_FILE, json_text

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
BLOCK_BYTES = 4 << 20

Progress = Callable[[str, int, int], None]
"""Is told what is done ("hashing x.bin"), and how many bytes of how many."""


class ExportError(LogprobdError):
    """A head that cannot be exported. The message says what to change."""


@dataclass(frozen=True)
class Tensor:
    """A tensor to write."""

    name: str
    dtype: str
    """"BF16", "F16" or "F32"."""
    shape: tuple[int, ...]
    data: memoryview
    """The bytes, little-endian and row-major."""
    source: str
    """Name in the checkpoint."""
    source_files: tuple[Path, ...]


@dataclass(frozen=True)
class Sources:
    """The files that an export has read, which are named relative to `folder`."""

    folder: Path
    files: tuple[Path, ...]

    def name_of(self, file: Path) -> str:
        return Path(os.path.relpath(file, self.folder)).as_posix()


def write_head_folder(
    out: Path,
    tensors: list[Tensor],
    config: str,
    sources: Sources,
    *,
    version: str,
    force: bool,
    progress: Progress,
) -> str:
    """Writes the folder under a temporary name and renames it.

    `tensors` are the weight and, after it, the bias if there is one. Returns the sha256 of the
    head, which `logprobctl weights list` shows. Raises ExportError if `out` must not be replaced or
    cannot be written.
    """
    try:
        with _staged_folder(out, force) as folder:
            digests = {file: _hash_file(file, sources, progress) for file in sources.files}
            manifest = {
                "format": 1,
                "logprobd_version": version,
                "sources": {sources.name_of(file): entry for file, entry in digests.items()},
                "tensors": {
                    tensor.name: {
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "source": tensor.source,
                        "source_files": [sources.name_of(file) for file in tensor.source_files],
                    }
                    for tensor in tensors
                },
                "head_sha256": _digest([tensor.data for tensor in tensors]),
                "files": {
                    WEIGHTS_FILE: _write(
                        folder / WEIGHTS_FILE, list(_safetensors(tensors)), progress
                    ),
                    CONFIG_FILE: _write(folder / CONFIG_FILE, [config.encode()], progress),
                },
            }
            _write(folder / MANIFEST_FILE, [json_text(manifest).encode()], progress)
            return str(manifest["head_sha256"])
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error}") from error


def _safetensors(tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the parts of a safetensors file.

    Tensors are in the order that other writers use, which aligns each of them: by decreasing size
    of their elements, then by name.
    """
    ordered = sorted(tensors, key=lambda tensor: (tensor.dtype != "F32", tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in ordered:
        end = begin + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in ordered:
        yield tensor.data


def _blocks(part: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(part)
    for at in range(0, len(view), BLOCK_BYTES):
        yield view[at : at + BLOCK_BYTES]


def _digest(parts: list[memoryview]) -> str:
    sha256 = hashlib.sha256()
    for part in parts:
        for block in _blocks(part):
            sha256.update(block)
    return sha256.hexdigest()


def _write(path: Path, parts: list[bytes | memoryview], progress: Progress) -> dict[str, Any]:
    """Writes a file and waits until it is on disk. Returns its entry in the manifest."""
    sha256 = hashlib.sha256()
    total = sum(len(part) for part in parts)
    done = 0
    with path.open("xb") as file:
        for part in parts:
            for block in _blocks(part):
                progress(f"writing {path.name}", done, total)
                file.write(block)
                sha256.update(block)
                done += len(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": total, "sha256": sha256.hexdigest()}


def _hash_file(path: Path, sources: Sources, progress: Progress) -> dict[str, Any]:
    sha256 = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            progress(f"hashing {sources.name_of(path)}", done, total)
            sha256.update(block)
            done += len(block)
    return {"bytes": done, "sha256": sha256.hexdigest()}


def check_replaceable(out: Path, force: bool) -> None:
    """Checks that `out` is absent, an empty folder or, with `force`, the folder of an export."""
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise ExportError(f"{out} exists and is not a folder")
    names = {entry.name for entry in out.iterdir()}
    if names and not force:
        raise ExportError(f"{out} exists; --force replaces a folder that an export has written")
    foreign = sorted(names - {WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE})
    if names and (foreign or MANIFEST_FILE not in names):
        why = f"it contains {foreign[0]}" if foreign else f"it has no {MANIFEST_FILE}"
        raise ExportError(
            f"{out} was not written by an export ({why}), so --force does not delete it: remove "
            "it, or name another folder"
        )


@contextlib.contextmanager
def _staged_folder(out: Path, force: bool) -> Iterator[Path]:
    """Provides a new folder, which gets the name `out` unless the block raises."""
    check_replaceable(out, force)
    staged = out.with_name(f"{out.name}.partial-{os.getpid()}")
    replaced = out.with_name(f"{staged.name}.replaced")
    staged.mkdir()
    try:
        yield staged
        check_replaceable(out, force)
        if os.path.lexists(out):
            out.rename(replaced)
        try:
            staged.rename(out)
        except OSError:
            if replaced.exists():
                replaced.rename(out)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
