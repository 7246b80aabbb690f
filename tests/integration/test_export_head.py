"""Heads that were exported, and models in Hugging Face's cache: a server gives the same bits as from the model."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from logprobd import demo_model
from model_folder import write_safetensors
from scoring_rpc import ROOT, Scoring, messages, request
from weights_rpc import Weights

HIDDEN, VOCAB = 64, 1003
EXPORTED = {"config.json", "manifest.json", "model.safetensors"}
COMMIT, NEXT_COMMIT = "0" * 39 + "1", "0" * 39 + "2"


def normal(*shape: int, seed: int = 1, dtype=ml_dtypes.bfloat16) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return (values * (3 / np.sqrt(HIDDEN))).astype(dtype)


def write_config(path: pathlib.Path, **more: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB} | more
    (path / "config.json").write_text(json.dumps(config))


# Models. Each function writes one.


def demo(path: pathlib.Path) -> None:
    """Tied, bf16, in two files with an index."""
    demo_model.write_model(path, VOCAB, HIDDEN)


def tied(path: pathlib.Path) -> None:
    write_config(path, tie_word_embeddings=True)
    write_safetensors(path / "model.safetensors", {"wte.weight": normal(VOCAB, HIDDEN)})


def sharded_with_padding(path: pathlib.Path) -> None:
    write_config(path)
    files = {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": normal(VOCAB, HIDDEN)},
        "model-00002-of-00002.safetensors": {"lm_head.weight": normal(1024, HIDDEN, seed=2)},
    }
    for name, tensors in files.items():
        write_safetensors(path / name, tensors)
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def bf16_with_bias(path: pathlib.Path) -> None:
    write_config(path, lm_head_bias=True)
    tensors = {
        "lm_head.bias": normal(VOCAB, seed=3, dtype=np.float32),
        "lm_head.weight": normal(VOCAB, HIDDEN),
    }
    write_safetensors(path / "model.safetensors", tensors)


def scaled_and_capped(path: pathlib.Path) -> None:
    text = {"model_type": "muse_glimmer_text", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    write_config(path, model_type="muse_glimmer", text_config=text, output_multiplier=0.3)
    weight = normal(VOCAB, HIDDEN, dtype=np.float16)
    name = "language_model.lm_head.weight"
    write_safetensors(path / "model.safetensors", {name: weight})


MODELS = [demo, tied, sharded_with_padding, bf16_with_bias, scaled_and_capped]


@pytest.fixture
def logprobctl(binaries):
    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binaries / "logprobctl", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | environment,
        )

    return run


def scoring_request(seed: int = 5):
    """Returns a request for all outputs, with the first and the last id among its targets."""
    targets = np.array([0, VOCAB - 1, *range(2, 40)], np.int32)
    candidates = np.arange(0, VOCAB, 100, dtype=np.int32)
    offsets = np.minimum(np.arange(len(targets) + 1) * len(candidates), len(candidates))
    return request(
        rows=len(targets),
        hidden_size=HIDDEN,
        seed=seed,
        targets=targets.tobytes(),
        outputs=511,
        top_k=7,
        candidate_ids=candidates.tobytes(),
        candidate_offsets=offsets.astype(np.uint32).tobytes(),
        temperature=0.7,
    )


def scores_and_head(start_server, model: object, **environment: str) -> tuple[bytes, dict, str]:
    """Returns the bits of all outputs, the description of the head and the digest of its weights."""
    server = start_server("--model", str(model), "--admin", "auto", environment=environment)
    with Scoring(server.grpc) as scoring, Weights(server.admin) as weights:
        response = scoring.score(scoring_request())
        data = scoring.channel.unary_unary("/logprobd.v1.Scoring/ListHeads")(b"")
        (head,) = messages().ListHeadsResponse.FromString(data).heads
        sha256 = weights.list().live.sha256
    server.stop()
    response.ClearField("timings")
    for field in ("tensor", "tied"):
        head.ClearField(field)
    return response.SerializeToString(deterministic=True), str(head), sha256


def files_of(path: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("write", MODELS, ids=lambda write: write.__name__)
def test_an_exported_head_is_served_like_its_model(logprobctl, start_server, tmp_path, write):
    model, out = tmp_path / "model", tmp_path / "head"
    write(model)

    result = logprobctl("export-head", model, out, "--json")

    assert result.returncode == 0, result.stderr
    assert files_of(out).keys() == EXPORTED
    expected = scores_and_head(start_server, model)
    assert scores_and_head(start_server, out) == expected
    assert json.loads(result.stdout)["sha256"] == expected[2]
    assert json.loads((out / "manifest.json").read_text())["head_sha256"] == expected[2]


@pytest.mark.parametrize("write", MODELS, ids=lambda write: write.__name__)
def test_an_export_is_deterministic_and_exports_to_itself(logprobctl, tmp_path, write):
    write(tmp_path / "model")

    for source, out in (("model", "one"), ("model", "two"), ("one", "again")):
        assert logprobctl("export-head", tmp_path / source, tmp_path / out).returncode == 0

    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_pickle_is_refused_with_the_tool_that_reads_it(logprobctl, tmp_path):
    write_config(tmp_path / "model")
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")

    result = logprobctl("export-head", tmp_path / "model", tmp_path / "head")

    assert result.returncode == 1
    assert "python -m logprobd.export_head" in result.stderr
    assert not (tmp_path / "head").exists()


# PyTorch checkpoints. Each function writes the tensors of a model in safetensors in one of the formats.


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_bin(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, path / "pytorch_model.bin")


def as_distributed(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    dcp.save({"model": tensors}, checkpoint_id=path)


def as_megatron(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes two tensor-parallel ranks, padded to a multiple of 128 ids per rank."""
    names = {"lm_head": "output_layer", "model.embed_tokens": "embedding.word_embeddings"}
    for rank in range(2):
        part = {}
        for name, tensor in tensors.items():
            base, _, kind = name.rpartition(".")
            padded = torch.cat([tensor, tensor[: 1024 - len(tensor)]])
            part[f"{names[base]}.{kind}"] = padded[512 * rank : 512 * (rank + 1)].clone()
        folder = path / "iter_0000003" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        arguments = argparse.Namespace(tensor_model_parallel_size=2, padded_vocab_size=1024)
        torch.save({"args": arguments, "model": part}, folder / "model_optim_rng.pt")
    (path / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [as_bin, as_distributed, as_megatron], ids=lambda w: w.__name__)
