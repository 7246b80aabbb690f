"""Server and Python client find the same head, scale, cap and bias by the same rules, or refuse both."""

import json
import pathlib
import random
import re
import subprocess
from typing import Any, NamedTuple

import logprobd
import ml_dtypes
import numpy as np
import pytest
import torch
from logprobd._head_rules import EMBEDDING_NAMES, HEAD_NAMES, RULES
from logprobd.errors import InvalidArgument
from logprobd.export_head import _have_equal_rows
from logprobd.head_choice import choose_bias, choose_head
from logprobd.head_config import HeadConfig
from model_folder import write_safetensors

HIDDEN, VOCAB = 8, 16


class Outcome(NamedTuple):
    """What is served, or why nothing is."""

    tensor: str = ""
    scale: str = ""
    cap: str = ""
    bias: str = ""
    refusal: str = ""


def server_outcome(binaries: pathlib.Path, folder: pathlib.Path, *options: str) -> Outcome:
    command = [binaries / "logprobd", "--device", "cpu", "--model", folder, "--dry-run", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        return Outcome(refusal=done.stderr)
    plan = dict(
        line.split(None, 1) for line in done.stdout.splitlines() if len(line.split(None, 1)) == 2
    )
    return Outcome(
        plan["tensor"].split()[0], plan["scale"].strip(), plan["cap"].strip(), plan["bias"].strip()
    )


def client_outcome(
    config: str,
    tensors: dict[str, np.ndarray],
    ignored: tuple[str, ...] = (),
    head_tensor: str = "",
) -> Outcome:
    def have_equal_rows(a: str, b: str) -> bool | None:
        as_torch = (torch.from_numpy(tensors[each].astype(np.float32)) for each in (a, b))
        return _have_equal_rows(*as_torch, settings, settings.vocab_size)

    try:
        settings = HeadConfig(config, ignored_keys=ignored)
        shape = settings.logit_shape()
        name, is_embedding = choose_head(list(tensors), settings, have_equal_rows, head_tensor)
        bias = choose_bias(list(tensors), settings, name, is_embedding)
        if len(tensors[name]) < (settings.vocab_size or 0):  # as export_head
            raise InvalidArgument("the head has rows, fewer than vocab_size")
    except InvalidArgument as error:
        return Outcome(refusal=str(error))
    has_bias = bias is not None and tensors[bias].any()
    return Outcome(
        name,
        "none" if shape.scale == 1 else f"{shape.scale:.6g}",
        "none" if shape.softcap is None else f"{shape.softcap:.6g}",
        "yes" if has_bias else "none",
    )


def write_model(folder: pathlib.Path, config: str, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    write_safetensors(folder / "model.safetensors", tensors)


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def same(server: Outcome, client: Outcome) -> bool:
    """Returns whether both serve the same, or refuse with the same reason."""
    if not (server.refusal or client.refusal):
        return server == client
    if not (server.refusal and client.refusal):
        return False
    # The reasons share their words up to the flag that the command line has and the function does not.
    words = re.findall(r"[a-z_]{4,}", client.refusal.lower())
    found = sum(word in server.refusal.lower() for word in words)
    return found >= 0.8 * len(words)


ODD_KEYS = [
    "logit_boost",
    "final_mup",
    "norm_head",
    "logits_scaling",
    "router_logit",
    "aggregate_logit_scale",
    "additional_config",
    "speculative_logit_scale",
    "vision_logit_scale",
]
EXTRAS = [
    "lm_head.trellis",
    "x.text_head.w",
    "lm_head.lora_A.weight",
    "lm_head.layers.0.weight",
    "lm_head.input_scale",
    "lm_head._extra_state",
    "model.embed_tokens.weight_scale",
    "mtp.0.head.weight",
    "v_head.weight",
    "vision_model.head.weight",
    "logit_scale",
    "lm_head_bias",
    "vision_model.logit_scale",
]
BIASES = ["lm_head.bias", "final_logits_bias", "language_model.final_logits_bias"]


def random_config(draw: random.Random) -> dict[str, Any]:
    """Returns a config of a random type, with random keys at random levels."""
    types = [*RULES["types"], "a_new_type"]

    def level(*, sizes: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"model_type": draw.choice(types)}
        if sizes:
            found |= {"hidden_size": HIDDEN, "vocab_size": VOCAB}
        rule = RULES["types"].get(found["model_type"], {})
        keys = [scale.get("key") for scale in rule.get("scale", ())] + [
            rule.get("softcap", {}).get("key")
        ]
        for key in filter(None, keys):
            if draw.random() < 0.6 and key not in ("tie_word_embeddings", "scale_decoder_outputs"):
                found[key] = draw.choice(
                    [None, 0.5, 3.0, 12, 0, False, -1, "2"][: draw.choice([4, 8])]
                )
        if draw.random() < 0.1:
            found[draw.choice(ODD_KEYS)] = draw.choice([2.0, {"scale": 2.0}, [{"logit": 2.0}], {}])
        if draw.random() < 0.7:
            found["tie_word_embeddings"] = draw.choice([True, False])
        return found

    config = level(sizes=draw.random() < 0.8)
    if draw.random() < 0.5:
        name = draw.choice(
            ["text_config", "llm_config", "language_config", "decoder", "vision_config", "my_model"]
        )
        config[name] = level(sizes=draw.random() < 0.5)
    return config


def random_tensors(draw: random.Random, model_type: str) -> dict[str, np.ndarray]:
    rule = RULES["types"].get(model_type, {})
    heads = [rule["head"]] if "head" in rule else list(HEAD_NAMES[:2])
    embeddings = [rule["embedding"]] if "embedding" in rule else list(EMBEDDING_NAMES[:2])
    tensors = {}
    if draw.random() < 0.6:
        tensors[draw.choice(heads)] = values(1, VOCAB, HIDDEN)
    if draw.random() < 0.8 or not tensors:
        tensors[draw.choice(embeddings)] = values(draw.choice([1, 2]), VOCAB, HIDDEN)
    if draw.random() < 0.2:
        name = draw.choice([*HEAD_NAMES, *EMBEDDING_NAMES])
        tensors[name] = values(draw.choice([1, 2]), draw.choice([VOCAB, VOCAB + 1]), HIDDEN)
    if draw.random() < 0.2:
        tensors[draw.choice(EXTRAS)] = values(3, VOCAB, HIDDEN)
    for name in BIASES:
        if draw.random() < 0.1 and all(len(each) == VOCAB for each in tensors.values()):
            tensors[name] = values(4, VOCAB)
    return tensors


@pytest.mark.parametrize("seed", range(160))
def test_server_and_client_agree_about_random_models(binaries, tmp_path, seed) -> None:
    draw = random.Random(seed)
    config = random_config(draw)
    tensors = random_tensors(draw, config["model_type"])
    ignored = [key for key in (*ODD_KEYS, "logit_scale", "model_type") if draw.random() < 0.05]
    text = json.dumps(config)
    write_model(tmp_path, text, tensors)

    options = ("--ignore-config-key", ":".join(ignored)) if ignored else ()
    server = server_outcome(binaries, tmp_path, *options)
    client = client_outcome(text, tensors, tuple(ignored))

    assert same(server, client), (text, list(tensors), ignored, server, client)


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({"model_type": "llama"}, (), Outcome("lm_head.weight", "none", "none", "none")),
        ({"model_type": "gemma2"}, (), Outcome("lm_head.weight", "none", "30", "none")),
        (
            {"model_type": "gemma2"},
            ("--softcap", "0"),
            Outcome("lm_head.weight", "none", "none", "none"),
        ),
        (
            {"model_type": "granite", "logits_scaling": 8},
            (),
            Outcome("lm_head.weight", "0.125", "none", "none"),
        ),
        (
            {"model_type": "llama", "my_logit_cap": 20},
            ("--softcap", "20", "--ignore-config-key", "my_logit_cap"),
            Outcome("lm_head.weight", "none", "20", "none"),
        ),
        (
            {"model_type": "aya_vision", "text_config": {"model_type": "cohere2"}},
            ("--logit-scale", "0.0625", "--ignore-config-key", "logit_scale"),
            Outcome("lm_head.weight", "0.0625", "none", "none"),
        ),
        (
            {"model_type": "bert"},
            ("--ignore-config-key", "logit_scale:model_type"),
            Outcome("lm_head.weight", "none", "none", "none"),
        ),
    ],
    ids=str,
)
def test_the_operators_settings_have_the_last_word(
    binaries, tmp_path, settings, options, expected
) -> None:
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "tie_word_embeddings": False} | settings
    write_model(tmp_path, json.dumps(config), {"lm_head.weight": values(1, VOCAB, HIDDEN)})

    assert server_outcome(binaries, tmp_path, *options) == expected


