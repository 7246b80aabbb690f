"""Finds and reads tensors in checkpoints that PyTorch has written, without running their pickles.

Pickle files are read by `torch.load(weights_only=True)`. Classes that it does not allow, such as
the arguments and random states in Megatron's files, are replaced by `_Inert`, which ignores what it
is made of: nothing that a file names is imported or called. The index of a distributed checkpoint
is a plain pickle, which `_MetadataUnpickler` reads in the same way.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from logprobd._head_folder import ExportError

try:
    import torch

    torch.serialization.safe_globals  # noqa: B018  (absent before PyTorch 2.6)
except (ImportError, AttributeError):
    raise ExportError(
        "exporting a head from a PyTorch checkpoint needs PyTorch 2.6 or later: "
        "pip install 'torch>=2.6'"
    ) from None

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_HF_INDEX = "pytorch_model.bin.index.json"
_HF_FILE = "pytorch_model.bin"
_DCP_INDEX = ".metadata"
_MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
_MEGATRON_RANK = re.compile(r"mp_rank_(\d+)((?:_\d+)*)")
_MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")


class Checkpoint(ABC):
    """The tensors of a checkpoint. Nested dictionaries are one level, with names joined by "."."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all tensors."""

    @abstractmethod
    def read(self, name: str) -> tuple[torch.Tensor, list[Path]]:
        """Returns a tensor, and the files that hold it."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a file or folder. Raises ExportError, which says what it is instead."""
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ExportError(f"{path}: use logprobctl export-head for safetensors files")
        if path.suffix not in PICKLE_SUFFIXES:
            raise ExportError(f"{path} is no {', '.join(PICKLE_SUFFIXES)} file and no folder")
        return PickleFile(path)
    if not path.is_dir():
        raise ExportError(f"{path} does not exist")
    if (path / _MEGATRON_LATEST).is_file():
        path = _latest_iteration(path)
    if (path / _DCP_INDEX).is_file():
        return DistributedCheckpoint(path)
    if any(_MEGATRON_RANK.fullmatch(entry.name) for entry in path.iterdir()):
        return MegatronRanks(path)
    if (path / _HF_INDEX).is_file():
        return IndexedPickleFiles(path / _HF_INDEX)
    if (path / _HF_FILE).is_file():
        return PickleFile(path / _HF_FILE)
    raise ExportError(_what_is_missing(path))


def _latest_iteration(path: Path) -> Path:
    """Returns the folder of the checkpoint that Megatron's tracker file names."""
    text = (path / _MEGATRON_LATEST).read_text().strip()
    if text != "release" and not text.isdecimal():
        raise ExportError(f"{path / _MEGATRON_LATEST} contains {text!r}, not an iteration")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ExportError(f"{folder}, which {_MEGATRON_LATEST} names, is missing")
    return folder


def _plain_name(name: Any, source: Path) -> str:
    """Returns a relative path of an index. Raises ExportError if it leads out of the folder."""
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ExportError(f"{source} names the file {name!r}, which is not below its folder")
    return name


def _what_is_missing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if any(name.endswith(".safetensors") for name in names):
        return f"{path} contains safetensors files: use logprobctl export-head"
    if any(name.endswith(".distcp") for name in names):
        return f"{path} has no {_DCP_INDEX}: the checkpoint is incomplete"
    if "metadata.json" in names and "zarr" in (path / "metadata.json").read_text():
        return f"{path} is in Megatron's zarr format: convert it to torch_dist with Megatron"
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return f"{path} has no {_HF_FILE}; to use {pickles[0]}, give the path of that file"
    return (
        f"{path} contains no checkpoint: neither {_HF_FILE} nor its index, {_DCP_INDEX} "
        f"(torch.distributed.checkpoint, Megatron's torch_dist), mp_rank_XX nor {_MEGATRON_LATEST}"
    )


