"""Exports heads from small checkpoints that torch has written, without a server.

The layouts of Megatron are written by hand, as its sources describe them.
"""

import argparse
import hashlib
import io
import json
import pathlib
import pickle
import re
import subprocess
import sys
import types

import logprobd
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from logprobd import _head_folder
from logprobd import export_head as tool
from logprobd._head_folder import ExportError
from logprobd.errors import InvalidArgument
from logprobd.export_head import export_head
from logprobd.head_config import HeadConfig

ROOT = pathlib.Path(__file__).resolve().parents[4]
VOCAB, HIDDEN = 11, 4
CONFIG = {"model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB}
FILES = ["config.json", "manifest.json", "model.safetensors"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_config(folder: pathlib.Path, **more: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | more))


def exported_tensors(out: pathlib.Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(out / "model.safetensors")


def digest(*tensors: torch.Tensor) -> str:
    bits = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(bits)).hexdigest()


@pytest.fixture
def src(tmp_path):
    """The folder of a checkpoint with a config.json."""
    write_config(tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_bin_file_becomes_a_folder_with_the_head_alone(src, out):
    head = random(VOCAB, HIDDEN)
    bias = random(VOCAB, seed=1, dtype=torch.float32)
    torch.save(
        {
            "model.embed_tokens.weight": random(VOCAB, HIDDEN, seed=2),
            "lm_head.weight": torch.nn.Parameter(head),
            "lm_head.bias": bias,
        },
        src / "pytorch_model.bin",
    )

    result = export_head(src, out)

    found = exported_tensors(out)
    assert list(found) == ["lm_head.bias", "lm_head.weight"]
    assert torch.equal(found["lm_head.weight"], head)
    assert torch.equal(found["lm_head.bias"], bias)
    assert json.loads((out / "config.json").read_text()) == CONFIG | {"tie_word_embeddings": False}
    assert (result.sha256, result.has_bias, result.warnings) == (digest(head, bias), True, ())
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "src"]


def test_manifest_names_sources_tensors_and_files(src, out):
    write_config(src, tie_word_embeddings=True)
    torch.save({"wte.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")

    result = export_head(src / "pytorch_model.bin", out)

    def entry(path: pathlib.Path) -> dict[str, object]:
        data = path.read_bytes()
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    assert json.loads((out / "manifest.json").read_text()) == {
        "format": 1,
        "logprobd_version": logprobd.__version__,
        "head_sha256": result.sha256,
        "sources": {name: entry(src / name) for name in ("config.json", "pytorch_model.bin")},
        "files": {name: entry(out / name) for name in ("config.json", "model.safetensors")},
        "tensors": {
            "lm_head.weight": {
                "dtype": "BF16",
                "shape": [VOCAB, HIDDEN],
                "source": "wte.weight",
                "source_files": ["pytorch_model.bin"],
            }
        },
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_dtype_is_kept(src, out, dtype):
    head = random(VOCAB, HIDDEN, dtype=dtype)
    torch.save({"lm_head.weight": head}, src / "pytorch_model.bin")

    export_head(src, out)

    found = exported_tensors(out)["lm_head.weight"]
    assert found.dtype == dtype
    assert torch.equal(found, head)


def test_other_dtypes_are_refused(src, out):
    torch.save(
        {"lm_head.weight": random(VOCAB, HIDDEN, dtype=torch.float64)}, src / "pytorch_model.bin"
    )

    with pytest.raises(ExportError, match="float64; a head must be"):
        export_head(src, out)


def test_a_tied_model_uses_its_embedding_unless_another_head_is_stored(src, out):
    write_config(src, tie_word_embeddings=True)
    embedding = random(VOCAB, HIDDEN)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.float()}
    torch.save(state, src / "pytorch_model.bin")

    assert export_head(src, out).source == "model.embed_tokens.weight"
    assert torch.equal(exported_tensors(out)["lm_head.weight"], embedding)

    state["lm_head.weight"][VOCAB - 1, HIDDEN - 1] += 1
    torch.save(state, src / "pytorch_model.bin")
    with pytest.raises(ExportError, match="different values.*--head-tensor lm_head.weight or"):
        export_head(src, out, force=True)
    assert export_head(src, out, head_tensor="lm_head.weight", force=True).dtype == "F32"


@pytest.mark.parametrize(
    ("head", "embedding", "config", "message"),
    [
        # Only valid rows are compared.
        (random(12, HIDDEN), random(12, HIDDEN)[:VOCAB], {}, None),
        (random(12, HIDDEN)[:VOCAB], random(12, HIDDEN), {}, None),
        (random(VOCAB, HIDDEN), random(VOCAB, HIDDEN, seed=1), {}, "different values"),
        (random(VOCAB, HIDDEN), random(VOCAB, HIDDEN)[:10], {}, "cannot be the same .* of 11 ids"),
        (random(VOCAB, HIDDEN)[:10], random(VOCAB, HIDDEN), {}, "cannot be the same"),
        (random(12, HIDDEN), random(12, HIDDEN)[:11], {"vocab_size": None}, "different values"),
        (random(12, HIDDEN), random(12, HIDDEN), {"vocab_size": None}, None),
        # The other one cannot be the head, or may be.
        (random(VOCAB, HIDDEN), random(VOCAB, 5), {}, "cannot be the same"),
        (random(VOCAB, 5), random(VOCAB, HIDDEN), {}, "different values"),
        (random(VOCAB, HIDDEN), random(VOCAB, 5), {"hidden_size": None}, "different values"),
        (random(VOCAB, HIDDEN), random(VOCAB), {}, "cannot be the same"),
        (random(VOCAB), random(VOCAB, HIDDEN), {}, "cannot be the same"),
        (random(VOCAB, HIDDEN), random(VOCAB, HIDDEN).double(), {}, "cannot be the same"),
        (random(VOCAB, HIDDEN).double(), random(VOCAB, HIDDEN), {}, "cannot be the same"),
        # NaN equals NaN.
        (torch.full((VOCAB, HIDDEN), torch.nan), torch.full((VOCAB, HIDDEN), torch.nan), {}, None),
        (torch.full((VOCAB, HIDDEN), torch.nan), random(VOCAB, HIDDEN), {}, "different values"),
    ],
)
def test_head_and_embedding_of_a_tied_model_are_compared(
    src, out, head, embedding, config, message
):
    write_config(src, tie_word_embeddings=True, **config)
    state = {"model.embed_tokens.weight": embedding.clone(), "lm_head.weight": head.clone()}
    torch.save(state, src / "pytorch_model.bin")

    if message is None:
        assert export_head(src, out).source == "model.embed_tokens.weight"
    else:
        with pytest.raises(ExportError, match=message):
            export_head(src, out)


def test_the_rows_that_are_kept_are_compared(src, out):
    write_config(src, tie_word_embeddings=True)
    head = random(VOCAB, HIDDEN)
    embedding = head.clone()
    embedding[5] += 1
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    torch.save(state, src / "pytorch_model.bin")

    assert export_head(src, out, vocab_size=5).vocab_size == 5
    with pytest.raises(ExportError, match="different values"):
        export_head(src, out, vocab_size=6, force=True)


def test_a_bias_of_the_logits_becomes_that_of_the_head(src, out):
    write_config(src, model_type="bart")
    state = {"model.shared.weight": random(VOCAB, HIDDEN), "final_logits_bias": random(1, VOCAB)}
    torch.save(state, src / "pytorch_model.bin")

    assert export_head(src, out).has_bias

    assert torch.equal(exported_tensors(out)["lm_head.bias"], state["final_logits_bias"][0])


def test_of_an_indexed_model_only_the_file_of_the_head_is_needed(src, out):
    head = random(VOCAB, HIDDEN)
    torch.save({"output.weight": head}, src / "pytorch_model-00002-of-00002.bin")
    places = {
        "norm.weight": "pytorch_model-00001-of-00002.bin",
        "output.weight": "pytorch_model-00002-of-00002.bin",
    }
    (src / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))

    assert export_head(src, out).tensor == "output.weight"
    assert torch.equal(exported_tensors(out)["output.weight"], head)
    assert sorted(json.loads((out / "manifest.json").read_text())["sources"]) == [
        "config.json",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ]


@pytest.mark.parametrize("name", ["../model.bin", "/tmp/model.bin"])
def test_an_index_does_not_lead_out_of_its_folder(src, out, name):
    (src / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": name}})
    )

    with pytest.raises(ExportError, match="not below its folder"):
        export_head(src, out)


def test_padding_is_taken_off(src, out):
    head, bias = random(16, HIDDEN), random(16, seed=1)
    torch.save({"lm_head.weight": head, "lm_head.bias": bias}, src / "pytorch_model.bin")

    assert export_head(src, out).vocab_rows == 16
    assert torch.equal(exported_tensors(out)["lm_head.weight"], head[:VOCAB])
    assert torch.equal(exported_tensors(out)["lm_head.bias"], bias[:VOCAB])

    export_head(src, out, vocab_size=3, force=True)
    assert torch.equal(exported_tensors(out)["lm_head.weight"], head[:3])
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 3

    for ids in (1, 16):
        assert export_head(src, out, vocab_size=ids, force=True).vocab_size == ids
    for ids in (0, 17):
        with pytest.raises(ExportError, match=f"has 16 rows, but the vocabulary has {ids} ids"):
            export_head(src, out, vocab_size=ids, force=True)


def test_without_a_config_all_rows_are_kept_with_a_warning(tmp_path, out):
    torch.save({"lm_head.weight": random(16, HIDDEN)}, tmp_path / "model.pt")

    result = export_head(tmp_path / "model.pt", out)

    assert result.vocab_size == 16
    assert re.search("no config.json", result.warnings[0])
    assert re.search("all 16 rows are kept", result.warnings[1])


def test_the_config_may_be_elsewhere(tmp_path, out):
    write_config(tmp_path / "hf", model_type="granite", logits_scaling=8.0)
    torch.save({"lm_head.weight": random(16, HIDDEN)}, tmp_path / "model.pt")

    result = export_head(tmp_path / "model.pt", out, config=tmp_path / "hf" / "config.json")

    assert (result.vocab_size, result.warnings) == (VOCAB, ())
    assert json.loads((out / "config.json").read_text())["logits_scaling"] == 8.0
    assert "hf/config.json" in json.loads((out / "manifest.json").read_text())["sources"]


def test_the_config_beside_the_tensors_comes_before_that_of_the_folder_above(tmp_path, out):
    src = tmp_path / "src"
    write_config(src, vocab_size=9)
    write_rank(src / "iter_0000001", "mp_rank_00", {"output_layer.weight": random(16, 4)}, None)
    (src / "latest_checkpointed_iteration.txt").write_text("1")
    assert export_head(src, out).vocab_size == 9

    write_config(src / "iter_0000001", vocab_size=10)

    assert export_head(src, out, force=True).vocab_size == 10


@pytest.mark.parametrize("data", [None, b"\xff\xfe"])
def test_a_config_that_cannot_be_read_is_an_error(src, out, data):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    if data is not None:
        (src / "my.json").write_bytes(data)

    with pytest.raises(ExportError, match="my.json cannot be read: "):
        export_head(src, out, config=src / "my.json")


def test_a_refusal_about_a_cap_says_which_settings_the_server_has(src, out):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    write_config(src, my_logit_cap=3.0)
    with pytest.raises(
        ExportError, match="together with softcap .* --softcap and --logit-scale: an"
    ):
        export_head(src, out)

    write_config(src, lm_head_bias=1)
    with pytest.raises(ExportError, match="expected true or false$"):
        export_head(src, out)


def test_nothing_is_written_if_the_export_would_describe_other_logits(src, out, monkeypatch):
    write_config(src, model_type="gemma2")
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    monkeypatch.setattr(HeadConfig, "text_for_head", lambda *_: "{}")

    with pytest.raises(ExportError, match="this is a bug of the export, and nothing is written"):
        export_head(src, out)

    assert not out.exists()


def test_what_the_config_leaves_out_is_a_warning(src, out):
    write_config(src, model_type="gemma2")
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")

    (warning,) = export_head(src, out).warnings

    assert "no final_logit_softcapping" in warning


def test_the_same_checkpoint_gives_the_same_bytes(src, tmp_path):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")

    for name in ("one", "two"):
        export_head(src, tmp_path / name)

    for file in FILES:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_only_an_export_is_replaced_and_only_by_force(src, out):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    export_head(src, out)

    with pytest.raises(ExportError, match="--force replaces"):
        export_head(src, out)
    export_head(src, out, force=True)
    (out / "notes.txt").write_text("keep me")
    with pytest.raises(ExportError, match=r"it contains notes\.txt"):
        export_head(src, out, force=True)
    with pytest.raises(ExportError, match=r"it contains pytorch_model\.bin"):
        export_head(src, src, force=True)
    assert (out / "notes.txt").exists()
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "src"]


