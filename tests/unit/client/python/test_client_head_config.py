"""What a config.json says about logits, sizes and ids, by the rules that the server follows too."""

import json

import pytest
from logprobd.errors import InvalidArgument
from logprobd.head_config import HeadConfig


def read(config, *ignored):
    return HeadConfig(json.dumps(config), ignored_keys=ignored)


def inside(model_type, text_type, **text):
    """Returns the config of a model with a text model inside."""
    return {"model_type": model_type, "text_config": {"model_type": text_type, **text}}


@pytest.mark.parametrize(
    ("config", "scale", "softcap"),
    [
        ({}, 1, None),
        ({"model_type": "llama"}, 1, None),
        # A key means what it means for its type.
        ({"model_type": "granite", "logits_scaling": 8.0}, 0.125, None),
        ({"model_type": "hyperclovax", "logits_scaling": 8}, 8, None),
        ({"model_type": "inkling_text", "logits_mup_width_multiplier": 2.0}, 0.5, None),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 5.0}, 1, 5),
        ({"model_type": "minicpm", "dim_model_base": 256, "hidden_size": 512}, 0.5, None),
        ({"model_type": "jais", "mup_output_alpha": 2, "mup_width_scale": 0.25}, 0.5, None),
        ({"model_type": "jais", "width_scale": 0.5}, 0.5, None),
        ({"model_type": "mpt", "logit_scale": "inv_sqrt_d_model"}, 1, None),
        ({"model_type": "afmoe", "mup_enabled": True}, 1, None),
        # Flags scale by the width. The first one that is set counts.
        ({"model_type": "t5", "d_model": 16}, 0.25, None),
        ({"model_type": "t5", "d_model": 16, "tie_word_embeddings": False}, 1, None),
        ({"model_type": "t5", "d_model": 16, "scale_decoder_outputs": False}, 1, None),
        (
            {
                "model_type": "t5",
                "d_model": 16,
                "tie_word_embeddings": False,
                "scale_decoder_outputs": True,
            },
            0.25,
            None,
        ),
        ({"model_type": "switch_transformers", "d_model": 16}, 0.25, None),
        (
            {"model_type": "switch_transformers", "d_model": 16, "tie_word_embeddings": False},
            1,
            None,
        ),
        (
            {"model_type": "umt5", "d_model": 16, "tie_word_embeddings": False, "": False},
            0.25,
            None,
        ),
        # Defaults of classes.
        ({"model_type": "cohere"}, 0.0625, None),
        ({"model_type": "gemma2"}, 1, 30),
        ({"model_type": "gemma4"}, 1, None),
        ({"model_type": "minicpm3", "hidden_size": 1024}, 0.25, None),
        ({"model_type": "muse_glimmer"}, 0.19611613513818404, 20),
        # Null, false and a cap of zero are off; the innermost level that has a key counts.
        ({"model_type": "cohere", "logit_scale": None}, 1, None),
        ({"model_type": "cohere", "logit_scale": False}, 1, None),
        ({"model_type": "granite", "logits_scaling": None}, 1, None),
        ({"model_type": "minicpm3", "dim_model_base": None, "hidden_size": 4}, 1, None),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, 1, None),
        ({"model_type": "gemma2", "final_logit_softcapping": False}, 1, None),
        ({"model_type": "gemma2", "final_logit_softcapping": 0}, 1, None),
        ({"model_type": "gemma2", "final_logit_softcapping": 0.0}, 1, None),
        (
            {
                "model_type": "paligemma",
                "text_config": {"final_logit_softcapping": None},
                "final_logit_softcapping": 30.0,
            },
            1,
            None,
        ),
        ({"model_type": "paligemma", "final_logit_softcapping": 7, "text_config": {}}, 1, 7),
        # A key of the text model has the default of its type, unless its class has none.
        (inside("paligemma", "gemma2"), 1, 30),
        (inside("paligemma", "gemma"), 1, None),
        (inside("granite_docling", "granite"), 1, None),
        (inside("granite_docling", "llama"), 0.25, None),
        (inside("muse_glimmer", "muse_spark_text"), 0.1767766952966369, 20),
        # The text model makes the logits of a class that says so, and of one that is not known.
        (inside("llama4", "cohere2"), 0.0625, None),
        (inside("a_new_type", "gemma3n_text"), 1, 30),
        ({"thinker_config": {"model_type": "cohere", "text_config": {}}}, 0.0625, None),
        # The class of the whole model does, if neither it nor the text model disagrees.
        (inside("aya_vision", "cohere2", logit_scale=1.0), 1, None),
        (inside("aya_vision", "cohere2", logit_scale=None), 1, None),
        (inside("aya_vision", "cohere2", logit_scale=False), 1, None),
        (inside("aya_vision", "udop"), 1, None),
        (inside("gemma3", "gemma3_text"), 1, None),
        (inside("gemma3", "gemma2", final_logit_softcapping=0), 1, None),
        (inside("gemma2", "gemma2", final_logit_softcapping=4), 1, 4),
    ],
)
def test_scale_and_cap_are_those_of_the_models_class(config, scale, softcap):
    assert read(config).logit_shape() == (scale, softcap)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "cohere", "logit_scale": 0}, "logit_scale .* is 0, expected a positive"),
        (
            {"model_type": "cohere", "logit_scale": True},
            "logit_scale .* is True, expected a number",
        ),
        ({"model_type": "cohere", "logit_scale": 1e200}, "fits fp32"),
        ({"model_type": "cohere", "logit_scale": 1e-200}, "fits fp32"),
        ({"model_type": "cohere", "logit_scale": 10**400}, "fits fp32"),
        ({"model_type": "granite", "logits_scaling": -2.0}, "-2.0, expected a positive number"),
        ({"model_type": "falcon_h1", "lm_head_multiplier": "2"}, "'2', expected a number"),
        ({"model_type": "gemma2", "final_logit_softcapping": -30}, "positive"),
        ({"model_type": "gemma2", "final_logit_softcapping": [30]}, "a number"),
        (
            {"model_type": "jais", "mup_output_alpha": 1e30, "mup_width_scale": 1e30},
            "the scale of the logits is 1.*e.60, which does not fit fp32",
        ),
        (
            {"model_type": "minicpm", "dim_model_base": 256},
            "dim_model_base .* needs hidden_size, which is missing",
        ),
        ({"model_type": "t5", "scale_decoder_outputs": 1, "d_model": 4}, "expected true or false"),
        ({"model_type": "jais"}, "by width_scale or mup_output_alpha or mup_width_scale, .* lacks"),
        ({"model_type": "minicpm", "hidden_size": 8}, "models of type minicpm .* set scale"),
        # The class of the whole model does not scale, and that of its text model does.
        (
            inside("aya_vision", "cohere2"),
            r"cohere2, .* logit_scale \(0.0625\).* inside aya_vision",
        ),
        (inside("aya_vision", "cohere2", logit_scale=2), r"logit_scale \(2\)"),
        (inside("gemma3", "gemma2"), r"final_logit_softcapping \(30\)"),
        (inside("gemma3", "gemma2", final_logit_softcapping=1), r"final_logit_softcapping \(1\)"),
        # Of a type whose logits are no plain product, at whatever level it stands.
        ({"model_type": "bert"}, "models of type bert are not served: .* a dense layer"),
        (inside("a_new_type", "bert"), "models of type bert"),
        (inside("llama", "bert"), "models of type bert"),
        (inside("bert", "llama"), "models of type bert"),
        ({"model_type": "baichuan", "vocab_size": 125696}, "divided by its norm"),
        ({"model_type": "baichuan"}, "divided by its norm"),
    ],
)
def test_logits_that_cannot_be_made_as_the_model_does_are_refused(config, message):
    with pytest.raises(InvalidArgument, match=message):
        read(config).logit_shape()


