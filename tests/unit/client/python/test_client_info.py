"""Which head a name means, how heads of several servers differ, and which limits hold for all."""

import dataclasses

import pytest
from logprobd import InvalidArgument, NotFound, _wire
from logprobd.info import Limits, Shard, choose_head, heads_differ, heads_from_wire, least_limits

LIMITS = Limits(
    message_bytes_max=6,
    request_rows_max=5,
    top_k_max=4,
    candidates_max=3,
    segments_max=2,
    stream_window=1,
)
HEAD = {
    "name": "a",
    "model_type": "llama",
    "vocab_size": 7,
    "vocab_rows": 8,
    "hidden_size": 4,
    "dtype": _wire.DTYPE_NUMBERS["bf16"],
    "weights_version": 3,
    "ready": True,
    "tied": True,
    "scale": 0.5,
    "softcap": 30.0,
    "has_bias": True,
    "tensor": "wte.weight",
    "engine": "cpu",
    "weight_bytes": 64,
    "limits": _wire.Limits(**vars(LIMITS)),
    "transports": ["tcp", "shm"],
    "layout": [_wire.Shard(vocab_end=3), _wire.Shard(0, 1, "gpu1", 3, 7)],
    "warnings": ["new type"],
}


def info(**fields):
    (head,) = heads_from_wire(_wire.ListHeadsResponse([_wire.Head(**HEAD | fields)], "1.2"))
    return head


def test_an_answer_of_the_server_describes_its_heads():
    head = info()

    assert {name: getattr(head, name) for name in HEAD} == HEAD | {
        "dtype": "bf16",
        "limits": LIMITS,
        "transports": ("tcp", "shm"),
        "layout": (Shard(0, 0, "", 0, 3), Shard(0, 1, "gpu1", 3, 7)),
        "warnings": ("new type",),
    }
    assert head.server_version == "1.2"
    assert info(dtype=9).dtype == "unknown"
    assert heads_from_wire(_wire.ListHeadsResponse()) == []


def test_a_name_means_the_head_of_that_name_and_no_name_the_only_one():
    a, b = info(), info(name="b")

    assert choose_head([a], "") is a
    assert choose_head([a, b], "b") is b
    assert choose_head([a, b], "a") is a
    with pytest.raises(InvalidArgument, match=r'several heads \("a", "b"\): pass head=') as refused:
        choose_head([a, b], "")
    assert refused.value.field == "head"
    with pytest.raises(NotFound, match='no head "c"; the server holds: "a", "b"'):
        choose_head([a, b], "c")
    with pytest.raises(NotFound, match='no head "b"; the server holds: "a"'):
        choose_head([a], "b")
    for name in ("", "c"):
        with pytest.raises(NotFound, match=f'no head "{name}"; the server holds: none'):
            choose_head([], name)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("model_type", "gemma", "llama and gemma"),
        ("vocab_size", 6, "7 and 6"),
        ("hidden_size", 3, "4 and 3"),
        ("dtype", _wire.DTYPE_NUMBERS["fp32"], "bf16 and fp32"),
        ("scale", 1.0, "0.5 and 1.0"),
        ("softcap", 0.0, "30.0 and 0.0"),
        ("has_bias", False, "True and False"),
    ],
)
def test_heads_differ_in_what_scores_depend_on(field, value, shown):
    other = info(**{field: value})

    assert heads_differ([info()], [other]) == f'{field} of "a" is {shown}'
    assert heads_differ([info(name="b"), info()], [other, info(name="b")]) == (
        f'{field} of "a" is {shown}'
    )


def test_heads_do_not_differ_in_what_scores_do_not_depend_on():
    others = {"vocab_rows": 9, "weights_version": 4, "ready": False, "tied": False, "engine": "x"}
    others |= {"tensor": "x", "weight_bytes": 1, "limits": _wire.Limits(), "warnings": []}

    assert heads_differ([info()], [info(**others)]) == ""
    assert heads_differ([info(), info(name="b")], [info(name="b"), info()]) == ""
    assert heads_differ([], []) == ""


def test_heads_of_other_names_differ():
    names = 'their names are "{}" and "{}"'

    assert heads_differ([info()], [info(name="b")]) == names.format("a", "b")
    assert heads_differ([info(name="b"), info()], [info()]) == names.format("a, b", "a")
    assert heads_differ([], [info()]) == names.format("", "a")


def test_the_lowest_limits_hold_and_zero_is_no_limit():
    first = info(limits=_wire.Limits(10, 0, 5, 7, 0, 1))
    second = info(name="b", limits=_wire.Limits(9, 8, 6, 0, 0, 2))

    least = least_limits([first, second])

    assert least.limits == Limits(9, 8, 5, 7, 0, 1)
    assert dataclasses.replace(least, limits=first.limits) == first