def test_a_failed_export_leaves_nothing_behind(src, tmp_path):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")

    def stop(step: str, done: int, total: int) -> None:
        if step == "writing config.json":
            raise OSError("No space left on device")

    with pytest.raises(ExportError, match="No space left on device"):
        export_head(src, tmp_path / "out", progress=stop)
    with pytest.raises(ExportError, match="cannot write"):
        export_head(src, tmp_path / "absent" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"norm.weight": (4,)}, {}, "no head under a known name"),
        ({"my_head.weight": (11, 4)}, {}, "form that is not understood .tensors my_head.weight"),
        ({"wte.weight": (11, 4)}, {}, "then is false for this model type, but .* no head"),
        ({"lm_head.weight": (11,)}, {}, "has two dimensions"),
        ({"lm_head.weight": (0, 4)}, {}, r"has shape \[0, 4\]; a head has two dimensions"),
        ({"lm_head.weight": (11, 0)}, {}, r"has shape \[11, 0\]; a head has two dimensions"),
        ({"lm_head.weight": (11, 5)}, {}, "rows of 5 values, but config.json says hidden_size 4"),
        ({"lm_head.weight": (10, 4)}, {}, "has 10 rows, but the vocabulary has 11 ids"),
        ({"lm_head.weight": (11, 4), "lm_head.bias": (3,)}, {}, "lm_head.bias has shape"),
        ({"lm_head.weight": (11, 4), "lm_head.bias": (1, 11)}, {}, r"shape \(1, 11\), not \[11\]"),
        ({"lm_head.weight": (16, 4), "lm_head.bias": (11,)}, {}, r"shape \(11,\), not \[16\]"),
        ({"lm_head.weight": (11, 4)}, {"head_tensor": "x"}, "no tensor x"),
        ({"lm_head.qweight": (1, 1), "wte.weight": (11, 4)}, {}, "quantised .tensor lm_head.qweig"),
        ({"actor.lm_head.weight": (11, 4), "model.lm_head.weight": (11, 4)}, {}, "several tensors"),
    ],
)
def test_what_is_wrong_is_said(src, out, tensors, options, message):
    state = {name: random(*shape) for name, shape in tensors.items()}
    torch.save(state, src / "pytorch_model.bin")

    with pytest.raises(ExportError, match=message):
        export_head(src, out, **options)


