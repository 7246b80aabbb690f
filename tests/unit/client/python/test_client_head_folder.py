"""The folder of an exported head: its bytes and digests, and what it may replace."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
from logprobd import _head_folder
from logprobd._head_folder import (
    ExportError,
    Sources,
    Tensor,
    check_replaceable,
    write_head_folder,
)


def tensor(name, dtype, data, *files):
    return Tensor(name, dtype, (len(data),), memoryview(data), f"old.{name}", files)


WEIGHT, BIAS = tensor("w", "BF16", b"weights!"), tensor("w.bias", "F32", b"bias")


def write(out, tensors=(WEIGHT,), files=(), *, force=False, progress=lambda *_: None):
    sources = Sources(out.parent, tuple(files))
    return write_head_folder(
        out, list(tensors), '{"a": 1}\n', sources, version="7", force=force, progress=progress
    )


def read(out):
    """Returns the header of a safetensors file, its number of bytes, and the data after it."""
    data = (out / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), length, data[8 + length :]


def entry(data):
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("length", range(1, 10))
def test_the_largest_elements_come_first_and_are_aligned(tmp_path, length):
    name = "n" * length
    tensors = [
        tensor(name, "BF16", b"ab"),
        tensor("z", "F16", b"cdef"),
        tensor("y", "F32", b"ghij"),
    ]

    write(tmp_path / "out", tensors)

    header, header_bytes, data = read(tmp_path / "out")
    assert header_bytes % 8 == 0
    assert header_bytes - len(json.dumps(header, separators=(",", ":"))) in range(8)
    assert header.pop("__metadata__") == {"format": "pt"}
    assert list(header) == ["y", name, "z"]
    assert [each["data_offsets"] for each in header.values()] == [[0, 4], [4, 6], [6, 10]]
    assert header["z"]["dtype"] == "F16"
    assert header["z"]["shape"] == [4]
    assert data == b"ghijabcdef"


def test_the_digest_of_a_head_is_that_of_its_weight_followed_by_its_bias(tmp_path, monkeypatch):
    monkeypatch.setattr(_head_folder, "BLOCK_BYTES", 3)

    digest = write(tmp_path / "out", [WEIGHT, BIAS])

    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert digest == manifest["head_sha256"] == hashlib.sha256(b"weights!bias").hexdigest()
    assert read(tmp_path / "out")[2] == b"biasweights!"
    for name, each in manifest["files"].items():
        assert each == entry((tmp_path / "out" / name).read_bytes())


def test_files_are_read_and_written_in_blocks_of_which_the_caller_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(_head_folder, "BLOCK_BYTES", 4)
    source = tmp_path / "src.bin"
    source.write_bytes(b"0123456789")
    steps = []

    write(tmp_path / "out", files=[source], progress=lambda *step: steps.append(step))

    assert steps[:3] == [("hashing src.bin", done, 10) for done in (0, 4, 8)]
    assert [step for step in steps if "config" in step[0]] == [
        ("writing config.json", done, 9) for done in (0, 4, 8)
    ]
    weights = [step for step in steps if "model" in step[0]]
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert [step[1] for step in weights] == list(range(0, size, 4))
    assert {step[2] for step in weights} == {size}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sources"] == {"src.bin": entry(b"0123456789")}


def test_the_manifest_says_where_each_tensor_comes_from(tmp_path):
    tensors = [tensor("w", "BF16", b"abcd", tmp_path / "a", tmp_path / "b" / "c"), BIAS]

    write(tmp_path / "out", tensors)

    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["tensors"] == {
        "w": {"dtype": "BF16", "shape": [4], "source": "old.w", "source_files": ["a", "b/c"]},
        "w.bias": {"dtype": "F32", "shape": [4], "source": "old.w.bias", "source_files": []},
    }
    assert (manifest["format"], manifest["logprobd_version"]) == (1, "7")


# What may be replaced


def export(path):
    path.mkdir()
    for name in ("model.safetensors", "config.json", "manifest.json"):
        (path / name).touch()


def without_manifest(path):
    export(path)
    (path / "manifest.json").unlink()


def with_more(path):
    export(path)
    (path / "notes.txt").touch()
    (path / "zzz.txt").touch()


def link_to_a_folder(path):
    path.with_name("target").mkdir()
    path.symlink_to(path.with_name("target"))


def broken_link(path):
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize(
    ("make", "without_force", "with_force"),
    [
        (lambda path: None, None, None),
        (Path.mkdir, None, None),
        (export, "exists; --force replaces a folder that an export has written", None),
        (without_manifest, "exists; --force", r"\(it has no manifest.json\), so --force does not"),
        (with_more, "exists; --force", r"\(it contains notes.txt\), so --force does not delete it"),
        (Path.touch, "exists and is not a folder", "exists and is not a folder"),
        (link_to_a_folder, "exists and is not a folder", "exists and is not a folder"),
        (broken_link, "exists and is not a folder", "exists and is not a folder"),
    ],
)
def test_only_an_empty_folder_or_by_force_an_export_is_replaced(
    tmp_path, make, without_force, with_force
):
    out = tmp_path / "out"
    make(out)

    for message, force in ((without_force, False), (with_force, True)):
        if message is None:
            check_replaceable(out, force)
        else:
            with pytest.raises(ExportError, match=message):
                check_replaceable(out, force)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_appears_during_an_export_is_kept(tmp_path, force):
    out = tmp_path / "out"

    def appear(step, done, total):
        if step == "writing manifest.json":
            with_more(out)

    with pytest.raises(ExportError):
        write(out, force=force, progress=appear)

    assert (out / "notes.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_cannot_be_named_leaves_the_old_one_in_its_place(
    tmp_path, monkeypatch, exists
):
    out = tmp_path / "out"
    if exists:
        write(out)
    rename = Path.rename

    def refuse(self, target):
        if (self / "model.safetensors").exists() and target == out and ".replaced" not in self.name:
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)

    with pytest.raises(ExportError, match="cannot write .*: no space left"):
        write(out, [BIAS], force=True)

    assert [path.name for path in tmp_path.iterdir()] == ["out"] * exists
    assert not exists or read(out)[2] == b"weights!"


def test_an_empty_folder_becomes_the_export(tmp_path):
    (tmp_path / "out").mkdir()

    write(tmp_path / "out")

    assert read(tmp_path / "out")[2] == b"weights!"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
