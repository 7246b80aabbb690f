"""The server scores the head of every class of transformers that returns logits as the class does, or refuses it.

Each class is saved with its tie flags at both levels of its config, with a head that is stored, equal to the embedding,
or missing, and with every number of its config that may change the logits off its default; and once with flags and
numbers that the config leaves out.
"""

import itertools
import json
import os
import pathlib
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import head_cases
import logprobd
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from logprobd._head_rules import is_other_level, transform_keys
from logprobd.errors import InvalidArgument
from logprobd.head_choice import choose_bias, choose_head
from logprobd.head_config import HeadConfig
from safetensors.torch import load_file
from transformers_heads import ROWS, TIE, Head, classes, levels_of, time_limit

ERROR_MAX = 1e-5
# Without a transform of its type, a log-probability would differ by more.
TRANSFORM_MIN = 1e-2
LEVELS = ("", "text_config", "decoder", "thinker_config")
# What cannot be built or called here, and a part of the error: a package is missing, the default config is incomplete,
# or the class needs images. A class that can be built later fails its test, so that it leaves the list.
NOT_BUILT: dict[str, str] = {
    "BlipForConditionalGeneration": "no layer with a weight",
    "MusicgenForCausalLM": "no layer with a weight",
    "MusicgenMelodyForCausalLM": "no layer with a weight",
    "NemotronH_Omni_Reasoning_V3": "no layer with a weight",
    "PI0ForConditionalGeneration": "no layer with a weight",
    "CohereCompassForCausalLM": "full_attention",
    "CohereCompassForConditionalGeneration": "full_attention",
    "DeepseekOcr2ForConditionalGeneration": "NoneType|empty\\(\\)",
    "DiffusionGemmaForBlockDiffusion": "NoneType|empty\\(\\)",
    "Dots1ForCausalLM": "NoneType|empty\\(\\)",
    "Granite4VisionForConditionalGeneration": "NoneType|empty\\(\\)",
    "Qwen4ExpForCausalLM": "NoneType|empty\\(\\)",
    "Qwen4ExpForConditionalGeneration": "NoneType|empty\\(\\)",
    "Gemma4AssistantForCausalLM": "hidden_size_per_layer_input",
    "Gemma4UnifiedAssistantForCausalLM": "layer types producing a cache",
    "Blip2ForConditionalGeneration": "same dtype",
    "InstructBlipForConditionalGeneration": "not callable",
    "InstructBlipVideoForConditionalGeneration": "not enough values",
    "Kosmos2ForConditionalGeneration": "pixel_values",
    "Pix2StructForConditionalGeneration": "expected device meta",
    "PPFormulaNetForConditionalGeneration": "get_input_embeddings",
    "FastVlmForConditionalGeneration": "requires the timm library",
    "Gemma3nForConditionalGeneration": "requires the timm library",
    "PerceptionLMForConditionalGeneration": "requires the timm library",
}
# Classes that tie nothing, although another class of their model type does.
NEVER_TIED = ("BigBirdPegasusForCausalLM",)
# What is refused whatever is stored, and a part of the message.
REFUSED: dict[str, str] = {
    "BertLMHeadModel": "a dense layer, an activation and a norm",
    "BertGenerationDecoder": "a dense layer, an activation and a norm",
    "BigBirdForCausalLM": "a dense layer, an activation and a norm",
    "CamembertForCausalLM": "a dense layer, an activation and a norm",
    "Data2VecTextForCausalLM": "a dense layer, an activation and a norm",
    "ElectraForCausalLM": "a dense layer, an activation and a norm",
    "ErnieForCausalLM": "a dense layer, an activation and a norm",
    "MegatronBertForCausalLM": "a dense layer, an activation and a norm",
    "ModernBertDecoderForCausalLM": "a dense layer, an activation and a norm",
    "RemBertForCausalLM": "a dense layer, an activation and a norm",
    "RobertaForCausalLM": "a dense layer, an activation and a norm",
    "RobertaPreLayerNormForCausalLM": "a dense layer, an activation and a norm",
    "RoCBertForCausalLM": "a dense layer, an activation and a norm",
    "RoFormerForCausalLM": "a dense layer, an activation and a norm",
    "XLMRobertaForCausalLM": "a dense layer, an activation and a norm",
    "XLMRobertaXLForCausalLM": "a dense layer, an activation and a norm",
    "XmodForCausalLM": "a dense layer, an activation and a norm",
    "AyaVisionForConditionalGeneration": "changes its logits by",
    "Cohere2VisionForConditionalGeneration": "changes its logits by",
    "Gemma3ForConditionalGeneration": "changes its logits by",
    "GraniteSpeechForConditionalGeneration": "changes its logits by",
    "GraniteSpeechPlusForConditionalGeneration": "changes its logits by",
    "EncoderDecoderModel": "the decoder inside it",
    "VisionEncoderDecoderModel": "the decoder inside it",
    "ProphetNetForCausalLM": "several next tokens",
    "ProphetNetForConditionalGeneration": "several next tokens",
    "MoshiForCausalLM": "one head for each codebook",
    "ReformerModelWithLMHead": "two streams of states",
    "FSMTForConditionalGeneration": "under names of its own",
    "IdeficsForVisionText2Text": "a second part for additional tokens",
}


