"""The options of torch.ops.logprobd.linear_logprob as the flat arguments of its schema."""

from typing import Any

DEFAULTS = {
    "temperature": 1.0,
    "scale": 1.0,
    "softcap": 0.0,
    "ignore_index": -100,
    "vocab_start": 0,
    "vocab_valid": -1,
    "group": "",
    "sequence_parallel": False,
    "out_of_vocab_is_zero": False,
    "need_entropy": True,
    "need_argmax": False,
    "need_mean_logit": False,
    "keep_logits": 0,
    "cached_rows": -1,
    "autocast": True,
    "hidden_splits": 2,
}


def operator_options(**given: Any) -> tuple[Any, ...]:
    """Returns the options in the order of LinearLogprobOptions, with defaults for those not given."""
    unknown = given.keys() - DEFAULTS.keys()
    assert not unknown, unknown
    return tuple((DEFAULTS | given).values())