def test_a_refused_type_may_have_sizes_with_which_it_is_plain():
    assert read({"model_type": "baichuan", "vocab_size": 64000}).logit_shape() == (1, None)


def test_the_caller_has_the_last_word_about_scale_and_cap():
    config = {"model_type": "muse_glimmer"}

    assert read(config).logit_shape(scale=2.0) == (2, 20)
    assert read(config).logit_shape(softcap=3.0) == (0.19611613513818404, 3)
    assert read(config).logit_shape(softcap=0) == (0.19611613513818404, None)
    for scale in (0.0, -1.0, 1e39, float("nan")):
        with pytest.raises(InvalidArgument, match="does not fit fp32"):
            read(config).logit_shape(scale=scale)
    # The scale of the config is not needed then, but the logits must still be understood.
    assert read({"model_type": "jais"}).logit_shape(scale=2.0) == (2, None)
    with pytest.raises(InvalidArgument, match="models of type bert"):
        read({"model_type": "bert"}).logit_shape(scale=1.0, softcap=0)


def test_keys_that_are_ignored_are_off():
    jais = {"model_type": "jais", "mup_output_alpha": 2.0, "mup_width_scale": 0.25}
    assert read(jais, "mup_output_alpha").logit_shape() == (0.25, None)
    assert read({"model_type": "jais"}, "width_scale").logit_shape() == (1, None)
    assert read({"model_type": "gemma2"}, "final_logit_softcapping").logit_shape() == (1, None)
    assert read({"model_type": "bert"}, "model_type").logit_shape() == (1, None)
    assert read({"model_type": "gemma2"}, "model_type").logit_shape() == (1, None)
    several = {"model_type": "llama", "my_logit_cap": 20.0, "my_logit_factor": 0.5}
    assert read(several, "my_logit_cap:my_logit_factor").logit_shape() == (1, None)
    assert read(several, "my_logit_cap", "my_logit_factor").ignored == {
        "my_logit_cap",
        "my_logit_factor",
    }