# The classes of tests/support/python/head_cases.json: each is there for a rule of its own.
CASES = {
    "LlamaForCausalLM": {"": False},
    "Qwen2ForCausalLM": {"": False},
    "Gemma2ForCausalLM": {"": True},
    "GraniteForCausalLM": {"": True},
    "HyperCLOVAXForCausalLM": {"": False},
    "CohereForCausalLM": {"": True},
    "MiniCPM3ForCausalLM": {"": False},
    "FalconH1ForCausalLM": {"": False},
    "RecurrentGemmaForCausalLM": {"": True},
    "MptForCausalLM": {"": True},
    "OPTForCausalLM": {"": True},
    "PhiForCausalLM": {"": False},
    "BartForConditionalGeneration": {"": True},
    "T5ForConditionalGeneration": {"": True},
    "UMT5ForConditionalGeneration": {"": False},
    "T5GemmaForConditionalGeneration": {"": False, "decoder": False},
    "InklingForCausalLM": {},
    "MuseGlimmerForConditionalGeneration": {"": False},
    "Qwen3VLMoeForConditionalGeneration": {"": False, "text_config": True},
    "Llama4ForConditionalGeneration": {"": True, "text_config": False},
}


class Variant(NamedTuple):
    """A folder of a class."""

    flags: dict[str, bool | None]
    """tie_word_embeddings by level; None: left out."""
    with_head: bool
    equal: bool
    """Whether the head equals the embedding."""
    without: frozenset[str] = frozenset()
    """Keys that the config leaves out."""


def variants(head: Head) -> list[Variant]:
    levels = [
        path
        for path, level in levels_of(head.model.config)
        if path in LEVELS and hasattr(level, TIE)
    ]
    flags: list[dict[str, bool | None]] = [
        dict(zip(levels, each, strict=True))
        for each in itertools.product((False, True), repeat=len(levels))
    ]
    missing: dict[str, bool | None] = dict.fromkeys(levels)
    flags += [missing] if levels else []
    stored = [(True, False), (True, True), (False, False)] if head.has_twin else [(True, False)]
    found = [Variant(flag, *each) for flag in flags for each in stored]
    keys = transform_keys() - {"scale_decoder_outputs"}
    return [*found, *(Variant(missing, *each, keys) for each in stored[:2])]