def test_a_strict_server_refuses_types_that_it_does_not_know(binaries, tmp_path) -> None:
    config = {"model_type": "a_new_type", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    write_model(tmp_path, json.dumps(config), {"lm_head.weight": values(1, VOCAB, HIDDEN)})

    assert server_outcome(binaries, tmp_path).tensor == "lm_head.weight"
    assert (
        "--strict-config refuses" in server_outcome(binaries, tmp_path, "--strict-config").refusal
    )


def test_info_shows_that_a_type_is_not_known(binaries, start_server, tmp_path) -> None:
    config = {"model_type": "a_new_type", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    write_model(tmp_path, json.dumps(config), {"lm_head.weight": values(1, VOCAB, HIDDEN)})
    server = start_server("--model", str(tmp_path))

    command = [binaries / "logprobctl", "info", "--address", server.grpc]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    assert "warning: head default: model type a_new_type is not known" in printed
    with logprobd.Client(server.grpc) as client:
        (warning,) = client.info().warnings
    assert "a_new_type is not known" in warning


def test_every_type_of_the_table_is_well_formed() -> None:
    keys = {
        *("tied", "tie_level", "tie_any_level", "tie_key", "text", "inner", "head", "embedding"),
        *("scale", "needs_key", "softcap", "vocab", "no_effect", "refused", "plain_vocab"),
        "source",
    }
    for model_type, rule in RULES["types"].items():
        assert set(rule) <= keys, model_type
        for scale in rule.get("scale", ()):
            assert scale["op"] in (
                "multiply",
                "divide",
                "over_hidden_size",
                "inverse_sqrt_hidden_size",
            ), model_type
