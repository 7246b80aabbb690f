"""Chooses which tensor of a checkpoint is the head, as the server does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from logprobd._head_rules import (
    EMBEDDING_NAMES,
    FINAL_LOGITS_BIAS,
    HEAD_NAMES,
    RULES,
    is_of_adapter,
    may_be_head,
    may_shift_logits,
)
from logprobd.errors import InvalidArgument
from logprobd.head_config import CONFIG_FILE, HeadConfig, Tie

_NAMES_MAX = 8

# Names that trainers put before the model's own names. A known name behind other words belongs to
# something else, such as an optimizer or a layer for multi-token prediction.
_WRAPPERS = re.compile(
    r"((model\d*|module|state_dict|state|app|actor|policy|language_model|thinker|llava_model"
    r"|_fsdp_wrapped_module|_orig_mod|_forward_module)\.)*"
)

_KNOWN_STEMS = frozenset(name.removesuffix(".weight") for name in (*HEAD_NAMES, *EMBEDDING_NAMES))

HaveEqualRows = Callable[[str, str], bool | None]
"""Returns whether the valid rows of two tensors, by their names, have equal values.

Returns None if they cannot be one tensor, and the second not be the head: it is no matrix, has
fewer rows than the vocabulary, or other columns than the hidden size.
"""


def choose_head(
    names: Sequence[str], config: HeadConfig, have_equal_rows: HaveEqualRows, head_tensor: str = ""
) -> tuple[str, bool]:
    """Returns the name of the head's tensor, and whether it is an embedding.

    Args:
        names: names of all tensors of the checkpoint.
        have_equal_rows: is called if a head and an embedding are stored that should be one.
        head_tensor: the name, if the user says it.

    Raises InvalidArgument, whose message says what to change, if there is no head, if the stored
    tensors and the config contradict each other, or if the head is quantised, has an adapter or is
    stored in a form that is not known.
    """
    heads = _with_first(config.rule.get("head"), HEAD_NAMES)
    embeddings = _with_first(config.rule.get("embedding"), EMBEDDING_NAMES)
    if head_tensor:
        _refuse_quantised(names, [head_tensor])
        if head_tensor not in names:
            raise InvalidArgument(f"the checkpoint has no tensor {head_tensor}; {_similar(names)}")
        name = head_tensor
        is_embedding = any(_find([head_tensor], each) for each in embeddings)
    else:
        name, is_embedding = _choose(names, config, have_equal_rows, heads, embeddings)
    _check_form(names, name)
    transforms = [each for each in names if may_shift_logits(each)]
    if head_tensor and is_embedding:
        # The bias of a head whose name is not known would be lost with that head.
        transforms += [
            each for each in _unknown_heads(names, heads, embeddings) if each.endswith(".bias")
        ]
    transforms = [each for each in transforms if each not in config.ignored]
    if transforms:
        raise InvalidArgument(
            "the checkpoint stores tensors that may scale or shift the logits and are not "
            f"understood ({', '.join(transforms[:_NAMES_MAX])}); if they do not, ignore the key "
            f"{':'.join(transforms[:_NAMES_MAX])}"
        )
    return name, is_embedding


def choose_bias(
    names: Sequence[str], config: HeadConfig, weight: str, is_embedding: bool
) -> str | None:
    """Returns the name of the head's bias, or None.

    Raises InvalidArgument if the config requires a bias that is missing, or if there are two.
    """
    sibling = stem(weight) + ".bias"
    found = sibling if weight.endswith(".weight") and sibling in names else None
    if found is None and is_embedding:
        heads = _with_first(config.rule.get("head"), HEAD_NAMES)
        found = _first(names, [stem(name) + ".bias" for name in heads])
    biases = [name for name in names if name.split(".")[-1] == FINAL_LOGITS_BIAS]
    biases += [] if found is None else [found]
    if len(biases) > 1:
        raise InvalidArgument(
            f"the checkpoint has several biases of the head ({', '.join(biases)}); store their sum "
            "as one of them"
        )
    found = biases[0] if biases else None
    if config.has_bias is True and found is None:
        raise InvalidArgument(
            f"{CONFIG_FILE} sets lm_head_bias, but the checkpoint has no bias for {weight}"
        )
    return None if config.has_bias is False else found


def stem(weight: str) -> str:
    return weight.removesuffix(".weight")


def _with_first(first: str | None, names: Sequence[str]) -> list[str]:
    return ([first] if first else []) + [name for name in names if name != first]


def _find(names: Sequence[str], wanted: str) -> str | None:
    """Returns the name in the checkpoint that is `wanted` behind any number of wrappers.

    A longer name that is known as it is counts as itself.
    """
    if wanted in names:
        return wanted
    found = [
        name
        for name in names
        if name.endswith("." + wanted)
        and _WRAPPERS.fullmatch(name[: -len(wanted)])
        and name.rpartition(".")[0] not in _KNOWN_STEMS
    ]
    if len(found) > 1:
        raise InvalidArgument(
            f"several tensors may be the head: name one with --head-tensor: {found}"
        )
    return found[0] if found else None


def _first(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((found for each in wanted if (found := _find(names, each)) is not None), None)


def _choose(
    names: Sequence[str],
    config: HeadConfig,
    have_equal_rows: HaveEqualRows,
    heads: Sequence[str],
    embeddings: Sequence[str],
) -> tuple[str, bool]:
    head, embedding = _first(names, heads), _first(names, embeddings)
    if head is not None:
        _check_form(names, head)
        _check_others(names, heads, head, config.rule.get("head"), have_equal_rows)
        if embedding is not None:
            return _choose_of_two(config, have_equal_rows, head, embedding)
        return head, False
    _refuse_quantised(names, heads)
    if embedding is None:
        _refuse_quantised(names, embeddings)
    unknown = _unknown_heads(names, heads, embeddings)
    if unknown:
        raise _not_understood(unknown)
    if embedding is None:
        raise InvalidArgument(
            "the checkpoint has no head under a known name; name it with --head-tensor; "
            f"{_similar(names)}"
        )
    _check_form(names, embedding)
    if _of_embedding_alone(config.tie) is not True:
        raise InvalidArgument(
            f"{_what_the_config_says(config.tie)}, but the checkpoint has no head, only the "
            f"embedding {embedding}; if the files are complete and that is the head, set "
            f"--head-tensor {embedding}"
        )
    _check_others(names, embeddings, embedding, config.rule.get("embedding"), have_equal_rows)
    return embedding, True


def _unknown_heads(
    names: Sequence[str], heads: Sequence[str], embeddings: Sequence[str]
) -> list[str]:
    known = {*heads, *embeddings}
    for name in heads:
        known |= {f"{stem(name)}.{sibling}" for sibling in ("bias", *RULES["head_siblings"])}
    return [name for name in names if may_be_head(name) and _unwrapped(name) not in known]


def _check_others(
    names: Sequence[str],
    known: Sequence[str],
    chosen: str,
    of_type: str | None,
    have_equal_rows: HaveEqualRows,
) -> None:
    """Refuses another head or embedding with other values, unless the type names the chosen one."""
    if chosen == of_type:
        return
    for name in known:
        other = _find(names, name)
        if other not in (None, chosen) and have_equal_rows(chosen, other) is False:
            raise InvalidArgument(
                f"several tensors may be the head ({chosen}, {other}) and have different values; "
                "name one with --head-tensor"
            )


def _unwrapped(name: str) -> str:
    """Returns a name without the words that trainers put before it, if that is a known name."""
    parts = name.split(".")
    for begin in range(len(parts)):
        rest = ".".join(parts[begin:])
        is_known = stem(rest) in _KNOWN_STEMS or rest.rpartition(".")[0] in _KNOWN_STEMS
        if is_known and _WRAPPERS.fullmatch("".join(part + "." for part in parts[:begin])):
            return rest
    return name


def _choose_of_two(
    config: HeadConfig, have_equal_rows: HaveEqualRows, head: str, embedding: str
) -> tuple[str, bool]:
    """Both a head and an embedding are stored: the flag is believed, or what the class assumes."""
    tie = config.tie
    is_tied: bool | None
    if tie.is_contradictory:
        is_tied = None
    elif tie.is_never:
        is_tied = False
    elif tie.stated is not None:
        is_tied = tie.stated
    else:
        is_tied = tie.elsewhere is not False and bool(tie.by_default)
    if is_tied is False:
        return head, False
    are_equal = have_equal_rows(head, embedding)
    if are_equal is None:
        ids = "all ids" if config.vocab_size is None else f"{config.vocab_size} ids"
        raise InvalidArgument(
            f"{_what_the_config_says(tie)}, but {head} and {embedding} cannot be the same tensor "
            f"of {ids} in F32, BF16 or F16; correct vocab_size or the files, or name the head with "
            f"--head-tensor {head} or --head-tensor {embedding}"
        )
    if not are_equal:
        raise InvalidArgument(
            f"{_what_the_config_says(tie)}, but {head} and {embedding} are stored with different "
            f"values: transformers {RULES['transformers']} uses {head}, and vLLM, where it does "
            f"not load lm_head of a tied model, uses {embedding}; say which is right with "
            f"--head-tensor {head} or --head-tensor {embedding}"
        )
    return (embedding, True) if is_tied else (head, False)


def _of_embedding_alone(tie: Tie) -> bool | None:
    if tie.is_contradictory:
        return None
    if tie.is_never or tie.is_always:
        return tie.is_always
    return tie.by_default if tie.stated is None else tie.stated


def _what_the_config_says(tie: Tie) -> str:
    if tie.is_contradictory:
        return f"the levels of {CONFIG_FILE} contradict each other about tie_word_embeddings"
    if tie.is_never:
        return "the model's class never ties its head to the embedding"
    if tie.stated is not None:
        return (
            f"{CONFIG_FILE} says that the head is {'' if tie.stated else 'not '}tied to the "
            f"embedding ({tie.name} is {str(tie.stated).lower()})"
        )
    if tie.by_default is not None:
        return (
            f"{CONFIG_FILE} has no {tie.name}, which then is {str(tie.by_default).lower()} for "
            "this model type"
        )
    return f"{CONFIG_FILE} has no tie_word_embeddings, and the model type is not known"


def _refuse_quantised(names: Sequence[str], weights: Sequence[str]) -> None:
    suspects = [
        stem(weight) + suffix for weight in weights for suffix in RULES["quantized_suffixes"]
    ]
    if (found := _first(names, suspects)) is not None:
        raise InvalidArgument(f"the head is quantised (tensor {found}): use the unquantised model")


def _check_form(names: Sequence[str], weight: str) -> None:
    _refuse_quantised(names, [weight])
    if parts := _unknown_parts(names, weight):
        raise _not_understood(parts)


def _unknown_parts(names: Sequence[str], weight: str) -> list[str]:
    """Returns the tensors that belong to `weight` and are not understood."""
    start = stem(weight) + "."
    understood = {weight, *(start + each for each in RULES["head_siblings"])}
    understood |= {start + "bias"} if weight.endswith(".weight") else set()
    return [
        name
        for name in names
        if name.startswith(start) and name not in understood and stem(name) not in _KNOWN_STEMS
    ]


def _not_understood(names: Sequence[str]) -> InvalidArgument:
    shown = ", ".join(names[:_NAMES_MAX])
    if any(map(is_of_adapter, names)):
        return InvalidArgument(
            f"unsupported: the head has an adapter (tensors {shown}); merge it into the model "
            "first (in PEFT: model.merge_and_unload(), then save_pretrained)"
        )
    return InvalidArgument(
        "the checkpoint stores something that may be a head in a form that is not understood "
        f"(tensors {shown}), so no other tensor is taken for the head; serve the model's "
        "unquantised checkpoint, or name the tensor that is the head with --head-tensor"
    )


def _similar(names: Sequence[str]) -> str:
    words = ("head", "embed", "wte", "output")
    found = [name for name in names if name.endswith("weight") and any(w in name for w in words)]
    shown = [name for name in found if "layers." not in name][:_NAMES_MAX]
    return f"names that look like one: {', '.join(shown) or 'none'}"
