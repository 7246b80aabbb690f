"""Writes the folder of a head that is stored alone, in the format of `logprobctl export-head`.

The folder contains model.safetensors, config.json and manifest.json. The rules for config.json are
those of server/weights/head_config.cc, and a test compares the two. The same input gives the same
bytes.
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

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
BLOCK_BYTES = 4 << 20

_NESTED_KEYS = ("text_config", "llm_config", "thinker_config", "language_config")
_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
_HEAD_KEYS = frozenset(
    (
        *("architectures", "model_type", "lm_head_bias", "logits_scaling", "dim_model_base"),
        *("final_logit_softcapping", "logit_scale", "lm_head_multiplier", "output_multiplier"),
        *("output_multiplier_scale", "mup_output_mult"),
    )
)
_HARMLESS_KEYS = frozenset(
    ("num_logits_to_keep", "logits_to_keep", "mup_denominator", "logit_scale_init_value")
)
_HARMLESS_PARTS = ("attn", "attention", "router", "gate")

Progress = Callable[[str, int, int], None]
"""Is told what is done ("hashing x.bin"), and how many bytes of how many."""


class ExportError(LogprobdError):
    """A head that cannot be exported. The message says what to change."""


class Config:
    """The parts of a config.json that describe a head. An empty one describes nothing."""

    def __init__(self, text: str = "{}", path: str = CONFIG_FILE) -> None:
        try:
            # Python writes NaN and Infinity, which are not JSON; the server reads them as null.
            top = json.loads(text, parse_constant=lambda _: None)
        except ValueError as error:
            raise ExportError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(top, dict):
            raise ExportError(f"{path} is not a JSON object")
        self._top: dict[str, Any] = top

    def _levels(self) -> list[dict[str, Any]]:
        """Returns the objects in which keys are searched, innermost first."""
        text = _object(self._top, "text_config")
        text = _object(self._top, "llm_config") if text is None else text
        thinker = _object(self._top, "thinker_config") if text is None else None
        if thinker is not None:
            text = _object(thinker, "text_config")
        elif text is None:
            text = _object(self._top, "language_config")
        return [level for level in (text, thinker, self._top) if level is not None]

    def find(self, key: str) -> Any:
        for level in self._levels():
            if key in level:
                return level[key]
        return None

    @property
    def hidden_size(self) -> int | None:
        sizes = [self._dimension(key) for key in _HIDDEN_KEYS]
        return next((size for size in sizes if size is not None), None)

    @property
    def vocab_size(self) -> int | None:
        return self._dimension("vocab_size")

    def _dimension(self, key: str) -> int | None:
        value = self.find(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ExportError(f"{key} of {CONFIG_FILE} is {value!r}, expected a positive integer")
        return value

    def text_for_head(self, hidden_size: int, vocab_size: int) -> str:
        """Returns the config.json of the head alone."""
        sizes = {
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "tie_word_embeddings": False,
        }
        return _json(_head_keys_of(self._top) | sizes)


def _object(parent: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = parent.get(key)
    if value is not None and not isinstance(value, dict):
        raise ExportError(f"{key} of {CONFIG_FILE} is not an object")
    return value


def _head_keys_of(level: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in level.items():
        if key in _NESTED_KEYS:
            if isinstance(value, dict):
                kept[key] = _head_keys_of(value)
        elif key in _HEAD_KEYS or _is_suspicious(key):
            kept[key] = value
    return kept


def _is_suspicious(key: str) -> bool:
    """Returns whether a key may change the logits and is not understood: the server warns of it."""
    lower = key.lower().replace("warmup", "").replace("warm_up", "")
    return (
        ("logit" in lower or "mup" in lower)
        and lower not in _HARMLESS_KEYS
        and not any(part in lower for part in _HARMLESS_PARTS)
    )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


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
            _write(folder / MANIFEST_FILE, [_json(manifest).encode()], progress)
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