def test_each_key_in_which_a_text_model_differs_has_to_be_decided():
    config = inside("qwen3_vl", "muse_spark_text")
    keys = ("output_multiplier", "final_logit_softcapping")

    for ignored, left in (keys, keys[::-1]):
        with pytest.raises(InvalidArgument, match=left):
            read(config, ignored).logit_shape()
    assert read(config, *keys).logit_shape(scale=0.5, softcap=20) == (0.5, 20)


# Keys that may change the logits and that the type does not list


@pytest.mark.parametrize(
    "config",
    [
        {"Logit_Bonus": 2.0},
        {"mup_width_scale": 0.5},
        {"text_config": {"output_logits_scaling": 2}},
        {"a": {"b": {"final_softcap": 2}}},
        {"logits_scaling": 8.0},
        {"norm_head": True},
        {"aggregate_logit_scale": 2.0},
        {"additional_config": {"logit_scale": 2.0}},
        {"text_encoder_config": {"logit_scale": 2.0}},
        {"logit_transform": {"scale": 2.0}},
        {"heads": [{"logit_scale": 2.0}]},
        {"logit_caps": [30.0]},
        # behind a key that is off, harmless or of another modality
        {"a": None, "logit_no": False, "my_logit_cap": 2.0},
        {"vision_config": {"logit_scale": 2.0}, "my_logit_cap": 2.0},
        {"lists": [None, {"my_logit_cap": 2.0}]},
    ],
)
def test_keys_that_may_change_the_logits_are_refused(config):
    with pytest.raises(InvalidArgument, match="not understood for model type llama"):
        read({"model_type": "llama", **config}).check()


@pytest.mark.parametrize(
    "config",
    [
        {"logit_off": None, "logit_no": False, "logit_zero": 0, "logit_list": [], "logit_text": ""},
        {"attn_logit_softcapping": 50.0, "router_logit_softcapping": 30.0, "warmup_logits": 1},
        {"output_router_logits": True, "num_logits_to_keep": 1, "Num_Logits_To_Keep": 1},
        {"vision_config": {"logit_scale": 2.0}, "speculative_config": {"logit_scale": 2.0}},
        {"lists": [1, "my_logit_cap", [0.5]], "rope_scaling": {"logit_scale": 2.0}},
    ],
)
def test_keys_that_do_not_change_the_logits_do_not_matter(config):
    assert read({"model_type": "gemma3_text", **config}).logit_shape() == (1, None)