def test_a_bias_that_the_config_requires_or_denies(src, out):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    write_config(src, lm_head_bias=True)
    with pytest.raises(ExportError, match="has no bias"):
        export_head(src, out)

    torch.save(
        {"lm_head.weight": random(VOCAB, HIDDEN), "lm_head.bias": random(VOCAB)},
        src / "pytorch_model.bin",
    )
    write_config(src, lm_head_bias=False)
    result = export_head(src, out)
    assert not result.has_bias
    assert result.warnings == (
        "config.json says that the head has no bias; lm_head.bias is ignored",
    )
    assert list(exported_tensors(out)) == ["lm_head.weight"]

    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    assert export_head(src, out, force=True).warnings == ()


def test_a_tensor_may_be_named(src, out):
    head = random(VOCAB, HIDDEN)
    torch.save({"state": {"my.proj": head}, "step": 3, "rng": [1]}, src / "pytorch_model.bin")

    assert export_head(src, out, head_tensor="state.my.proj").tensor == "lm_head.weight"
    assert torch.equal(exported_tensors(out)["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "contains no checkpoint"),
        ({"model.safetensors": b""}, "use logprobctl export-head"),
        ({"__0_0.distcp": b""}, r"has no \.metadata"),
        ({"metadata.json": b'{"sharded_backend": "zarr"}'}, "zarr format"),
        ({"other.bin": b""}, "to use other.bin, give the path"),
        ({"latest_checkpointed_iteration.txt": b"7"}, "iter_0000007, which .* is missing"),
        ({"latest_checkpointed_iteration.txt": b"../x"}, "not an iteration"),
        ({"pytorch_model.bin": b"junk"}, "cannot be read with weights_only=True"),
        ({".metadata": b"junk"}, r"\.metadata is malformed"),
        ({".metadata": pickle.dumps({"a": 1})}, r"\.metadata is malformed"),
        ({"pytorch_model.bin.index.json": b"[]"}, "is malformed"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_explained(src, out, files, message):
    for name, data in files.items():
        (src / name).write_bytes(data)

    with pytest.raises(ExportError, match=message):
        export_head(src, out)


def test_a_path_that_is_no_checkpoint_is_explained(tmp_path, out):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "notes.txt").touch()

    for name, message in (
        ("absent", "does not exist"),
        ("model.safetensors", "logprobctl export-head"),
        ("notes.txt", "is no .bin"),
    ):
        with pytest.raises(ExportError, match=message):
            export_head(tmp_path / name, out)


# Pickles


class Hostile:
    """Creates a file when it is unpickled without care."""

    def __init__(self, mark: pathlib.Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.mark), "w")


class Arguments(argparse.Namespace):
    """Stands for a class that only the trainer knows."""


def test_pickles_run_no_code(src, out, tmp_path):
    mark = tmp_path / "mark"
    head = random(VOCAB, HIDDEN)
    torch.save({"lm_head.weight": head, "extra": Hostile(mark)}, src / "pytorch_model.bin")

    export_head(src, out)

    assert torch.equal(exported_tensors(out)["lm_head.weight"], head)
    assert not mark.exists()
    torch.load(src / "pytorch_model.bin", weights_only=False)
    assert mark.exists(), "the file of this test is harmless"


def test_the_index_of_a_distributed_checkpoint_runs_no_code(src, out, tmp_path):
    mark = tmp_path / "mark"
    (src / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))

    with pytest.raises(ExportError, match="malformed"):
        export_head(src, out)
    assert not mark.exists()


