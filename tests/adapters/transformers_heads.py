"""Heads of the classes of transformers: folders as it saves them, and the logits that it computes from them.

A class is built with its default config, on the device "meta", so that its layers take no memory. Only head and
embedding have values, and every part that computes hidden states returns rows of a test. What is left is what the class
does between the hidden states and the logits.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import pathlib
import signal
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

VOCAB, ROWS = 97, 5
TIE = "tie_word_embeddings"
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
VOCAB_KEYS = (
    "vocab_size",
    "text_vocab_size",
    "decoder_vocab_size",
    "src_vocab_size",
    "tgt_vocab_size",
)
# Values of keys that are off by default.
OFF_DEFAULT = {"final_logit_softcapping": 5.0, "logit_scale": 0.4, "unpadded_vocab_size": VOCAB - 6}


# Settings without which the default config of a class gives no model.
COMPLETED: dict[str, dict[str, Any]] = {
    "AyaVisionForConditionalGeneration": {"vision_config.num_attention_heads": 16},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 1}},
    "DbrxForCausalLM": {"attn_config.rope_theta": 1e4},
    "Dots1ForCausalLM": {"n_routed_experts": 4},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 1}},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "HunYuanVLForConditionalGeneration": {"text_config.head_dim": 128},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention"] * 32},
    "MinistralForCausalLM": {"head_dim": 128},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "Ovis2ForConditionalGeneration": {"hidden_size": 4096},
    "ReformerModelWithLMHead": {"is_decoder": True},
}


def without_keys(level: Any, keys: Collection[str]) -> Any:
    if isinstance(level, dict):
        return {key: without_keys(value, keys) for key, value in level.items() if key not in keys}
    return level


class NotBuilt(Exception):
    """A class that cannot be built or called in this way."""


def classes() -> list[str]:
    """Returns the names of the classes that return logits over a vocabulary."""
    found: dict[str, None] = {}
    for mapping in MAPPINGS:
        for names in mapping.values():
            found |= dict.fromkeys([names] if isinstance(names, str) else names)
    return list(found)


def levels_of(config: PretrainedConfig, path: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yields a config and those inside it, with their paths."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from levels_of(value, f"{path}.{name}" if path else name)


def default_config(cls: type[PreTrainedModel]) -> PretrainedConfig:
    """Returns the config of a class, as a file gives it, with a small vocabulary and every number off its default."""
    settings = json.loads(cls.config_class().to_json_string(use_diff=False))
    text = cls.config_class()
    for path, level in levels_of(text):
        place = settings
        for part in filter(None, path.split(".")):
            place = place.setdefault(part, {})
        for key, value in vars(level).items():
            if key in VOCAB_KEYS:
                place[key] = VOCAB
            elif key in OFF_DEFAULT and value is None or key == "unpadded_vocab_size":
                place[key] = OFF_DEFAULT[key]
            elif type(value) is float and (
                "logit" in key or "mult" in key or "scal" in key or "cap" in key
            ):
                place[key] = value * 0.6 if value else 0.6
            elif key.endswith("_token_id") and isinstance(value, int):
                place[key] = min(value, VOCAB - 1)
    for path, value in COMPLETED.get(cls.__name__, {}).items():
        place = settings
        *parents, key = path.split(".")
        for part in parents:
            place = place.setdefault(part, {})
        place[key] = value
    # A file may have numbers that JSON lacks in a form of its own.
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(settings))
        return cls.config_class.from_pretrained(folder)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise NotBuilt(f"no result after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Head:
    """A class of transformers with values in its head and its embedding."""

    def __init__(self, name: str, config: PretrainedConfig | None = None, seed: int = 0) -> None:
        self.cls = getattr(transformers, name)
        config = default_config(self.cls) if config is None else config
        with torch.device("meta"):
            self.model = self.cls(copy.deepcopy(config)).eval()
        head = self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Module) or not hasattr(head, "weight"):
            raise NotBuilt("get_output_embeddings() returns no layer with a weight")
        self._head = head
        self._random = torch.Generator().manual_seed(seed)
        self.hidden = head.weight.shape[1]
        self.stored: dict[str, torch.Tensor] = {}
        modules = self.model.named_modules(remove_duplicate=False)
        names = {f"{n}.weight" for n, module in modules if module is head}
        self.head_names = names
        self.ties = self._all_ties()
        self.embedding_names = {source for target, source in self.ties.items() if target in names}
        self.embedding_names |= {target for target, source in self.ties.items() if source in names}
        self.embedding_names -= names
        if not self.embedding_names:
            embedding = self.model.get_input_embeddings()
            modules = self.model.named_modules(remove_duplicate=False)
            self.embedding_names = {f"{n}.weight" for n, module in modules if module is embedding}
        for each in sorted(names | self.embedding_names):
            self.fill(each, self._normal(*self.model.get_parameter(each).shape))
        if getattr(head, "bias", None) is not None:
            bias = torch.randn(head.bias.shape, generator=self._random)
            for n in names:
                self.fill(n.removesuffix("weight") + "bias", bias)
        for n, buffer in list(self.model.named_buffers()):
            if n.endswith("final_logits_bias"):
                self._set(n, torch.randn(buffer.shape, generator=self._random), is_buffer=True)
        # Small parameters that the class itself reads, such as a norm before the head.
        for n, p in list(self.model.named_parameters()):
            if p.is_meta and n.count(".") <= 1 and p.numel() < 10_000_000:
                self._set(n, torch.randn(p.shape, generator=self._random))

    def _all_ties(self) -> dict[str, str]:
        config = copy.deepcopy(self.model.config)
        for _, level in levels_of(self.model.config):
            level.tie_word_embeddings = True
        try:
            return self.model.get_expanded_tied_weights_keys(all_submodels=True)
        finally:
            flags = {path: getattr(level, TIE, None) for path, level in levels_of(config)}
            for path, level in levels_of(self.model.config):
                level.tie_word_embeddings = flags[path]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random) * (4 / shape[-1] ** 0.5)

    def _set(self, name: str, value: torch.Tensor, *, is_buffer: bool = False) -> None:
        parent, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(parent)
        if is_buffer:
            module._buffers[leaf] = value
        else:
            module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        self.stored[name] = value

    def fill(self, name: str, value: torch.Tensor) -> None:
        """Sets a parameter, or the buffer that BART adds to the logits."""
        self._set(name, value, is_buffer=name.endswith("final_logits_bias"))

    def save(
        self,
        folder: pathlib.Path,
        *,
        with_head: bool = True,
        equal: bool = False,
        flags: dict[str, bool | None] | None = None,
        without: Collection[str] = (),
    ) -> None:
        """Writes config.json and the tensors of head, embedding and bias as transformers stores them.

        Args:
            with_head: whether the head is stored beside the embedding.
            equal: whether both have the same values.
            flags: values of tie_word_embeddings at the levels of the config; None removes the flag there.
            without: keys that are removed at every level.
        """
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads(self.model.config.to_json_string(use_diff=False))
        settings["architectures"] = [self.cls.__name__]
        for path, value in (flags or {}).items():
            place = settings
            for part in filter(None, path.split(".")):
                place = place[part]
            place.pop(TIE, None)
            if value is not None:
                place[TIE] = value
        (folder / "config.json").write_text(json.dumps(without_keys(settings, without)))
        state = {
            name: value
            for name, value in self.stored.items()
            if with_head or name not in self.head_names
        }
        if equal:
            state |= dict.fromkeys(self.head_names, self.stored[min(self.embedding_names)])
        kept = self.head_names | self.embedding_names
        state = {
            name: value.clone().contiguous()
            for name, value in state.items()
            if name in kept or name.endswith("final_logits_bias") or self._is_head_bias(name)
        }
        save_file(revert_weight_conversion(self.model, state), folder / "model.safetensors")

    def _is_head_bias(self, name: str) -> bool:
        return name.endswith("bias") and any(
            name.startswith(h.removesuffix("weight")) for h in self.head_names
        )

    def loaded(self, folder: pathlib.Path, *, with_head: bool, equal: bool) -> Head:
        """Returns the head as transformers loads it from the folder, tied or not by its code, in double precision."""
        config = self.cls.config_class.from_pretrained(folder)
        fresh = Head(self.cls.__name__, config)
        missing = set() if with_head else set(fresh.head_names)
        for name, value in self.stored.items():
            is_buffer = name.endswith("final_logits_bias")
            fresh._set(name, value.double(), is_buffer=is_buffer)
        if equal:
            for name in fresh.head_names:
                fresh._set(name, self.stored[min(self.embedding_names)].double())
        names = {n for n, _ in fresh.model.named_parameters(remove_duplicate=False)}
        missing |= {n for n in names if n not in fresh.stored}
        fresh.still_missing = missing
        fresh.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        return fresh

    @property
    def has_twin(self) -> bool:
        """Whether head and embedding have the same shape, so that they can be one tensor."""
        shapes = {self.stored[name].shape for name in self.head_names | self.embedding_names}
        return bool(self.embedding_names) and len(shapes) == 1

    @property
    def has_head(self) -> bool:
        """Whether loading found values for the head."""
        return not self.head_names & self.still_missing

    still_missing: set[str] = frozenset()  # type: ignore[assignment]

    def rows(self) -> torch.Tensor:
        return torch.randn((1, ROWS, self.hidden), generator=torch.Generator().manual_seed(7))

    def logits(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits [rows, vocabulary] that the class computes from rows [rows, hidden], by default rows()."""
        rows = (self.rows() if rows is None else rows[None]).double()
        patch_bodies(self.model, rows)
        ids = torch.zeros((1, ROWS), dtype=torch.long)
        arguments: dict[str, Any] = {"input_ids": ids}
        if self.model.config.is_encoder_decoder:
            arguments["decoder_input_ids"] = ids
        for name, parameter in inspect.signature(self.model.forward).parameters.items():
            if (
                parameter.default is parameter.empty
                and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ):
                arguments.setdefault(name, ids)
        with torch.no_grad():
            result = self.model(**arguments)
        logits = (
            result.logits if hasattr(result, "logits") and result.logits is not None else result[0]
        )
        return logits.reshape(-1, logits.shape[-1])


class _States:
    """Hidden states as the output of any class: whatever else it has is None."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.last_hidden_state = rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: Any) -> Any:
        return (
            (self.last_hidden_state,)[index]
            if index in (0, slice(0, 1))
            else ()
            if isinstance(index, slice)
            else None
        )

    def __len__(self) -> int:
        return 1

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) or default

    def to_tuple(self) -> tuple[torch.Tensor]:
        return (self.last_hidden_state,)


def patch_bodies(model: PreTrainedModel, rows: torch.Tensor) -> None:
    """Lets every model inside `model`, except those with the head, return `rows` as hidden states."""

    def states(*_: Any, **__: Any) -> _States:
        return _States(rows)

    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and all(
            each is not head for each in module.modules()
        ):
            module.forward = states  # type: ignore[method-assign]