def test_a_key_of_another_type_is_refused_unless_a_class_of_the_model_reads_it():
    with pytest.raises(InvalidArgument, match="logit_scale .* model type gemma2"):
        read({"model_type": "gemma2", "logit_scale": 1.0}).check()

    read({"model_type": "t5", "scale_decoder_outputs": True, "d_model": 4}).check()
    read(inside("a_new_type", "cohere", logit_scale=1.0)).check()
    read(inside("blip-2", "cohere", logit_scale=1.0)).check()
    read(inside("aya_vision", "cohere2", logit_scale=1.0)).check()


def test_the_refusal_of_a_key_has_its_value_and_the_advice():
    with pytest.raises(InvalidArgument) as one:
        read({"model_type": "llama", "my_logit_cap": 2.5}).check()
    with pytest.raises(InvalidArgument) as two:
        read({"model_type": "llama", "my_logit_cap": 2.5, "a_logit_factor": [1]}).check()

    assert "the key my_logit_cap (2.5), which" in str(one.value)
    assert "logits and is not understood" in str(one.value)
    assert "ignore the key my_logit_cap, together" in str(one.value)
    assert "the keys a_logit_factor ([1]), my_logit_cap (2.5), which" in str(two.value)
    assert "logits and are not understood" in str(two.value)
    assert "ignore the key a_logit_factor:my_logit_cap, together" in str(two.value)


@pytest.mark.parametrize(("count", "more"), [(32, ", which"), (33, " and 1 more, which")])
def test_a_refusal_shows_at_most_32_keys(count, more):
    keys = {f"my_logit_{number:02d}": 1 for number in range(count)}

    with pytest.raises(InvalidArgument) as refused:
        read({"model_type": "llama", **keys}).check()

    assert f"my_logit_31 (1){more}" in str(refused.value)
    assert ("my_logit_32" in str(refused.value)) is False


def test_a_text_model_that_transforms_logits_must_be_at_a_level_that_is_searched():
    for level in (
        {"decoder_config": {"model_type": "gemma2"}},
        {"a": 1, "llm_cfg": {"model_type": "gemma2"}},
        {"a_vision_config": {"model_type": "gemma2"}, "z_config": {"model_type": "cohere"}},
        {"a": {"b": {"model_type": "bert"}}},
        {"text_config": {"model_type": "llama", "inner": {"model_type": "t5"}}},
    ):
        with pytest.raises(InvalidArgument, match="describes a model of type .*move it to text_co"):
            read({"model_type": "a_new_type", **level}).check()
        read({"model_type": "a_new_type", **level}, "model_type").check()

    read(inside("a_new_type", "gemma2")).check()
    read({"model_type": "a_new_type", "vision_config": {"model_type": "gemma2"}}).check()
    read({"model_type": "a_new_type", "decoder_config": {"model_type": "llama"}}).check()
    # The class of a known type is known to ignore it.
    read({"model_type": "llama", "decoder_config": {"model_type": "gemma2"}}).check()


# Sizes


@pytest.mark.parametrize(
    ("config", "hidden_size"),
    [
        ({}, None),
        ({"hidden_size": 4, "text_config": {"d_model": 8}}, 8),
        ({"hidden_size": 4, "text_config": {"n_layers": 8}}, 4),
        ({"word_embed_proj_dim": 2, "hidden_size": 4}, 2),
        ({"hidden_size": 4, "n_embd": 5, "d_model": 6}, 4),
        ({"hidden_size": None, "n_embd": 1}, 1),
        ({"thinker_config": {"text_config": {}, "d_model": 6}, "d_model": 7}, 6),
        ({"llm_config": {"d_model": 5}, "language_config": {"d_model": 6}, "d_model": 7}, 5),
        ({"thinker_config": {"d_model": 5}, "language_config": {"d_model": 6}}, 5),
        ({"text_config": None, "language_config": {"d_model": 6}, "d_model": 7}, 6),
        ({"model_type": "t5gemma", "decoder": {"d_model": 3}, "text_config": {"d_model": 4}}, 3),
        ({"model_type": "t5gemma", "d_model": 5, "text_config": {"d_model": 4}}, 5),
    ],
)
def test_the_hidden_size_is_that_of_the_innermost_level_that_has_one(config, hidden_size):
    assert read(config).hidden_size == hidden_size


