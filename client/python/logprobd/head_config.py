"""Reads from a config.json how a model makes logits of its head, as the server does."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from logprobd._head_rules import (
    FLAG_OP,
    RULES,
    TIE_KEY,
    is_other_level,
    may_change_logits,
    rule_of,
    transform_keys,
    transforms,
)
from logprobd.errors import InvalidArgument

CONFIG_FILE = "config.json"
MODEL_TYPE_KEY = "model_type"
_KEPT_KEYS = frozenset(("architectures", MODEL_TYPE_KEY, "lm_head_bias")) | transform_keys()


class LogitShape(NamedTuple):
    """Logits are z = cap(scale * (h . w) + bias), with cap(x) = softcap * tanh(x / softcap)."""

    scale: float
    """Above 0; 1 leaves the products unchanged."""
    softcap: float | None
    """Above 0; None: no cap."""


class Tie(NamedTuple):
    """What a config says about head and embedding being one tensor."""

    stated: bool | None
    """The flag at the level that the model's class reads; None if it is not set there."""
    elsewhere: bool | None
    """The flag at other levels where `stated` is None."""
    by_default: bool | None
    """What the class assumes if the flag is not set; None for an unknown type."""
    is_contradictory: bool = False
    """Levels of an unknown type contradict each other."""
    is_never: bool = False
    is_always: bool = False
    """The class never ties, or always, whatever the flag says."""
    name: str = TIE_KEY