def test_a_module_that_torch_blocks_is_refused(src, out):
    class System:
        def __reduce__(self) -> tuple[object, ...]:
            import os

            return os.system, ("true",)

    torch.save({"lm_head.weight": random(VOCAB, HIDDEN), "x": System()}, src / "pytorch_model.bin")

    with pytest.raises(ExportError, match="weights_only=True: .*whose module posix is blocked"):
        export_head(src, out)


def test_a_file_in_the_format_before_zip_is_read(src, out):
    head = random(VOCAB, HIDDEN)
    torch.save(
        {"lm_head.weight": head},
        src / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )

    export_head(src, out)

    assert torch.equal(exported_tensors(out)["lm_head.weight"], head)


# torch.distributed.checkpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "model.module."])
def test_a_distributed_checkpoint_of_one_process(src, out, prefix):
    head = random(VOCAB, HIDDEN)
    state = {
        f"{prefix}lm_head.weight": head,
        f"{prefix}model.embed_tokens.weight": random(VOCAB, HIDDEN, seed=1),
        "optim.state.lm_head.weight": random(VOCAB, HIDDEN, seed=2),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=src)

    assert export_head(src, out).source == f"{prefix}lm_head.weight"
    assert torch.equal(exported_tensors(out)["lm_head.weight"], head)