@pytest.mark.parametrize("kind", ["bias", "tied"])
def test_a_head_from_a_pytorch_checkpoint_has_the_same_bits(
    logprobctl, start_server, tmp_path, write, kind
):
    model, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    weight = normal(VOCAB, HIDDEN)
    arrays = {"model.embed_tokens.weight": weight}
    if kind == "bias":
        arrays = {"lm_head.weight": weight, "lm_head.bias": normal(VOCAB, seed=4)}
    for path in (model, checkpoint):
        write_config(
            path,
            model_type="granite",
            logits_scaling=0.5,
            num_hidden_layers=2,
            tie_word_embeddings=kind == "tied",
        )
    write_safetensors(model / "model.safetensors", arrays)
    write(checkpoint, {name: as_torch(array) for name, array in arrays.items()})

    exported = subprocess.run(
        [sys.executable, "-m", "logprobd.export_head", checkpoint, tmp_path / "python"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT / "client" / "python",
    )

    assert exported.returncode == 0, exported.stderr
    assert scores_and_head(start_server, tmp_path / "python") == scores_and_head(
        start_server, model
    )
    # Both tools write the same folder.
    assert logprobctl("export-head", model, tmp_path / "cpp").returncode == 0
    for name in ("config.json", "model.safetensors"):
        ours, theirs = (tmp_path / tool / name for tool in ("python", "cpp"))
        assert ours.read_bytes() == theirs.read_bytes(), name
    manifests = [
        json.loads((tmp_path / tool / "manifest.json").read_text()) for tool in ("python", "cpp")
    ]
    assert manifests[0].keys() == manifests[1].keys()
    for key in ("format", "logprobd_version", "files", "head_sha256"):
        assert manifests[0][key] == manifests[1][key], key


CONFIGS = [
    {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text", "hidden_size": 9}},
    {
        "thinker_config": {
            "text_config": {"model_type": "granite", "logits_scaling": 8.0},
            "vocab_size": 7,
        }
    },
    {"text_config": None, "llm_config": {"final_logit_softcapping": None, "tie": 1}},
    {
        "model_type": "cohere",
        "architectures": ["Ä", "b"],
        "logit_scale": 0.0625,
        "attn_logit_softcapping": 50.0,
    },
    {"model_type": "t5", "tie_word_embeddings": False, "d_model": HIDDEN},
    {"model_type": "t5", "scale_decoder_outputs": True, "d_model": HIDDEN},
    {"model_type": "inkling_text", "unpadded_vocab_size": VOCAB - 3},
    {"my_mup_factor": 1e-05, "warmup_steps": 3, "num_logits_to_keep": 1, "mup_denominator": 2},
    {"Router_Logit_Scale": 2, "Odd_LOGIT": [1, {"b": 1, "a": 2.5}], "d_model": HIDDEN},
    {"model_type": "gemma2", "final_logit_softcapping": 2.5},
    {"model_type": "paligemma", "text_config": {}, "llm_config": {"final_logit_softcapping": 3}},
]


IGNORED = ("my_mup_factor:Odd_LOGIT", "final_logit_softcapping")


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_both_tools_keep_the_same_keys_of_the_config(logprobctl, tmp_path, config):
    from logprobd.export_head import export_head

    model = tmp_path / "model"
    model.mkdir()
    config = {"vocab_size": VOCAB, **config}
    for nested in ("text_config", "thinker_config"):
        if isinstance(config.get(nested), dict):
            config[nested] |= {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    (model / "config.json").write_text(json.dumps(config).replace("2.5", "NaN"))
    weight = normal(VOCAB, HIDDEN)
    write_safetensors(model / "model.safetensors", {"lm_head.weight": weight})
    torch.save({"lm_head.weight": as_torch(weight)}, model / "pytorch_model.bin")

    ignored = [word for key in IGNORED for word in ("--ignore-config-key", key)]
    result = logprobctl("export-head", model, tmp_path / "cpp", *ignored)
    export_head(model / "pytorch_model.bin", tmp_path / "python", ignored_keys=IGNORED)

    assert result.returncode == 0, result.stderr
    texts = [(tmp_path / tool / "config.json").read_text() for tool in ("cpp", "python")]
    assert texts[0] == texts[1]


# Hugging Face's cache


def add_to_cache(
    hub: pathlib.Path, commit: str, *, seed: int, shared: bool = False, as_main: bool = False
) -> pathlib.Path:
    """Writes a snapshot of Some/Model as huggingface_hub does: files are links to blobs, which may be links, too."""
    repository = hub / "models--Some--Model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    write_config(snapshot, tie_word_embeddings=True)
    write_safetensors(
        snapshot / "model.safetensors", {"wte.weight": normal(VOCAB, HIDDEN, seed=seed)}
    )
    for file in list(snapshot.iterdir()):
        blob = repository / "blobs" / f"{commit}-{file.name}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, snapshot))
        if shared:
            store = hub / "blobs" / "ab"
            store.mkdir(parents=True, exist_ok=True)
            blob.rename(store / blob.name)
            blob.symlink_to(os.path.relpath(store / blob.name, blob.parent))
    if as_main:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    return snapshot


@pytest.mark.parametrize("shared", [False, True], ids=["blobs", "shared_blobs"])
def test_a_model_in_hugging_faces_cache_is_served_by_its_id(
    logprobctl, start_server, tmp_path, shared
):
    hub = tmp_path / "hf" / "hub"
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": ""}
    snapshot = add_to_cache(hub, COMMIT, seed=1, shared=shared, as_main=True)
    later = add_to_cache(hub, NEXT_COMMIT, seed=2, shared=shared)
    expected = scores_and_head(start_server, snapshot)

    assert scores_and_head(start_server, "Some/Model", **home) == expected
    assert logprobctl("export-head", "Some/Model", tmp_path / "head", **home).returncode == 0
    assert scores_and_head(start_server, tmp_path / "head") == expected

    # By default, new weights may come from other snapshots of the model, and from nowhere else.
    (tmp_path / "hf" / "other").mkdir()
    server = start_server("--model", "Some/Model", "--admin", "auto", environment=home)
    with Weights(server.admin) as weights:
        assert weights.list().live.source == str(snapshot)
        assert weights.load(later, commit=True).version == 2
        with pytest.raises(Exception, match="not below an allowed root"):
            weights.load(tmp_path / "hf" / "other")
        with pytest.raises(Exception, match="must be an absolute path"):
            weights.load("Some/Model")


def test_a_model_of_the_cache_needs_no_network(start_server, tmp_path):
    unshare = ("unshare", "--map-root-user", "--net")  # not even loopback is up
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("a user may not make a network namespace here")
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": ""}
    add_to_cache(tmp_path / "hf" / "hub", COMMIT, seed=1, as_main=True)

    server = start_server(
        *("--model", "Some/Model", "--dry-run"), environment=home, wait=False, prefix=unshare
    )

    assert server.wait() == 0, "".join(server.log)


def test_a_model_that_is_not_in_the_cache_is_not_downloaded_but_explained(
    start_server, logprobctl, tmp_path
):
    home = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": ""}
    snapshot = add_to_cache(tmp_path / "hub", COMMIT, seed=1, as_main=True)

    def failure(model: str) -> str:
        server = start_server("--model", model, "--dry-run", environment=home, wait=False)
        assert server.wait() != 0
        return "".join(server.log)

    absent = failure("Other/Model")
    for command in re.findall("hf download [^&;]*", absent):
        assert command.startswith("hf download Other/Model ")
    assert "hf download Other/Model config.json && " in absent
    assert "--include 'model.safetensors*'" in absent
    assert "hf download Other/Model" in logprobctl("export-head", "Other/Model", "x", **home).stderr

    # With an index, the server names the file with the head.
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"wte.weight": "model-00003-of-00009.safetensors"}})
    )
    fetch = f"hf download Some/Model --revision {COMMIT} "
    assert fetch + "model-00003-of-00009.safetensors" in failure("Some/Model")
    (snapshot / "config.json").unlink()
    assert fetch + "config.json" in failure("Some/Model")