@pytest.mark.parametrize(
    ("config", "vocab_size"),
    [
        ({}, None),
        ({"model_type": "inkling2_text", "vocab_size": 9, "unpadded_vocab_size": 7}, 7),
        ({"model_type": "inkling2_text", "vocab_size": 9, "unpadded_vocab_size": None}, 9),
        ({"model_type": "inkling2_text", "vocab_size": 9}, 9),
        ({"model_type": "inkling2_text", "vocab_size": 300_000}, 200_058),
        ({"model_type": "inkling2_text"}, 200_058),
        ({"model_type": "inkling_text", "vocab_size": 9}, 9),
        ({"model_type": "llama", "vocab_size": 9, "unpadded_vocab_size": 7}, 9),
        # A flag, true by default, may decide that vocab_size counts.
        ({"model_type": "marian", "vocab_size": 16, "decoder_vocab_size": 20}, 16),
        (
            {
                "model_type": "marian",
                "vocab_size": 16,
                "decoder_vocab_size": 20,
                "share_encoder_decoder_embeddings": True,
            },
            16,
        ),
        (
            {
                "model_type": "marian",
                "vocab_size": 16,
                "decoder_vocab_size": 20,
                "share_encoder_decoder_embeddings": False,
            },
            20,
        ),
    ],
)
def test_the_number_of_valid_ids(config, vocab_size):
    assert read(config).vocab_size == vocab_size


@pytest.mark.parametrize("value", ["64", 0, -1, 64.0, True])
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_sizes_must_be_positive_integers(key, value):
    assert getattr(read({key: 1}), key) == 1
    with pytest.raises(InvalidArgument, match=f"{key} of config.json is {value!r}, expected a pos"):
        getattr(read({key: value}), key)


def test_flags_must_be_booleans():
    assert [read({"lm_head_bias": each}).has_bias for each in (True, False, None)] == [
        True,
        False,
        None,
    ]
    with pytest.raises(
        InvalidArgument, match="lm_head_bias of config.json is 'yes', expected true"
    ):
        _ = read({"lm_head_bias": "yes"}).has_bias
    with pytest.raises(InvalidArgument, match="tie_word_embeddings of config.json is 1, expected"):
        _ = read({"tie_word_embeddings": 1}).tie


# Files


@pytest.mark.parametrize("nest", ["[]", "{}"])
def test_a_config_is_nested_at_most_64_levels_deep(nest):
    def nested(depth):
        inner = depth - 1
        if nest == "[]":
            return '{"b":1,"a":' + "[" * inner + "]" * inner + "}"
        return '{"b":1,"a":' * inner + "{}" + "}" * inner

    HeadConfig(nested(64))
    with pytest.raises(InvalidArgument, match="nested deeper than 64 levels"):
        HeadConfig(nested(65))


def test_messages_name_the_file():
    with pytest.raises(InvalidArgument, match="^my.json is not valid JSON"):
        HeadConfig("{", "my.json")
    with pytest.raises(InvalidArgument, match="^my.json is not a JSON object"):
        HeadConfig("[]", "my.json")
    for level in ("text_config", "thinker_config"):
        with pytest.raises(InvalidArgument, match=f"^{level} of config.json is not an object"):
            read({level: []})
    with pytest.raises(InvalidArgument, match="^text_config of config.json is not an object"):
        read({"thinker_config": {"text_config": 3}})


def test_numbers_that_json_does_not_have_may_stand_where_they_do_not_matter():
    config = HeadConfig('{"a":[Infinity,-Infinity],"b":NaN,"model_type":"cohere","logit_scale":2}')

    assert config.logit_shape() == (2, None)