SHARDED = """
import os
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2
)
mesh = init_device_mesh("cpu", (2,))
rows = torch.load(f"{folder}.rows", weights_only=True)
dcp.save({"model": {"lm_head.weight": distribute_tensor(rows, mesh, [Shard(%d)])}}, checkpoint_id=folder)
dist.barrier()
os._exit(0)  # A rank whose group is destroyed while the other still uses it may abort.
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_distributed_checkpoint_of_two_processes(tmp_path, out, dimension):
    head = random(VOCAB, HIDDEN)
    src = tmp_path / "src"
    torch.save(head, f"{src}.rows")
    ranks = [
        subprocess.Popen([sys.executable, "-c", SHARDED % dimension, str(rank), str(src)])
        for rank in range(2)
    ]
    assert [rank.wait(150) for rank in ranks] == [0, 0]
    write_config(src)
    assert len(list(src.glob("*.distcp"))) == 2

    export_head(src, out)

    assert torch.equal(exported_tensors(out)["lm_head.weight"], head)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["tensors"]["lm_head.weight"]["source_files"] == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_with_a_missing_or_cut_file(src, out):
    dcp.save({"lm_head.weight": random(VOCAB, HIDDEN)}, checkpoint_id=src)
    (file,) = src.glob("*.distcp")
    data = file.read_bytes()

    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ExportError, match="cannot be read"):
        export_head(src, out)
    file.unlink()
    with pytest.raises(ExportError, match="is missing: the checkpoint is incomplete"):
        export_head(src, out)


# Megatron


@pytest.fixture
def trainer_classes(monkeypatch):
    """Classes of a package that is installed while a checkpoint is written, but not afterwards."""
    module = types.ModuleType("megatron_test_double")
    for cls in (Arguments,):
        copy = type(cls.__name__, (cls,), {"__module__": module.__name__})
        copy.__qualname__ = cls.__name__
        setattr(module, cls.__name__, copy)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    sys.modules.pop(module.__name__, None)


def write_rank(
    folder: pathlib.Path, name: str, model: dict[str, object], arguments: object
) -> None:
    """Writes one rank's file with what Megatron stores beside the model."""
    import numpy as np

    (folder / name).mkdir(parents=True)
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model,
        "optimizer": {"param_groups": [{"lr": 1e-5}], "state": {0: {"exp_avg": random(2, 2)}}},
        "rng_state": [{"np_rng_state": np.random.RandomState(1).get_state()}],
    }
    torch.save(state, folder / name / "model_optim_rng.pt")