class _Inert:
    """Stands for an object of a class that is not loaded. Keeps a dictionary of attributes."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


def load_pickle(path: Path) -> Any:
    """Loads a file of torch.save; tensors stay on disk until they are used, if the file allows."""
    is_zip = zipfile.is_zipfile(path)
    stubs: list[Any] = []
    try:
        if is_zip:  # the format of the last years; an older file must do without stubs
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            stubs = [(_Inert, name) for name in unsafe]
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a malformed pickle raises almost anything
        # torch wraps the reason in advice to trust the file.
        reason = str(error.__context__ or error).split("\n", maxsplit=1)[0]
        raise ExportError(f"{path} cannot be read with weights_only=True: {reason}") from error


def _flatten(value: Any, prefix: str, found: dict[str, torch.Tensor]) -> None:
    for key, child in value.items():
        name = f"{prefix}{key}"
        if isinstance(child, dict):
            _flatten(child, f"{name}.", found)
        elif isinstance(child, torch.Tensor):
            found[name] = child


def _tensors_of(state: Any, path: Path) -> dict[str, torch.Tensor]:
    if not isinstance(state, dict):
        raise ExportError(f"{path} contains a {type(state).__name__}, not a dictionary of tensors")
    found: dict[str, torch.Tensor] = {}
    _flatten(state, "", found)
    return found


class PickleFile(Checkpoint):
    """One file of torch.save."""

    def __init__(self, file: Path) -> None:
        super().__init__(file.parent)
        self._file = file
        self._tensors = _tensors_of(load_pickle(file), file)

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> tuple[torch.Tensor, list[Path]]:
        return self._tensors[name], [self._file]


class IndexedPickleFiles(Checkpoint):
    """Several files of torch.save and an index. Only the files of the head need to be present."""

    def __init__(self, index: Path) -> None:
        super().__init__(index.parent)
        self._index = index
        try:
            self._files = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(f"{index} is malformed: {error!r}") from None

    def names(self) -> list[str]:
        return list(self._files)

    def read(self, name: str) -> tuple[torch.Tensor, list[Path]]:
        file = self.folder / _plain_name(self._files[name], self._index)
        if not file.is_file():
            raise ExportError(f"{file}, in which the index places {name}, is missing")
        tensors = _tensors_of(load_pickle(file), file)
        if name not in tensors:
            raise ExportError(f"{file} has no {name}, which the index places there")
        return tensors[name], [self._index, file]


class MegatronRanks(Checkpoint):
    """A legacy checkpoint of Megatron: mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt.

    Tensor-parallel rank TT holds a part of the vocabulary. The head is in the last pipeline stage
    PPP, the embedding in the first. Expert ranks EEE hold the same copies.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ranks: dict[int, list[Path]] = {}
        for entry in sorted(folder.iterdir()):
            match = _MEGATRON_RANK.fullmatch(entry.name)
            if match is not None:
                self._ranks.setdefault(int(match[1]), []).append(_rank_file(entry))
        self._parts: dict[Path, dict[str, torch.Tensor]] = {}
        size = len(self._ranks)
        for file in (file for files in self._ranks.values() for file in files):
            state = load_pickle(file)
            self._parts[file] = _tensors_of(state, file)
            size = getattr(state.get("args"), "tensor_model_parallel_size", size)
        missing = sorted(set(range(size)) - self._ranks.keys())
        if missing:
            raise ExportError(
                f"{folder} lacks tensor-parallel rank {missing[0]} of {size} "
                f"(mp_rank_{missing[0]:02d}...)"
            )

    def names(self) -> list[str]:
        return list({name: None for file in self._ranks[0] for name in self._parts[file]})

    def read(self, name: str) -> tuple[torch.Tensor, list[Path]]:
        parts = []
        files = []
        for rank in sorted(self._ranks):
            file = next((file for file in self._ranks[rank] if name in self._parts[file]), None)
            if file is None:
                raise ExportError(f"tensor-parallel rank {rank} in {self.folder} has no {name}")
            parts.append(self._parts[file][name])
            files.append(file)
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1:
            raise ExportError(f"the ranks in {self.folder} have parts of {name} of shapes {shapes}")
        return torch.cat(parts) if len(parts) > 1 else parts[0], files


def _rank_file(folder: Path) -> Path:
    for name in _MEGATRON_FILES:
        if (folder / name).is_file():
            return folder / name
    raise ExportError(f"{folder} has no {' or '.join(_MEGATRON_FILES)}")


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the index of a distributed checkpoint. Of all that it names, only sizes are kept."""

    def find_class(self, module: str, name: str) -> Any:
        return _size if (module, name) == ("torch", "Size") else _Inert


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


class DistributedCheckpoint(Checkpoint):
    """A checkpoint of torch.distributed.checkpoint, also as Megatron writes it (torch_dist).

    The index maps each tensor to chunks, and each chunk to a range of bytes of a .distcp file,
    which torch.save has written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index = folder / _DCP_INDEX
        try:
            with self._index.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            self._sizes = {
                name: tuple(entry.size)
                for name, entry in metadata.state_dict_metadata.items()
                if hasattr(entry, "chunks")
            }
            self._chunks: dict[str, list[Any]] = {}
            for key, place in metadata.storage_data.items():
                if key.fqn in self._sizes:
                    self._chunks.setdefault(key.fqn, []).append((key.offset, place))
        except Exception as error:  # a malformed pickle raises almost anything
            raise ExportError(f"{self._index} is malformed: {error}") from error

    def names(self) -> list[str]:
        return list(self._sizes)

    def read(self, name: str) -> tuple[torch.Tensor, list[Path]]:
        size = self._sizes[name]
        tensor = None
        num_read = 0
        files = []
        for offset, place in self._chunks.get(name, []):
            if getattr(place, "transform_descriptors", None):
                raise ExportError(f"{name} in {self.folder} is compressed, which is not supported")
            file = self.folder / _plain_name(place.relative_path, self._index)
            chunk = _load_range(file, place.offset, place.length)
            if tensor is None:
                tensor = torch.empty(size, dtype=chunk.dtype)
            region = tuple(
                slice(begin, begin + length)
                for begin, length in zip(offset, chunk.shape, strict=True)
            )
            if tensor[region].shape != chunk.shape:
                raise ExportError(f"{name}: a chunk in {file} is outside the tensor's size {size}")
            tensor[region] = chunk
            num_read += chunk.numel()
            files.append(file)
        if tensor is None or num_read != tensor.numel():
            raise ExportError(f"{self.folder} has only {num_read} elements of {name}, size {size}")
        return tensor, [self._index, *dict.fromkeys(files)]


def _load_range(file: Path, offset: int, length: int) -> torch.Tensor:
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(length)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ExportError(f"{file} is missing: the checkpoint is incomplete") from None
    except Exception as error:  # a malformed pickle raises almost anything
        raise ExportError(f"{file} cannot be read: {error}") from error
    if not isinstance(tensor, torch.Tensor):
        raise ExportError(f"{file} contains a {type(tensor).__name__} in the place of a tensor")
    return tensor