# What is surprising


UNKNOWN_PLAIN = "its head is taken for a plain one, without scale and cap"
UNKNOWN_TEXT = "its text model decides about the logits"
CAP_30 = "config.json has no final_logit_softcapping; the default of the model's class is used: 30"


@pytest.mark.parametrize(
    ("config", "warnings"),
    [
        ({}, [f"config.json has no model_type: {UNKNOWN_PLAIN}"]),
        ({"model_type": ""}, [f"config.json has no model_type: {UNKNOWN_PLAIN}"]),
        ({"model_type": "new"}, [f"model type new is not known: {UNKNOWN_PLAIN}"]),
        (inside("new", "newer"), [f"model type new is not known: {UNKNOWN_PLAIN}"]),
        (inside("new", "llama"), [f"model type new is not known: {UNKNOWN_TEXT}"]),
        (inside("new", "gemma2"), [f"model type new is not known: {UNKNOWN_TEXT}", CAP_30]),
        (
            {"text_config": {"model_type": "gemma2"}},
            [f"config.json has no model_type: {UNKNOWN_TEXT}", CAP_30],
        ),
        # Of a class whose text model makes the logits, that must be known too.
        (inside("blip-2", "newer"), [f"model type blip-2 is not known: {UNKNOWN_PLAIN}"]),
        (inside("blip-2", "llama"), []),
        ({"model_type": "llama"}, []),
        # A default counts unless it leaves the logits as they are.
        ({"model_type": "gemma2"}, [CAP_30]),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, []),
        ({"model_type": "gemma4"}, []),
        ({"model_type": "granite"}, []),
        ({"model_type": "t5"}, []),
        ({"model_type": "umt5"}, []),
        (
            {"model_type": "muse_spark"},
            [
                "config.json has no output_multiplier; the default of the model's class is used: "
                "0.176777",
                CAP_30.replace("30", "20"),
            ],
        ),
        (inside("granite_docling", "granite"), []),
    ],
)
def test_warnings_say_what_is_assumed(config, warnings):
    assert read(config).warnings == warnings


def test_what_is_ignored_is_no_surprise():
    assert read({"model_type": "gemma2"}, "final_logit_softcapping").warnings == []
    assert read({"model_type": "new"}, "model_type").warnings == []


@pytest.mark.parametrize(
    ("config", "model_type", "is_known"),
    [
        ({}, "unknown", False),
        ({"model_type": 5}, "unknown", False),
        ({"model_type": "", "text_config": {"model_type": "llama"}}, "llama", False),
        (inside("outer", "llama"), "outer", False),
        (inside("blip-2", "newer"), "blip-2", False),
        (inside("blip-2", "llama"), "blip-2", True),
        ({"model_type": "llama"}, "llama", True),
        (inside("llama", "newer"), "llama", True),
    ],
)
def test_the_type_of_a_model_is_that_of_its_outermost_level(config, model_type, is_known):
    assert (read(config).model_type, read(config).is_known) == (model_type, is_known)


def test_an_ignored_type_is_unknown():
    assert read({"model_type": "gemma2"}, "model_type").model_type == "unknown"
    assert read({"model_type": "whisper"}, "model_type").rule == {}
    assert read({"model_type": "whisper"}).rule["head"] == "proj_out.weight"


# The config of the head alone


def test_the_config_of_a_head_has_the_keys_that_describe_it():
    config = {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM", "Ä"],
        "torch_dtype": "bfloat16",
        "hidden_size": 8,
        "vocab_size": 9,
        "num_hidden_layers": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "logit_scale": 0.0625,
        "lm_head_bias": True,
        "tie_word_embeddings": True,
        "quantization_config": {"model_type": "fp8"},
        "text": {"num_layers": 2},
    }

    text = read(config).text_for_head(7, 5)

    assert json.loads(text) == {
        "architectures": ["Gemma2ForCausalLM", "Ä"],
        "final_logit_softcapping": 30.0,
        "hidden_size": 7,
        "lm_head_bias": True,
        "logit_scale": 0.0625,
        "model_type": "gemma2",
        "tie_word_embeddings": False,
        "vocab_size": 5,
    }
    # The bytes are those that logprobctl writes.
    assert text.startswith('{\n  "architectures": [\n    "Gemma2ForCausalLM",\n    "Ä"\n  ],\n')
    assert text.endswith('  "vocab_size": 5\n}\n')
    assert list(json.loads(text)) == sorted(json.loads(text))