class Served:
    """The head that the Python client finds in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        config = HeadConfig((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        valid = config.vocab_size

        def have_equal_rows(a: str, b: str) -> bool | None:
            first, second = tensors[a][:valid], tensors[b][:valid]
            return torch.equal(first, second) if first.shape == second.shape else None

        self.shape = config.logit_shape()
        self.tensor, is_embedding = choose_head(list(tensors), config, have_equal_rows)
        bias = choose_bias(list(tensors), config, self.tensor, is_embedding)
        self.weight = tensors[self.tensor][:valid].double()
        self.bias = None if bias is None else tensors[bias].flatten()[:valid].double()
        self.model_type = config.model_type

    def transforms(self) -> list[str]:
        """Returns what is between the product and the logits."""
        found = {
            "scale": self.shape.scale != 1,
            "softcap": self.shape.softcap is not None,
            "bias": self.bias is not None,
        }
        return [name for name, is_used in found.items() if is_used]

    def logprobs(self, rows: torch.Tensor, left_out: str = "") -> torch.Tensor:
        """Returns the log-probabilities of all ids, without one of transforms() if that is named."""
        logits = rows.double() @ self.weight.T
        if left_out != "scale":
            logits *= self.shape.scale
        if left_out != "softcap" and self.shape.softcap is not None:
            logits = self.shape.softcap * torch.tanh(logits / self.shape.softcap)
        if left_out != "bias" and self.bias is not None:
            logits += self.bias
        return logits.log_softmax(-1)


def plan_of(binaries: pathlib.Path, folder: pathlib.Path) -> dict[str, str] | str:
    """Returns the server's plan for a folder, or its refusal."""
    command = [binaries / "logprobd", "--device", "cpu", "--model", folder, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        return done.stderr
    return {
        words[0]: words[1] for line in done.stdout.splitlines() if len(words := line.split()) > 1
    }


def check_plan(plan: dict[str, str] | str, served: Served) -> None:
    assert isinstance(plan, dict), plan
    assert plan["tensor"] == served.tensor
    assert plan["scale"] == ("none" if served.shape.scale == 1 else f"{served.shape.scale:.6g}")
    assert plan["cap"] == (
        "none" if served.shape.softcap is None else f"{served.shape.softcap:.6g}"
    )
    assert plan["bias"] == ("none" if served.bias is None else "yes")


def check_server(folder: pathlib.Path, rows: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares log-probabilities and entropy of a running server with those of the class."""
    targets = torch.arange(ROWS)
    with logprobd.serve(folder, device="cpu") as client:
        scores = client.score(rows, targets, outputs=("logprob", "entropy"))
    entropy = -(expected.exp() * expected).sum(-1)
    assert (scores.logprob.double() - expected[targets, targets]).abs().max() < ERROR_MAX
    assert (scores.entropy.double() - entropy).abs().max() < ERROR_MAX


@pytest.mark.parametrize("name", classes())
def test_the_head_of_a_class_is_scored_as_the_class_does_or_refused(
    binaries, tmp_path, monkeypatch, name
) -> None:
    if name in NOT_BUILT:
        with time_limit(100), pytest.raises(Exception, match=NOT_BUILT[name]):  # noqa: PT012
            Head(name).logits()
        return
    with time_limit(100):
        head = Head(name)
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    num_right = 0
    refusals = []
    for index, variant in enumerate(variants(head)):
        flags, with_head, equal, without = variant
        folder = tmp_path / str(index)
        head.save(folder, with_head=with_head, equal=equal, flags=flags, without=without)
        plan = plan_of(binaries, folder)
        try:
            served = Served(folder)
        except InvalidArgument as error:
            assert isinstance(plan, str), (variant, str(error))
            refusals += [] if without else [plan]
            continue
        check_plan(plan, served)
        try:
            loaded = head.loaded(folder, with_head=with_head, equal=equal)
        except StrictDataclassError:  # the class refuses these flags
            continue
        if name in NEVER_TIED and not loaded.has_head:
            continue
        assert loaded.has_head, ("transformers would invent a head", variant, served.tensor)
        # A cap is felt by large logits only, whatever the scale.
        rows = head.rows()[0] / served.shape.scale
        expected = loaded.logits(rows).double().log_softmax(-1)
        difference = (served.logprobs(rows) - expected).abs().max()
        assert difference < ERROR_MAX, (variant, served.tensor, served.shape)
        if without:  # a class that is refused may be served with its defaults
            continue
        for left_out in served.transforms():
            without_it = served.logprobs(rows, left_out)
            assert (without_it - expected).abs().max() > TRANSFORM_MIN, left_out
        if num_right == 0:
            check_server(folder, rows, expected)
        num_right += 1
    if name in REFUSED:
        assert num_right == 0
        assert all(REFUSED[name] in refusal for refusal in refusals)
    else:
        assert num_right > 0, refusals[0]
        # The other refusals are of a head that the flag denies, and of none where it needs one.
        reasons = (
            "stored with different values|has no head, only the embed|no head under a known name"
        )
        assert all(re.search(reasons, refusal) for refusal in refusals)


def scalars_of(level: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without lists and parts for other modalities."""
    kept = {}
    for key, value in level.items():
        if isinstance(value, dict) and "model_type" in value and not is_other_level(key):
            kept[key] = scalars_of(value)
        elif not isinstance(value, dict | list):
            kept[key] = value
    return kept


def case_of(folder: pathlib.Path, name: str, flags: dict[str, bool]) -> dict[str, Any]:
    """Returns the head of a class as head_cases.json has it. It is tied if all flags are true."""
    head = Head(name)
    is_tied = bool(flags) and all(flags.values())
    for each, tensor in list(head.stored.items()):
        role = (
            "head"
            if each in head.head_names or (is_tied and each in head.embedding_names)
            else "embedding"
        )
        role = "bias" if "bias" in each else role
        head.fill(each, head_cases.values(role, list(tensor.shape)))
    head.save(folder, with_head=not is_tied, flags=flags)
    roles = {}
    for each, tensor in load_file(folder / "model.safetensors").items():
        shape = list(tensor.shape)
        roles[each] = [
            next(r for r in head_cases.ROLES if torch.equal(tensor, head_cases.values(r, shape))),
            shape,
        ]
    loaded = head.loaded(folder, with_head=not is_tied, equal=False)
    expected = loaded.logits(head_cases.rows(head.hidden)).log_softmax(-1)
    ids = torch.arange(head_cases.ROWS)
    return {
        "name": name,
        "config": scalars_of(json.loads((folder / "config.json").read_text())),
        "hidden_size": head.hidden,
        "tensors": roles,
        "logprobs": [round(float(value), 6) for value in expected[ids, ids]],
    }


def test_the_cases_for_tests_without_transformers_are_current(tmp_path) -> None:
    found = [case_of(tmp_path / name, name, flags) for name, flags in CASES.items()]

    # A difference: write the file again with python tests/adapters/test_transformers_heads.py.
    assert found == head_cases.load()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        cases = [case_of(pathlib.Path(folder, name), name, flags) for name, flags in CASES.items()]
    head_cases.FILE.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