class HeadConfig:
    """The parts of a config.json that describe a head. An empty one describes nothing.

    Args:
        text: the text of the file.
        path: its name in messages.
        ignored_keys: keys that do not change the logits although their names suggest that. With
            "model_type" the head is a plain one, whatever the model.

    Raises InvalidArgument if the text is not a JSON object.
    """

    def __init__(
        self, text: str = "{}", path: str = CONFIG_FILE, ignored_keys: Collection[str] = ()
    ) -> None:
        try:
            # Python writes NaN and Infinity, which are not JSON; the server reads them as null.
            top = json.loads(text, parse_constant=lambda _: None)
        except ValueError as error:
            raise InvalidArgument(f"{path} is not valid JSON: {error}") from None
        if not isinstance(top, dict):
            raise InvalidArgument(f"{path} is not a JSON object")
        self._top: dict[str, Any] = top
        self._ignored = frozenset(ignored_keys)
        self._levels, self._names = _levels_of(top)
        types = [level.get(MODEL_TYPE_KEY) for level in reversed(self._levels)]
        known = [each for each in types if isinstance(each, str) and each]
        self.model_type: str = known[0] if known else "unknown"
        self._text_rule = rule_of(self._levels[0].get(MODEL_TYPE_KEY))
        self._outer, self._logits = self._rules()
        if MODEL_TYPE_KEY in self._ignored:
            self.model_type, self._outer, self._logits = "unknown", None, None

    @property
    def is_known(self) -> bool:
        """Whether the type of the model as a whole is known."""
        return rule_of(self._top.get(MODEL_TYPE_KEY)) is not None

    @property
    def rule(self) -> dict[str, Any]:
        """The rule of the model's type; empty if the type is not known."""
        return self._outer or {}

    def _rules(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Returns the rules of the type of the whole model, and of the one that makes logits."""
        outer = logits = None
        for level in reversed(self._levels):
            rule = rule_of(level.get(MODEL_TYPE_KEY))
            if rule is None:
                continue
            outer, logits = rule if outer is None else outer, rule
            if not rule.get("inner"):
                break
        return outer, logits

    def find(self, key: str) -> Any:
        """Returns the value of a key at the innermost level that has it, or None."""
        return next((level[key] for level in self._levels if key in level), None)

    def has(self, key: str | None) -> bool:
        return any(key in level for level in self._levels)

    @property
    def hidden_size(self) -> int | None:
        sizes = (self._dimension(key) for key in RULES["hidden_size_keys"])
        return next((size for size in sizes if size is not None), None)

    @property
    def vocab_size(self) -> int | None:
        """Number of valid ids."""
        size = self._dimension("vocab_size")
        vocab = self.rule.get("vocab")
        if vocab is None:
            return size
        key = vocab["key"]
        valid = self._dimension(key) if self.has(key) else vocab.get("default")
        return size if valid is None else min(valid, valid if size is None else size)

    def _dimension(self, key: str) -> int | None:
        value = self.find(key)
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidArgument(
                f"{key} of {CONFIG_FILE} is {value!r}, expected a positive integer"
            )
        return value

    def _flag(self, key: str) -> bool | None:
        value = self.find(key)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(f"{key} of {CONFIG_FILE} is {value!r}, expected true or false")
        return value

    def _factor(self, key: str) -> float | None:
        """Returns a factor or cap, or None if it is missing, null or false."""
        value = self.find(key)
        if value is None or value is False:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"{key} of {CONFIG_FILE} is {value!r}, expected a number")
        if not 0 < ctypes.c_float(value).value < math.inf:
            raise InvalidArgument(
                f"{key} of {CONFIG_FILE} is {value!r}, expected a positive number that fits fp32"
            )
        return float(value)

    @property
    def has_bias(self) -> bool | None:
        """lm_head_bias; None if it is not set."""
        return self._flag("lm_head_bias")

    @property
    def tie(self) -> Tie:
        """What the config says about tied weights."""
        rule = self._outer
        flags = [self._tie_flag(level) for level in self._levels]
        says_true, says_false = True in flags, False in flags
        first = next((flag for flag in flags if flag is not None), None)
        if rule is None:
            is_contradictory = says_true and says_false
            return Tie(None if is_contradictory else first, None, None, is_contradictory)
        tied = rule.get("tied", False)
        default = tied in (True, "always")
        kind = {"is_never": tied == "never", "is_always": tied == "always"}
        text = self._text_rule
        if rule.get("tie_any_level"):
            text_default = text is not None and text is not rule and text.get("tied") is True
            default = (text_default and flags[0] is None) or (default and flags[-1] is None)
            stated = True if says_true else (False if says_false and not default else None)
            return Tie(stated, None, default, **kind)
        level = rule.get("tie_level", "")
        # A file of the text model alone has no such level; then the top counts.
        index = self._names.index(level) if level in self._names else len(self._names) - 1
        name = TIE_KEY
        if self._names[index]:
            name = f"{self._names[index]}.{TIE_KEY}"
            of_level = rule_of(self._levels[index].get(MODEL_TYPE_KEY))
            if of_level is not None and of_level is not rule:
                default = of_level.get("tied") is True
        stated = flags[index]
        return Tie(stated, first if stated is None else None, default, **kind, name=name)

    def _tie_flag(self, level: dict[str, Any]) -> bool | None:
        for key in ((self._outer or {}).get("tie_key"), TIE_KEY):
            value = level.get(key) if key else None
            if value is not None:
                if not isinstance(value, bool):
                    raise InvalidArgument(
                        f"{key} of {CONFIG_FILE} is {value!r}, expected true or false"
                    )
                return value
        return None

    def logit_shape(self) -> LogitShape:
        """Returns the scale and the cap of the model's logits.

        Raises InvalidArgument for a value that is not a positive number, and if the model makes its
        logits in a way that is not known.
        """
        self.check()
        scale, softcap = 1.0, None
        if self._logits is not None:
            for rule in self._logits.get("scale", ()):
                if rule.get("key") not in self._ignored:
                    scale *= self._scale(rule) or 1.0
            softcap = self._softcap(self._logits.get("softcap"))
        if not 0 < ctypes.c_float(scale).value < math.inf:
            raise InvalidArgument(f"the scale of the logits is {scale}, which does not fit fp32")
        return LogitShape(scale, softcap)

    def _scale(self, rule: dict[str, Any]) -> float | None:
        key, default = rule.get("key", ""), rule.get("default")
        if rule["op"] == FLAG_OP:
            flag = self._flag(key if self.has(key) else rule.get("fallback", ""))
            if not (default if flag is None else flag):
                return None
            return 1 / math.sqrt(self._width(key))
        value = self._factor(key) if self.has(key) else default
        if value is None:
            return None
        if rule["op"] == "over_hidden_size":
            return value / self._width(key)
        return 1 / value if rule["op"] == "divide" else value

    def _width(self, key: str) -> int:
        if self.hidden_size is None:
            raise InvalidArgument(f"{key} of the config needs hidden_size, which is missing")
        return self.hidden_size

    def _softcap(self, rule: dict[str, Any] | None) -> float | None:
        if rule is None or rule["key"] in self._ignored:
            return None
        if not self.has(rule["key"]):
            return rule.get("default")
        value = self.find(rule["key"])
        is_off = isinstance(value, int | float) and value == 0
        return None if is_off else self._factor(rule["key"])

    def check(self) -> None:
        """Raises InvalidArgument if the model makes its logits in a way that is not served."""
        understood = []
        if self._outer is not None and self._logits is not None:
            for rule in (self._outer, self._logits):
                self._refuse_type(rule)
            self._check_text_model()
            understood = [self._outer, self._logits]
            understood += [] if self._text_rule is None else [self._text_rule]
        for key, value in self._suspicious(self._top):
            is_known = any(
                transforms(rule, key) or key in rule.get("no_effect", ()) for rule in understood
            )
            if not is_known:
                raise InvalidArgument(
                    f"{CONFIG_FILE} has the key {key} ({json.dumps(value)}), which may change the "
                    f"logits and is not understood for model type {self.model_type}; if it caps "
                    "the logits, set softcap; if it scales them, scale; and in any case ignore "
                    f"the key {key}"
                )

    def _suspicious(self, level: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in sorted(level.items()):
            # 0, "", [], {}, null and false are off.
            if not value or key in self._ignored:
                continue
            if isinstance(value, dict):
                if not is_other_level(key):
                    yield from self._suspicious(value)
            elif may_change_logits(key):
                yield key, value

    def _refuse_type(self, rule: dict[str, Any]) -> None:
        vocab = str(self._dimension("vocab_size") or 0)
        reason = rule.get("refused_vocab", {}).get(vocab, rule.get("refused"))
        if reason:
            raise InvalidArgument(
                f"models of type {self.model_type} are not served: {reason}; to use it as the "
                f"plain head of some other model, ignore the key {MODEL_TYPE_KEY}"
            )

    def _check_text_model(self) -> None:
        text = self._text_rule
        if text is None or text is self._logits or self._logits is None:
            return
        keys = [
            (s["key"], s.get("default"), 1) for s in text.get("scale", ()) if s["op"] != FLAG_OP
        ]
        if "softcap" in text:
            keys.append((text["softcap"]["key"], text["softcap"].get("default"), 0))
        for key, default, neutral in keys:
            if transforms(self._logits, key) or key in self._ignored:
                continue
            value = default
            if self.has(key):
                value = (self._factor(key) if self.find(key) else None) or neutral
            if value is not None and value != neutral:
                raise InvalidArgument(
                    f"the text model, {self._levels[0][MODEL_TYPE_KEY]}, changes its logits by "
                    f"{key} ({value:g}), but transformers {RULES['transformers']} ignores that "
                    f"inside {self.model_type}, and vLLM does not; say which is right: set softcap "
                    f"or scale, and ignore the key {key}"
                )

    def text_for_head(self, hidden_size: int, vocab_size: int) -> str:
        """Returns the config.json of the head alone."""
        sizes: dict[str, Any] = {"hidden_size": hidden_size, "vocab_size": vocab_size}
        rule = rule_of(self._top.get(MODEL_TYPE_KEY))
        if rule is None or not transforms(rule, TIE_KEY):
            sizes[TIE_KEY] = False
        elif TIE_KEY in self._top:
            sizes[TIE_KEY] = self._top[TIE_KEY]
        return json_text(self._head_keys_of(self._top) | sizes)

    def _head_keys_of(self, level: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for key, value in level.items():
            if key in self._ignored:
                continue
            if isinstance(value, dict):
                inner = {} if is_other_level(key) else self._head_keys_of(value)
                if inner:
                    kept[key] = inner
            elif key in _KEPT_KEYS or may_change_logits(key):
                kept[key] = value
        return kept


def json_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _levels_of(top: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the objects in which keys are searched, innermost first, and their paths."""
    rule = rule_of(top.get(MODEL_TYPE_KEY)) or {}
    paths = [rule["text"]] if "text" in rule else RULES["config_levels"]
    for path in paths:
        outer, _, inner = path.partition(".")
        enclosing = _object(top, outer)
        if enclosing is None:
            continue
        if not inner:
            return [enclosing, top], [path, ""]
        text = _object(enclosing, inner)
        if text is None:
            return [enclosing, top], [outer, ""]
        return [text, enclosing, top], [path, outer, ""]
    return [top], [""]


def _object(parent: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = parent.get(key)
    if value is not None and not isinstance(value, dict):
        raise InvalidArgument(f"{key} of {CONFIG_FILE} is not an object")
    return value
