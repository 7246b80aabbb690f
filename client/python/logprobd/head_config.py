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
    SCALE_FLAGS,
    TIE_KEY,
    is_config_level,
    is_other_level,
    may_change_logits,
    rule_of,
    transform_keys,
    transforms,
)
from logprobd.errors import InvalidArgument

CONFIG_FILE = "config.json"
MODEL_TYPE_KEY = "model_type"
_TRANSFORM_KEYS = transform_keys()
_KEPT_KEYS = frozenset(("architectures", MODEL_TYPE_KEY, "lm_head_bias")) | _TRANSFORM_KEYS
_DEPTH_MAX = 64
_KEYS_MAX = 32  # in a message


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
        ignored_keys: keys, or names of tensors, that do not change the logits although their names
            suggest that; several may be separated by colons. With "model_type" the head is a plain
            one, whatever the model.

    Raises InvalidArgument if the text is not a JSON object.
    """

    def __init__(
        self, text: str = "{}", path: str = CONFIG_FILE, ignored_keys: Collection[str] = ()
    ) -> None:
        try:
            text.encode()
            # Python writes NaN and Infinity, which are not JSON: no key that is read accepts them.
            top = json.loads(text.removeprefix("\ufeff"), parse_constant=str)
            _check_depth(top)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path} is not valid JSON: {error}") from None
        if not isinstance(top, dict):
            raise InvalidArgument(f"{path} is not a JSON object")
        self._top: dict[str, Any] = top
        self._ignored = frozenset(key for each in ignored_keys for key in each.split(":"))
        self._levels, self._names = _levels_of(top)
        types = [level.get(MODEL_TYPE_KEY) for level in reversed(self._levels)]
        known = [each for each in types if isinstance(each, str) and each]
        self.model_type: str = known[0] if known else "unknown"
        self._text_rule = rule_of(self._levels[0].get(MODEL_TYPE_KEY))
        self._outer, self._logits = self._rules()
        if MODEL_TYPE_KEY in self._ignored:
            self.model_type, self._outer, self._logits = "unknown", None, None

    @property
    def ignored(self) -> frozenset[str]:
        """Keys and names of tensors that the caller says to ignore."""
        return self._ignored

    @property
    def is_known(self) -> bool:
        """Whether the type of the model is known, and that of the text model if it makes logits."""
        is_inner = self._logits is not None and self._logits.get("inner", False)
        return rule_of(self._top.get(MODEL_TYPE_KEY)) is not None and not is_inner

    @property
    def warnings(self) -> list[str]:
        """What is surprising about the logits: a type that is not known, a default that counts."""
        if MODEL_TYPE_KEY in self._ignored:
            return []
        found = []
        if not self.is_known:
            what = f"{CONFIG_FILE} has no model_type"
            if self._top.get(MODEL_TYPE_KEY):
                what = f"model type {self.model_type} is not known"
            effect = "its text model decides about the logits"
            if self._logits is None or self._logits.get("inner"):
                effect = "its head is taken for a plain one, without scale and cap"
            found.append(f"{what}: {effect}")
        logits = self._logits or {}
        for rule in (*logits.get("scale", ()), logits.get("softcap", {"op": FLAG_OP})):
            key, is_flag = rule.get("key", ""), rule.get("op") == FLAG_OP
            default = self._default_of(key, rule.get("default"))
            if not (is_flag or self.has(key) or key in self._ignored or default in (None, 1)):
                found.append(
                    f"{CONFIG_FILE} has no {key}; the default of the model's class is used: "
                    f"{default:g}"
                )
        return found

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
        if not key:
            return None
        return next((level[key] for level in self._levels if key in level), None)

    def has(self, key: str) -> bool:
        return bool(key) and any(key in level for level in self._levels)

    @property
    def hidden_size(self) -> int | None:
        """Width of the head's rows. The innermost level that has any key for it counts."""
        for level in self._levels:
            for key in RULES["hidden_size_keys"]:
                if level.get(key) is not None:
                    return _dimension_of(key, level[key])
        return None

    @property
    def vocab_size(self) -> int | None:
        """Number of valid ids."""
        size = self._dimension("vocab_size")
        vocab = self.rule.get("vocab")
        if vocab is None or ("unless" in vocab and self._flag(vocab["unless"]) is not False):
            return size
        key = vocab["key"]
        if self.has(key):
            ids = self._dimension(key)
            return size if ids is None else ids
        default: int | None = vocab.get("default")
        return size if default is None else min(default, size or default)

    def _dimension(self, key: str) -> int | None:
        value = self.find(key)
        return None if value is None else _dimension_of(key, value)

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
        if not _fits_fp32(value):
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
        rule = self._outer if rule_of(self._top.get(MODEL_TYPE_KEY)) is not None else None
        flags = [self._tie_flag(level, rule) for level in self._levels]
        text = self._text_rule if self._outer is not None else None
        text_default = text is not None and text.get("tied") in (True, "always")
        says_true, says_false = True in flags, False in flags
        first = next((flag for flag in flags if flag is not None), None)
        if rule is None:
            is_contradictory = says_true and says_false
            stated = None if is_contradictory else first
            default = None if text is None or is_contradictory else text_default
            return Tie(stated, None, default, is_contradictory)
        tied = rule.get("tied", False)
        default = tied in (True, "always")
        kind = {"is_never": tied == "never", "is_always": tied == "always"}
        if rule.get("tie_any_level"):
            text_ties = text is not rule and text_default and flags[0] is None
            default = text_ties or (default and flags[-1] is None)
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
                kind["is_always"] = kind["is_always"] or of_level.get("tied") == "always"
                default = kind["is_always"] or of_level.get("tied") is True
        stated = flags[index]
        elsewhere = first if stated is None else None
        # Frameworks that build the text model by its own class find it untied.
        if stated is None and elsewhere is None and text not in (None, rule) and not text_default:
            elsewhere = False
        return Tie(stated, elsewhere, default, **kind, name=name)

    @staticmethod
    def _tie_flag(level: dict[str, Any], rule: dict[str, Any] | None) -> bool | None:
        for key in ((rule or {}).get("tie_key"), TIE_KEY):
            value = level.get(key) if key else None
            if value is not None:
                if not isinstance(value, bool):
                    raise InvalidArgument(
                        f"{key} of {CONFIG_FILE} is {value!r}, expected true or false"
                    )
                return value
        return None

    def logit_shape(
        self, *, scale: float | None = None, softcap: float | None = None
    ) -> LogitShape:
        """Returns the scale and the cap of the model's logits.

        Args:
            scale: the scale instead of that of the config.
            softcap: the cap instead of that of the config; 0: no cap.

        Raises InvalidArgument for a value that is not a positive number, and if the model makes its
        logits in a way that is not known.
        """
        self.check()
        if scale is None:
            scale = self._scale_of_type(self._logits or {})
        if softcap is None:
            softcap = self._softcap((self._logits or {}).get("softcap"))
        if not _fits_fp32(scale):
            raise InvalidArgument(f"the scale of the logits is {scale}, which does not fit fp32")
        return LogitShape(scale, softcap or None)

    def _scale_of_type(self, rule: dict[str, Any]) -> float:
        self._check_has_key(rule)
        factor = 1.0
        for scale in rule.get("scale", ()):
            if scale.get("key") not in self._ignored:
                factor *= self._scale(scale) or 1.0
        return factor

    def _check_has_key(self, rule: dict[str, Any]) -> None:
        keys = [scale["key"] for scale in rule.get("scale", ()) if "key" in scale]
        if rule.get("needs_key") and not any(self.has(k) or k in self._ignored for k in keys):
            raise InvalidArgument(
                f"models of type {self.model_type} scale their logits by {' or '.join(keys)}, "
                f"which {CONFIG_FILE} lacks; set scale"
            )

    def _default_of(self, key: str, own: float | None) -> float | None:
        """A class that reads a key of its text model gets the default of that model's class."""
        if self._text_rule is None or not key:
            return own
        rules = (self._text_rule.get("softcap", {}), *self._text_rule.get("scale", ()))
        found = [rule.get("default") for rule in rules if rule.get("key") == key]
        return next((default for default in found if default is not None), own)

    def _scale(self, rule: dict[str, Any]) -> float | None:
        key, default = rule.get("key", ""), rule.get("default")
        if rule["op"] == FLAG_OP:
            flag = self._flag(key if self.has(key) else rule.get("fallback", ""))
            if not (default if flag is None else flag):
                return None
            return 1 / math.sqrt(self._width(key))
        value = self._factor(key) if self.has(key) else self._default_of(key, default)
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
            return self._default_of(rule["key"], rule.get("default"))
        value = self.find(rule["key"])
        is_off = isinstance(value, int | float) and value == 0
        return None if is_off else self._factor(rule["key"])

    def check(self) -> None:
        """Raises InvalidArgument if the model makes its logits in a way that is not served."""
        understood = []
        if rule_of(self._top.get(MODEL_TYPE_KEY)) is None and MODEL_TYPE_KEY not in self._ignored:
            self._refuse_unknown_levels(self._top)
        if self._outer is not None and self._logits is not None:
            understood = [self._outer, self._logits]
            understood += [] if self._text_rule is None else [self._text_rule]
            for level in self._levels:
                self._refuse_type(level.get(MODEL_TYPE_KEY))
            self._check_text_model()
        found = {
            key: json.dumps(value)[:64]
            for key, value in self._suspicious(self._top)
            if not any(
                transforms(rule, key) or key in rule.get("no_effect", ()) for rule in understood
            )
        }
        if found:
            shown = sorted(found)[:_KEYS_MAX]
            keys = ", ".join(f"{key} ({found[key]})" for key in shown)
            more = f" and {len(found) - _KEYS_MAX} more" if len(found) > _KEYS_MAX else ""
            raise InvalidArgument(
                f"{CONFIG_FILE} has the key{'s' * (len(found) > 1)} {keys}{more}, which may change "
                f"the logits and {'are' if len(found) > 1 else 'is'} not understood for model type "
                f"{self.model_type}; ignore the key {':'.join(shown)}, together with softcap for a "
                "cap or scale for a factor, if the logits are otherwise a plain product"
            )

    def _refuse_unknown_levels(self, level: dict[str, Any]) -> None:
        """Refuses a model that transforms logits, at a level where keys are not searched."""
        for key, value in sorted(level.items()):
            if not isinstance(value, dict) or is_other_level(key):
                continue
            is_searched = any(value is each for each in self._levels)
            rule = (None if is_searched else rule_of(value.get(MODEL_TYPE_KEY))) or {}
            if not rule.keys().isdisjoint(("scale", "softcap", "refused")):
                raise InvalidArgument(
                    f"{CONFIG_FILE} describes a model of type {value[MODEL_TYPE_KEY]} at {key}, a "
                    "level that is not known; if it is the text model, which then transforms the "
                    f"logits, move it to text_config, and otherwise ignore the key {MODEL_TYPE_KEY}"
                    ", with scale and softcap if needed"
                )
            self._refuse_unknown_levels(value)

    def _suspicious(self, level: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
        items = level.items() if isinstance(level, dict) else ((None, each) for each in level)
        for key, value in items:
            # 0, "", [], {}, null and false are off.
            if not value or key in self._ignored:
                continue
            if key is not None and may_change_logits(key):
                yield key, value
            elif isinstance(value, dict | list) and (key is None or not is_other_level(key)):
                yield from self._suspicious(value)

    def _refuse_type(self, model_type: Any) -> None:
        rule = rule_of(model_type) or {}
        reason = rule.get("refused")
        if reason and self._dimension("vocab_size") not in rule.get("plain_vocab", ()):
            raise InvalidArgument(
                f"models of type {model_type} are not served: {reason}; to use it as the "
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
                is_off = self.find(key) in (None, False, 0)
                value = neutral if is_off else self._factor(key)
            if value is not None and value != neutral:
                raise InvalidArgument(
                    f"the text model, {self._levels[0][MODEL_TYPE_KEY]}, changes its logits by "
                    f"{key} ({value:g}), but transformers {RULES['transformers']} ignores that "
                    f"inside {self.model_type}, and vLLM builds the text model by its own class; "
                    "say which is right: set softcap (0: no cap) or scale (1: no factor), and "
                    f"ignore the key {key}"
                )

    def text_for_head(self, hidden_size: int, vocab_size: int) -> str:
        """Returns the config.json of the head alone."""
        sizes: dict[str, Any] = {"hidden_size": hidden_size, "vocab_size": vocab_size}
        rule = rule_of(self._top.get(MODEL_TYPE_KEY))
        if rule is None or not transforms(rule, TIE_KEY) or TIE_KEY in self._ignored:
            sizes[TIE_KEY] = False
        elif TIE_KEY in self._top:
            sizes[TIE_KEY] = self._top[TIE_KEY]
        # A class has a default for a key that is missing, and none for null; false is a flag's off.
        ignored: dict[str, Any] = dict.fromkeys(sorted(self._ignored & _TRANSFORM_KEYS))
        ignored |= dict.fromkeys(self._ignored & SCALE_FLAGS, False)
        return json_text(self._head_keys_of(self._top) | ignored | sizes)

    def _head_keys_of(self, level: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for key, value in level.items():
            if key in self._ignored:
                continue
            if isinstance(value, dict) and not may_change_logits(key):
                inner = {} if is_other_level(key) else self._head_keys_of(value)
                # An empty level hides others in which keys would be searched instead.
                if inner or is_config_level(key):
                    kept[key] = inner
            elif key in _KEPT_KEYS or may_change_logits(key):
                kept[key] = value
        return kept


def _dimension_of(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"{key} of {CONFIG_FILE} is {value!r}, expected a positive integer")
    return value


def _fits_fp32(value: float) -> bool:
    """Returns whether a number is positive and finite in fp32."""
    try:
        return 0 < ctypes.c_float(value).value < math.inf
    except OverflowError:  # an integer beyond double precision
        return False


def _check_depth(top: Any) -> None:
    """Raises ValueError for nesting that the server does not read."""
    level, depth = [top], 0
    while level:
        depth += any(isinstance(each, dict | list) for each in level)
        if depth > _DEPTH_MAX:
            raise ValueError(f"it is nested deeper than {_DEPTH_MAX} levels")
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]


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
