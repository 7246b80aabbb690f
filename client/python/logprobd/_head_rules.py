"""The rules that say which tensor of a checkpoint is the head, and how a model makes logits of it.

They stand in head_rules.json, which the server compiles in; server/weights/README.md describes
them, and tests compare the two readers.
"""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

RULES: dict[str, Any] = json.loads(
    (importlib.resources.files("logprobd") / "head_rules.json").read_text(encoding="utf-8")
)
HEAD_NAMES: tuple[str, ...] = tuple(RULES["head_names"])
EMBEDDING_NAMES: tuple[str, ...] = tuple(RULES["embedding_names"])

TIE_KEY = "tie_word_embeddings"
FINAL_LOGITS_BIAS = "final_logits_bias"
FLAG_OP = "inverse_sqrt_hidden_size"

# A key that transforms the logits of one type is not ignored silently for another.
_LOGIT_KEYS = (
    *RULES["logit_keys"],
    *(
        scale["key"]
        for rule in RULES["types"].values()
        for scale in rule.get("scale", ())
        if scale["op"] != FLAG_OP
    ),
)
SCALE_FLAGS = frozenset(
    scale["key"]
    for rule in RULES["types"].values()
    for scale in rule.get("scale", ())
    if scale["op"] == FLAG_OP and "key" in scale
)
"""Flags that scale the logits of some type."""
_NOT_HEADS = frozenset(RULES["not_heads"])
_NOT_HEAD_PARTS = frozenset(RULES["not_head_parts"])
_LOGIT_TENSOR_PARTS = frozenset(RULES["logit_tensor_parts"])
_HEAD_PARTS = frozenset(RULES["head_parts"])
_HEAD_WORDS = frozenset(RULES["head_words"])
_ADAPTER_PARTS = frozenset(RULES["adapter_parts"])


def rule_of(model_type: object) -> dict[str, Any] | None:
    """Returns the rule of a model type, or None if the type is not known."""
    return RULES["types"].get(model_type) if isinstance(model_type, str) else None


def transforms(rule: dict[str, Any], key: str) -> bool:
    """Returns whether `key` scales or caps the logits of a type."""
    return rule.get("softcap", {}).get("key") == key or any(
        key in (scale.get("key"), scale.get("fallback")) for scale in rule.get("scale", ())
    )


def transform_keys() -> frozenset[str]:
    """Returns the keys that scale or cap the logits of some type or say how many ids are valid."""
    keys = set()
    for rule in RULES["types"].values():
        keys |= {scale["key"] for scale in rule.get("scale", ()) if "key" in scale}
        keys |= {rule[part]["key"] for part in ("softcap", "vocab") if part in rule}
    return frozenset(keys - {TIE_KEY})


def may_be_head(name: str) -> bool:
    """Returns whether a tensor of this name may be a head."""
    lower = name.lower()
    is_candidate = lower in _HEAD_PARTS
    for part in lower.split("."):
        if part in _NOT_HEADS or (part in _NOT_HEAD_PARTS and not is_candidate):
            return False
        words = part.split("_")
        is_candidate = is_candidate or part in _HEAD_PARTS or not _HEAD_WORDS.isdisjoint(words)
    return is_candidate


def may_shift_logits(name: str) -> bool:
    """Returns whether a tensor of this name may scale or shift the logits of a known head."""
    parts = name.lower().split(".")
    return _NOT_HEAD_PARTS.isdisjoint(parts) and not _LOGIT_TENSOR_PARTS.isdisjoint(parts)


def is_of_adapter(name: str) -> bool:
    """Returns whether a tensor belongs to an adapter, or to a part that an adapter replaces."""
    return bool(_ADAPTER_PARTS.intersection(name.lower().split(".")))


def may_change_logits(key: str) -> bool:
    """Returns whether the name of a key suggests that it changes the logits."""
    lower = key.lower()
    return (
        lower not in RULES["harmless_keys"]
        and not any(word in RULES["harmless_key_words"] for word in lower.split("_"))
        and any(part in lower for part in _LOGIT_KEYS)
    )


def is_other_level(key: str) -> bool:
    """Returns whether a part of config.json describes something other than the text model."""
    words = key.lower().split("_")
    return not any(word in RULES["text_level_words"] for word in words) and any(
        word.startswith(tuple(RULES["other_level_words"])) for word in words
    )


def is_config_level(key: str) -> bool:
    """Returns whether keys are searched in a part of config.json of this name."""
    return any(path.split(".")[0] == key for path in RULES["config_levels"])