def test_megatron_ranks_are_joined_and_their_padding_taken_off(tmp_path, out, trainer_classes):
    # vocabulary 11, padded to 16, on two tensor-parallel ranks and two pipeline stages
    head = random(16, HIDDEN)
    src = tmp_path / "src"
    arguments = trainer_classes.Arguments(
        tensor_model_parallel_size=2, padded_vocab_size=16, params_dtype=torch.bfloat16
    )
    for rank in range(2):
        rows = slice(8 * rank, 8 * (rank + 1))
        first = {"embedding.word_embeddings.weight": random(16, HIDDEN, seed=1)[rows].clone()}
        last = {
            "decoder.final_layernorm.weight": random(HIDDEN),
            "output_layer.weight": head[rows].clone(),
            "output_layer._extra_state": None,
        }
        iteration = src / "iter_0000007"
        write_rank(iteration, f"mp_rank_{rank:02d}_000", first, arguments)
        write_rank(iteration, f"mp_rank_{rank:02d}_001", last, arguments)
    (src / "latest_checkpointed_iteration.txt").write_text("7")
    write_config(src)
    sys.modules.pop("megatron_test_double")

    result = export_head(src, out)

    assert (result.source, result.vocab_size, result.vocab_rows) == (
        "model.output_layer.weight",
        VOCAB,
        16,
    )
    assert torch.equal(exported_tensors(out)["lm_head.weight"], head[:VOCAB])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["tensors"]["lm_head.weight"]["source_files"] == [
        "mp_rank_00_001/model_optim_rng.pt",
        "mp_rank_01_001/model_optim_rng.pt",
    ]
    assert "../config.json" in manifest["sources"]


@pytest.mark.parametrize("is_legacy_model", [False, True])
def test_megatron_tied_embeddings_become_the_head(src, out, is_legacy_model):
    write_config(src, tie_word_embeddings=True)
    embedding = random(16, HIDDEN)
    for rank in range(4):
        rows = {"weight": embedding[4 * rank : 4 * (rank + 1)].clone()}
        model: dict[str, object] = {"embedding.word_embeddings.weight": rows["weight"]}
        if is_legacy_model:  # before Megatron Core: nested dictionaries
            model = {"language_model": {"embedding": {"word_embeddings": rows}, "encoder": {}}}
        arguments = argparse.Namespace(tensor_model_parallel_size=4)
        write_rank(src, f"mp_rank_{rank:02d}", model, arguments)

    export_head(src, out, vocab_size=9)

    assert torch.equal(exported_tensors(out)["lm_head.weight"], embedding[:9])