@pytest.mark.parametrize(
    "config",
    [
        {
            "model_type": "paligemma",
            "final_logit_softcapping": 30.0,
            "text_config": {"final_logit_softcapping": None, "hidden_size": 5, "vocab_size": 7},
        },
        inside("gemma3n", "gemma3n_text", hidden_size=5),
        {
            "model_type": "x",
            "thinker_config": {"text_config": {"logits_scaling": 8.0, "model_type": "granite"}},
        },
        {"model_type": "gemma2", "text_config": None, "final_logit_softcapping": None},
        {"model_type": "t5", "tie_word_embeddings": False, "d_model": 5},
        {
            "model_type": "t5",
            "tie_word_embeddings": True,
            "scale_decoder_outputs": False,
            "d_model": 5,
        },
        {"model_type": "switch_transformers", "d_model": 5},
        {"model_type": "switch_transformers", "tie_word_embeddings": False, "d_model": 5},
        {"model_type": "umt5", "tie_word_embeddings": False, "d_model": 5},
        {"model_type": "t5gemma", "decoder": {"final_logit_softcapping": 3}},
        {"model_type": "minicpm", "dim_model_base": 256, "n_embd": 5},
        # An empty level hides others in which keys would be searched instead.
        {
            "model_type": "paligemma",
            "text_config": {"num_layers": 2},
            "llm_config": {"final_logit_softcapping": 30.0},
        },
        {"model_type": "paligemma", "vision_text_config": {"final_logit_softcapping": 30.0}},
    ],
    ids=str,
)
def test_the_config_of_a_head_describes_the_same_logits(config):
    before = read(config)

    after = HeadConfig(before.text_for_head(5, 7))

    assert after.model_type == before.model_type
    assert after.logit_shape() == before.logit_shape()
    assert (after.hidden_size, after.vocab_size) == (5, 7)


def test_the_number_of_valid_ids_of_a_head_is_kept():
    config = {"model_type": "inkling_text", "unpadded_vocab_size": 6, "vocab_size": 7}

    assert HeadConfig(read(config).text_for_head(4, 7)).vocab_size == 6


def test_a_key_that_is_not_understood_is_kept_so_that_the_server_refuses_it_again():
    config = {"my_logit_shift": 2.0, "router_logit_scale": 3.0, "a": {"b": {"logit_c": 1}}}

    kept = json.loads(read(config).text_for_head(4, 5))

    assert (kept["my_logit_shift"], kept["a"]) == (2.0, {"b": {"logit_c": 1}})
    assert "router_logit_scale" not in kept
    assert "my_logit_shift" not in read(config, "my_logit_shift").text_for_head(4, 5)


@pytest.mark.parametrize(
    ("config", "key", "off"),
    [
        ({"model_type": "gemma2"}, "final_logit_softcapping", None),
        ({"model_type": "cohere", "logit_scale": 2.0}, "logit_scale", None),
        # Null is the default of a flag, which is true.
        ({"model_type": "t5", "d_model": 4}, "scale_decoder_outputs", False),
        ({"model_type": "switch_transformers", "d_model": 4}, "tie_word_embeddings", False),
    ],
)
def test_what_is_ignored_is_off_in_the_config_of_the_head(config, key, off):
    text = read(config, key).text_for_head(4, 5)

    assert json.loads(text)[key] is off
    assert HeadConfig(text).logit_shape() == (1, None)


def test_ignored_keys_that_transform_nothing_are_left_out():
    kept = json.loads(read({"model_type": "llama"}, "my_logit_shift").text_for_head(4, 5))

    assert set(kept) == {"model_type", "hidden_size", "vocab_size", "tie_word_embeddings"}