def test_megatron_ranks_that_are_missing_or_do_not_fit(src, out):
    arguments = argparse.Namespace(tensor_model_parallel_size=2)
    write_rank(src, "mp_rank_01", {"output_layer.weight": random(8, HIDDEN)}, arguments)
    with pytest.raises(ExportError, match="lacks tensor-parallel rank 0 of 2"):
        export_head(src, out)

    write_rank(src, "mp_rank_00", {"output_layer.weight": random(7, HIDDEN)}, arguments)
    with pytest.raises(ExportError, match="of shapes"):
        export_head(src, out)

    (src / "mp_rank_00" / "model_optim_rng.pt").unlink()
    with pytest.raises(ExportError, match="has no model_optim_rng.pt"):
        export_head(src, out)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatron_torch_dist(tmp_path, out):
    # Megatron writes its tensors through torch.distributed.checkpoint, and other objects as bytes.
    head = random(16, HIDDEN)
    folder = tmp_path / "src" / "iter_0000007"
    dcp.save(
        {
            "output_layer.weight": head,
            "embedding.word_embeddings.weight": random(16, HIDDEN, seed=1),
            "optimizer.state.exp_avg.output_layer.weight": random(16, HIDDEN, seed=2),
            "rng_state/shard_0_1": pickle.dumps([1, 2]),
        },
        checkpoint_id=folder,
    )
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": argparse.Namespace()}, folder / "common.pt")
    (tmp_path / "src" / "latest_checkpointed_iteration.txt").write_text("7\n")

    result = export_head(tmp_path / "src", out, vocab_size=VOCAB)

    assert (result.source, result.tensor) == ("output_layer.weight", "output_layer.weight")
    assert torch.equal(exported_tensors(out)["output_layer.weight"], head[:VOCAB])


# The command line and the server's rules


def test_the_command_prints_what_it_wrote(src, out, capsys):
    write_config(src, tie_word_embeddings=True)
    torch.save({"wte.weight": random(16, HIDDEN)}, src / "pytorch_model.bin")

    assert tool.main([str(src), str(out), "--vocab-size", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(
        f"wrote {out}: wte.weight as lm_head.weight, vocab 9 of 16 rows, hidden 4, BF16, no bias\n"
        "sha256 "
    )
    assert tool.main([str(src), str(out)]) == 1
    assert "python -m logprobd.export_head: error: " in capsys.readouterr().err


def test_the_options_of_the_command_are_those_of_the_function(src, tmp_path, out, capsys):
    write_config(src, my_logit_cap=1.0, a_logit_cap=2.0, b_logit_cap=3.0)
    config = tmp_path / "my.json"
    (src / "config.json").rename(config)
    state = {"my.proj.weight": random(VOCAB, HIDDEN), "my.proj.bias": random(VOCAB)}
    torch.save(state, src / "pytorch_model.bin")
    arguments = [str(src), str(out), "--config", str(config), "--head-tensor", "my.proj.weight"]
    ignore = ["--ignore-config-key", "my_logit_cap:a_logit_cap", "--ignore-config-key"]
    arguments += [*ignore, "b_logit_cap"]

    assert tool.main(arguments) == 0
    printed = capsys.readouterr()
    assert f"wrote {out}: my.proj.weight as lm_head.weight, vocab 11 of 11" in printed.out
    assert ", BF16, bias\nsha256 " in printed.out
    assert printed.err == ""

    assert tool.main(arguments) == 1
    assert "--force replaces" in capsys.readouterr().err
    assert tool.main([*arguments, "--force"]) == 0


def test_the_command_prints_warnings(src, out, capsys):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    (src / "config.json").unlink()

    assert tool.main([str(src), str(out)]) == 0

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("python -m logprobd.export_head: warning: ") for line in lines)


def test_the_command_shows_its_progress_on_a_terminal_alone(src, out, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(_head_folder, "BLOCK_BYTES", (src / "config.json").stat().st_size // 2)
        assert tool.main([str(src), str(out)]) == 0

    shown = terminal.getvalue()
    assert "\r\033[Khashing config.json 0%\r" in shown
    assert re.search(r"\r\033\[Khashing config.json (49|50)%\r", shown)
    assert "writing model.safetensors 0%" in shown
    assert shown.endswith("%\r\033[K")
    assert tool.main([str(src), str(out), "--force"]) == 0
    assert capsys.readouterr().err == ""


def test_without_torch_the_command_says_what_to_install(src, out):
    code = (
        "import sys; sys.modules['torch'] = None; from logprobd.export_head import main; "
        "sys.exit(main(sys.argv[1:]))"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, src, out],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT / "client" / "python",
    )

    assert result.returncode == 1
    assert "pip install 'torch>=2.6'" in result.stderr


def test_keys_of_the_config_are_searched_as_the_server_does():
    nested = HeadConfig('{"vocab_size": 7, "hidden_size": 1, "text_config": {"n_embd": 2}}')
    assert (nested.vocab_size, nested.hidden_size) == (7, 2)
    assert HeadConfig('{"text_config": {"vocab_size": null}, "vocab_size": 3}').vocab_size is None
    thinker = HeadConfig('{"thinker_config": {"text_config": {"vocab_size": 5}, "d_model": 6}}')
    assert (thinker.vocab_size, thinker.hidden_size) == (5, 6)
    for text in ("[]", "{", '{"text_config": 1, "vocab_size": 2}', '{"vocab_size": "2"}'):
        with pytest.raises(InvalidArgument):
            assert HeadConfig(text).vocab_size


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100 + "1" + "}" * 100,
        '{"model_type": "\ud800"}',
        '{"model_type": "gemma2", "final_logit_softcapping": NaN}',
        '{"model_type": "gemma2", "final_logit_softcapping": 1e400}',
        '{"model_type": "gemma2", "final_logit_softcapping": ' + "9" * 400 + "}",
        '{"model_type": "jais"}',
    ],
    ids=lambda text: text[:60],
)
def test_a_config_that_cannot_be_read_is_refused(text):
    with pytest.raises(InvalidArgument):
        HeadConfig(text).logit_shape()


def test_a_config_may_begin_with_a_byte_order_mark():
    assert HeadConfig('\ufeff{"vocab_size": 3}').vocab_size == 3


@pytest.mark.parametrize("prefix", ["", "module.", "model.module."])
def test_what_belongs_to_a_head_behind_a_wrapper_is_no_unknown_head(src, out, prefix):
    write_config(src, tie_word_embeddings=True)
    state = {
        f"{prefix}model.embed_tokens.weight": random(VOCAB, HIDDEN),
        f"{prefix}lm_head._extra_state": torch.tensor([1.0]),
        f"{prefix}lm_head.bias": random(VOCAB),
    }
    torch.save(state, src / "pytorch_model.bin")
    assert export_head(src, out).has_bias

    torch.save(state | {f"{prefix}lm_head.W_q": torch.tensor([1.0])}, src / "pytorch_model.bin")
    with pytest.raises(ExportError, match="not understood"):
        export_head(src, out, force=True)


def test_two_heads_are_refused_unless_they_are_equal(src, out):
    head, other = random(VOCAB, HIDDEN), random(VOCAB, HIDDEN, seed=1)
    torch.save({"lm_head.weight": head, "embed_out.weight": other}, src / "pytorch_model.bin")
    with pytest.raises(ExportError, match=r"several tensors may be the head .* different values"):
        export_head(src, out)

    torch.save({"lm_head.weight": head, "embed_out.weight": head}, src / "pytorch_model.bin")
    assert export_head(src, out).source == "lm_head.weight"


def test_an_adapter_beside_the_weights_is_a_warning(src, out):
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")
    (src / "adapter_config.json").write_text("{}")

    (warning,) = export_head(src, out).warnings

    assert "adapter_config.json" in warning


def test_a_key_that_is_ignored_stays_off_in_the_export(src, out):
    write_config(src, model_type="gemma2", final_logit_softcapping=50.0)
    torch.save({"lm_head.weight": random(VOCAB, HIDDEN)}, src / "pytorch_model.bin")

    export_head(src, out, ignored_keys=["final_logit_softcapping"])

    assert HeadConfig((out / "config.json").read_text()).logit_shape().softcap is None
