"""Which tensor of a checkpoint is the head, and which its bias, by the rules that the server follows too."""

import json

import pytest
from logprobd.errors import InvalidArgument
from logprobd.head_choice import choose_bias, choose_head
from logprobd.head_config import HeadConfig

HEAD, OTHER, EMBEDDING = "lm_head.weight", "embed_out.weight", "model.embed_tokens.weight"


def choose(tensors, config=None, *, head_tensor="", ignored=()):
    """Returns the chosen name and whether it is an embedding. `tensors` are names, or a value of each:
    tensors of equal values are equal, and one of None cannot be the head."""
    values = tensors if isinstance(tensors, dict) else dict.fromkeys(tensors, 1)

    def have_equal_rows(a, b):
        return None if values[b] is None else values[a] == values[b]

    settings = HeadConfig(json.dumps(config or {"model_type": "llama"}), ignored_keys=ignored)
    return choose_head(list(values), settings, have_equal_rows, head_tensor)


def bias_of(names, weight, config=None, *, is_embedding=False):
    return choose_bias(names, HeadConfig(json.dumps(config or {})), weight, is_embedding)


def refusal(*args, **options):
    with pytest.raises(InvalidArgument) as refused:
        choose(*args, **options)
    return str(refused.value)


def flags(model_type, outer=None, text=None, *, text_type=None, level="text_config"):
    """Returns a config with flags at the top and in its text model; None leaves one out."""
    config = {"model_type": model_type}
    if outer is not None:
        config["tie_word_embeddings"] = outer
    if text is not None or text_type is not None:
        config[level] = {"model_type": text_type}
        if text is not None:
            config[level]["tie_word_embeddings"] = text
    return config


# Ties


@pytest.mark.parametrize(
    ("config", "alone", "both"),
    [
        # What an embedding alone is, and what decides between a head and an embedding that differ:
        # True and "tied", where the config says that they should be one tensor.
        (flags("llama"), False, "head"),
        (flags("llama", True), True, "tied"),
        (flags("llama", False), False, "head"),
        (flags("gemma2"), True, "tied"),
        (flags("gemma2", False), False, "head"),
        # Whatever the flag says.
        (flags("kimi_linear", True), False, "head"),
        (flags("t5"), True, "tied"),
        (flags("t5", False), True, "head"),
        # Under another name, which comes first.
        ({"model_type": "lfm2"}, True, "tied"),
        ({"model_type": "lfm2", "tie_embedding": False}, False, "head"),
        ({"model_type": "lfm2", "tie_word_embeddings": False}, False, "head"),
        (
            {"model_type": "lfm2", "tie_embedding": True, "tie_word_embeddings": False},
            True,
            "tied",
        ),
        (
            {"model_type": "lfm2", "tie_embedding": None, "tie_word_embeddings": False},
            False,
            "head",
        ),
        # Of a type that is not known all levels must agree; then the text model's default counts.
        (flags("new"), False, "head"),
        (flags("new", True), True, "tied"),
        (flags("new", False), False, "head"),
        (flags("new", False, True), False, "tied"),
        (flags("new", None, True), True, "tied"),
        (flags("new", None, False), False, "head"),
        (flags("new", text_type="gemma2"), True, "tied"),
        (flags("new", text_type="llama"), False, "head"),
        (flags("new", True, text_type="llama"), True, "tied"),
        (flags("new", False, text_type="gemma2"), False, "head"),
        (flags("new", False, True, text_type="gemma2"), False, "tied"),
        # At the top.
        (flags("qwen3_vl_moe", False, True, text_type="x"), False, "head"),
        (flags("qwen3_vl_moe", True, False, text_type="x"), True, "tied"),
        (flags("mistral3", True, False, text_type="mistral"), True, "tied"),
        # A stored head is used if the flag or the default of the text model says untied.
        (flags("mistral3", text_type="mistral"), True, "head"),
        (flags("mistral3", text_type="gemma2"), True, "tied"),
        (flags("mistral3", text_type="x"), True, "tied"),
        (flags("mistral3", None, True, text_type="mistral"), True, "tied"),
        (flags("mistral3", None, False, text_type="gemma2"), True, "head"),
        (flags("gemma3", text_type="gemma3"), True, "tied"),
        # At the level of the text model, whose type has the default.
        (flags("blip-2", True, False, text_type="x"), False, "head"),
        (flags("blip-2", False, True, text_type="x"), True, "tied"),
        (flags("blip-2", text_type="x"), True, "tied"),
        (flags("blip-2", text_type="llama"), False, "head"),
        (flags("blip-2", text_type="gemma2"), True, "tied"),
        (flags("blip-2", text_type="t5"), True, "tied"),
        (flags("blip-2", None, False, text_type="t5"), True, "head"),
        (flags("blip-2", False, text_type="x"), True, "head"),
        (flags("blip-2", True, text_type="x"), True, "tied"),
        (flags("llama4", text_type="gemma2"), True, "tied"),
        # A file of the text model alone has no such level.
        (flags("blip-2", False), False, "head"),
        # At a level between top and text model.
        (
            {
                "model_type": "qwen2_5_omni",
                "tie_word_embeddings": False,
                "thinker_config": {
                    "tie_word_embeddings": True,
                    "text_config": {"tie_word_embeddings": False},
                },
            },
            True,
            "tied",
        ),
        (
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {
                    "model_type": "qwen2_5_omni_thinker",
                    "text_config": {"model_type": "gemma2"},
                },
            },
            False,
            "head",
        ),
        # Without that level, at the top, whatever other levels say.
        (flags("blip-2", False, True, level="llm_config"), False, "head"),
        # At any level.
        (flags("llava"), False, "head"),
        (flags("llava", False, True), True, "tied"),
        (flags("llava", None, False), False, "head"),
        (flags("llava", text_type="gemma2"), True, "tied"),
        (flags("llava", text_type="llama"), False, "head"),
        (flags("llava", None, False, text_type="gemma2"), False, "head"),
        (flags("llava", False, text_type="gemma2"), True, "tied"),
        (flags("hunyuan_vl"), True, "tied"),
        (flags("hunyuan_vl", False), False, "head"),
        (flags("hunyuan_vl", False, text_type="hunyuan_vl"), False, "head"),
        (flags("hunyuan_vl", None, False, text_type="x"), True, "tied"),
    ],
    ids=str,
)
def test_the_flag_and_its_default_decide_between_head_and_embedding(config, alone, both):
    if alone:
        assert choose([EMBEDDING], config) == (EMBEDDING, True)
    else:
        assert f"embedding {EMBEDDING}; if the files are complete" in refusal([EMBEDDING], config)
    assert choose([HEAD], config) == (HEAD, False)
    if both == "tied":
        assert "are stored with different values" in refusal({HEAD: 1, EMBEDDING: 2}, config)
    else:
        assert choose({HEAD: 1, EMBEDDING: 2}, config) == (HEAD, False)


def test_equal_tensors_are_one_and_the_embedding_is_read_if_they_are_tied():
    equal = {HEAD: 1, EMBEDDING: 1}

    assert choose(equal, flags("llama", True)) == (EMBEDDING, True)
    assert choose(equal, flags("gemma2")) == (EMBEDDING, True)
    assert choose(equal, flags("llama")) == (HEAD, False)
    assert choose(equal, flags("new", False, True)) == (HEAD, False)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (flags("llama", False), "says that the head is not tied to the embedding (tie_word_embedd"),
        (flags("llama", False), "(tie_word_embeddings is false), but the checkpoint has no head"),
        (flags("llama"), "has no tie_word_embeddings, which then is false for this model type"),
        (flags("kimi_linear", True), "the model's class never ties its head to the embedding"),
        (flags("new"), "no tie_word_embeddings, and the model type is not known"),
        (flags("new", False, True), "the levels of config.json contradict each other about tie_w"),
        (flags("new", text_type="llama"), "which then is false for this model type"),
        (flags("mistral3", False, True), "embedding (tie_word_embeddings is false)"),
        (flags("blip-2", None, False), "(text_config.tie_word_embeddings is false)"),
        (
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {"tie_word_embeddings": False, "text_config": {}},
            },
            "(thinker_config.tie_word_embeddings is false)",
        ),
        (flags("blip-2", text_type="llama"), "no text_config.tie_word_embeddings, which then is f"),
    ],
)
def test_the_refusal_of_an_embedding_says_what_the_config_says(config, says):
    assert says in refusal([EMBEDDING], config)
    assert f"set --head-tensor {EMBEDDING}" in refusal([EMBEDDING], config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (flags("llama", True), "says that the head is tied to the embedding (tie_word_embeddings"),
        (flags("gemma2"), "has no tie_word_embeddings, which then is true for this model type"),
        (
            flags("blip-2", text_type="gemma2"),
            "no text_config.tie_word_embeddings, which then is t",
        ),
    ],
)
def test_the_refusal_of_two_tensors_names_both_and_says_how_to_choose(config, says):
    message = refusal({HEAD: 1, EMBEDDING: 2}, config)

    assert says in message
    assert f"transformers 5.23.0 uses {HEAD}, and vLLM, " in message
    assert f"uses {EMBEDDING}; say which" in message
    assert f"--head-tensor {HEAD} or --head-tensor {EMBEDDING}" in message
    for name, is_embedding in ((HEAD, False), (EMBEDDING, True)):
        assert choose({HEAD: 1, EMBEDDING: 2}, config, head_tensor=name) == (name, is_embedding)


@pytest.mark.parametrize(("sizes", "ids"), [({}, "all ids"), ({"vocab_size": 6}, "6 ids")])
def test_tensors_that_cannot_be_one_are_refused_with_the_number_of_ids(sizes, ids):
    message = refusal({HEAD: 1, EMBEDDING: None}, flags("llama", True) | sizes)

    assert f"{HEAD} and {EMBEDDING} cannot be the same tensor of {ids} in F32" in message


def test_an_ignored_type_has_no_default_of_the_tie():
    options = {"ignored": ("model_type",)}

    assert "model type is not known" in refusal([EMBEDDING], flags("gemma2"), **options)
    assert choose({HEAD: 1, EMBEDDING: 2}, flags("gemma2"), **options) == (HEAD, False)


# Names


@pytest.mark.parametrize(
    ("config", "names", "chosen"),
    [
        ({"model_type": "whisper"}, ["proj_out.weight", "lm_head.weight"], "proj_out.weight"),
        ({"model_type": "whisper"}, ["lm_head.weight"], "lm_head.weight"),
        (
            flags("ctrl", True),
            ["transformer.w.weight", "model.embed_tokens.weight"],
            "transformer.w.weight",
        ),
        # A longer name that is known as it is counts as itself.
        ({}, ["language_model.lm_head.weight"], "language_model.lm_head.weight"),
        ({}, ["model.language_model.lm_head.weight"], "model.language_model.lm_head.weight"),
        ({}, ["actor._fsdp_wrapped_module." + HEAD], "actor._fsdp_wrapped_module." + HEAD),
        ({}, ["model0.module.head.weight"], "model0.module.head.weight"),
        ({}, ["module.output.weight", "optimizer.output.weight"], "module.output.weight"),
        ({}, ["lm_head.weight", "module.lm_head.weight"], "lm_head.weight"),
        (flags("llama", True), ["state.module." + EMBEDDING], "state.module." + EMBEDDING),
    ],
)
def test_known_names_are_found_behind_the_words_of_trainers(config, names, chosen):
    values = {name: number for number, name in enumerate(names)}

    assert choose(values, config)[0] == chosen


def test_a_longer_name_that_is_known_is_another_name():
    names = ["language_model.lm_head.weight", "module.lm_head.weight"]

    assert choose(names) == (names[1], False)
    assert "(module.lm_head.weight, language_model.lm_head.weight) and have different" in refusal(
        {names[0]: 1, names[1]: 2}
    )


def test_the_order_of_known_names_counts_and_not_that_of_the_file():
    assert choose(["output.weight", HEAD]) == (HEAD, False)
    assert choose(["wte.weight", EMBEDDING], flags("llama", True)) == (EMBEDDING, True)


@pytest.mark.parametrize("prefix", ["", "module.", "model.module.", "other."])
def test_what_belongs_to_a_head_behind_the_words_of_a_trainer_is_no_unknown_head(prefix):
    names = ["lm_head._extra_state", "lm_head.bias", "lm_head.W_q"]
    found = [EMBEDDING, *(prefix + name for name in names)]

    if prefix == "other.":
        message = refusal(found[:-1], flags("llama", True))
        assert f"(tensors {found[1]}, {found[2]})" in message
    else:
        assert choose(found[:-1], flags("llama", True)) == (EMBEDDING, True)
        assert f"(tensors {found[3]})" in refusal(found, flags("llama", True))


def test_one_name_behind_several_words_is_ambiguous():
    names = ["actor.lm_head.weight", "model.lm_head.weight"]

    assert "name one with --head-tensor: ['actor.lm_head.weight', 'model.lm" in refusal(names)
    assert choose(names, head_tensor=names[1]) == (names[1], False)


def test_names_that_are_no_heads_do_not_matter():
    names = [
        "mtp.layers.0.shared_head.head.weight",
        "model.layers.61.shared_head.head.weight",
        "v_head.summary.weight",
        "talker.codec_head.weight",
        "vision_tower.vision_model.head.weight",
        "score.weight",
        "model.layers.0.router_logits.weight",
        "audio_tower.proj_out.weight",
        "vision_model.logit_scale",
        "model.layers.0.mlp.down_proj.qweight",
    ]

    assert choose([EMBEDDING, *names], flags("llama", True)) == (EMBEDDING, True)
    assert choose([HEAD, "lm_head.input_scale", "lm_head.bias", *names]) == (HEAD, False)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (
            ["lm_head.trellis", "lm_head.suh"],
            "not understood (tensors lm_head.trellis, lm_head.suh",
        ),
        (["lm_head._weight_qdata"], "not understood"),
        (["lm_head.weight._data", "lm_head.weight._scale"], "not understood"),
        (["lm_head.W_q"], "not understood"),
        (["decoder.text_head.blob"], "not understood"),
        (["unembed.W_U"], "not understood"),
        (["decoder.weight"], "not understood"),
        (["lm_head.layers.0.weight"], "lm_head.layers.0.weight"),
        (["my_lmhead.b", "lm_head.bias"], "(tensors my_lmhead.b)"),
        (["lm_head.base_layer.weight"], "merge_and_unload"),
        (["lm_head.modules_to_save.default.weight"], "merge_and_unload"),
        (["base_model.model.lm_head.base_layer.weight"], "merge_and_unload"),
        (["model.embed_tokens.lora_embedding_A"], "merge_and_unload"),
        (["lm_head.lora_A.weight", "lm_head.weight"], "merge_and_unload"),
        (
            ["lm_head.weight", "lm_head.weight.x", "lm_head.y"],
            "(tensors lm_head.weight.x, lm_head.y",
        ),
        (["lm_head.qweight", "lm_head.scales"], "quantised (tensor lm_head.qweight)"),
        (["module.lm_head.qweight"], "quantised (tensor module.lm_head.qweight)"),
        (["lm_head.weight", "lm_head.weight_scale_inv"], "tensor lm_head.weight_scale_inv"),
        (["lm_head.weight", "lm_head.weight.absmax"], "tensor lm_head.weight.absmax"),
    ],
)
def test_a_head_in_another_form_is_refused_and_not_replaced_by_the_embedding(names, complaint):
    for config in (flags("llama"), flags("llama", True)):
        assert complaint in refusal([EMBEDDING, *names], config)


def test_a_quantised_embedding_is_refused():
    for names in (
        ["model.embed_tokens.qweight"],
        [EMBEDDING, "model.embed_tokens.scales"],
    ):
        assert "head is quantised (tensor model.embed_tokens." in refusal(
            names, flags("llama", True)
        )
    # A head that is stored as it is does not need the embedding.
    assert choose([HEAD, EMBEDDING, "model.embed_tokens.scales"]) == (HEAD, False)


def test_several_heads_or_embeddings_must_be_equal_unless_the_type_names_one():
    output, wte = "output.weight", "transformer.wte.weight"
    tied = flags("llama", True)
    for names, config in (((HEAD, output), None), ((EMBEDDING, wte), tied)):
        first, second = names
        message = refusal({first: 1, second: 2}, config)
        assert f"several tensors may be the head ({first}, {second}) and have different" in message
        assert choose({first: 1, second: 1}, config)[0] == first
        # Of other sizes, the second cannot be the head.
        assert choose({first: 1, second: None}, config)[0] == first
        assert choose({first: 1, second: 2}, config, head_tensor=second)[0] == second
    assert "(module.lm_head.weight, module.output.weight)" in refusal(
        {"module.lm_head.weight": 1, "module.output.weight": 2}
    )
    assert "(module.wte.weight, module.shared.weight)" in refusal(
        {"module.wte.weight": 1, "module.shared.weight": 2}, tied
    )
    assert choose({HEAD: 1, "head.weight": 1, "embed_out.weight": 1})[0] == HEAD
    assert "(lm_head.weight, embed_out.weight)" in refusal(
        {HEAD: 1, "head.weight": 1, "embed_out.weight": 2}
    )
    named = {"model_type": "whisper"}
    assert choose({"proj_out.weight": 1, HEAD: 2}, named)[0] == "proj_out.weight"
    named = flags("ctrl", True)
    assert choose({"transformer.w.weight": 1, wte: 2}, named)[0] == "transformer.w.weight"


# What a user names


def test_a_named_tensor_is_taken_whatever_its_name():
    config = flags("llama", True)
    for name, is_embedding in (
        ("my.proj", False),
        ("model.layers.61.shared_head.head.weight", False),
        (EMBEDDING, True),
        ("module.transformer.wte.weight", True),
    ):
        values = {HEAD: 1, EMBEDDING: 2, name: 3}
        assert choose(values, config, head_tensor=name) == (name, is_embedding)


def test_a_named_tensor_must_exist_and_be_understood():
    assert "has no tensor my.proj; names that look" in refusal([HEAD], head_tensor="my.proj")
    assert "names that look like one: lm_head.weight" in refusal([HEAD], head_tensor="my.proj")
    assert "(tensor my.proj.qweight)" in refusal(["my.proj.qweight"], head_tensor="my.proj")
    names = ["my.proj.weight", "my.proj.lora_A.weight"]
    assert "merge_and_unload" in refusal(names, head_tensor="my.proj.weight")
    assert choose(["my.weight", "my.bias"], head_tensor="my.weight") == ("my.weight", False)


def test_names_that_look_like_a_head_are_listed():
    names = [
        "decoder.my_out.weight",
        "decoder.outputs.weight",
        "mtp.head.weight",
        "model.layers.0.head.weight",
        "my_embed.table",
        "norm.weight",
    ]
    message = refusal(names[2:])
    assert message.endswith(
        "no head under a known name; name it with --head-tensor; names that look "
        "like one: mtp.head.weight"
    )
    assert refusal(["norm.weight"]).endswith("names that look like one: none")
    assert "like one: decoder.outputs.weight, mtp" in refusal(names, head_tensor="x")
    many = [f"mtp.{number}.head.weight" for number in range(9)]
    assert "mtp.7.head.weight" in refusal(many)
    assert "mtp.8.head.weight" not in refusal(many)


@pytest.mark.parametrize(("count", "is_shown"), [(8, True), (9, False)])
def test_a_refusal_shows_at_most_eight_tensors(count, is_shown):
    names = [f"lm_head.part{number}" for number in range(count)]

    assert (names[-1] in refusal([HEAD, *names])) is is_shown


# Tensors that shift the logits


@pytest.mark.parametrize(
    "name", ["lm_head_bias", "logit_scale", "model.logits_bias", "X.Logit_Scale"]
)
def test_a_tensor_that_may_shift_the_logits_is_refused_unless_it_is_ignored(name):
    for head_tensor in ("", HEAD):
        message = refusal([HEAD, name], head_tensor=head_tensor)
        assert f"may scale or shift the logits and are not understood ({name})" in message
        assert f"ignore the key {name}" in message
        options = {"head_tensor": head_tensor, "ignored": [name]}
        assert choose([HEAD, name], **options) == (HEAD, False)


def test_any_number_of_tensors_that_may_shift_the_logits_is_found():
    names = [f"a{number}.logit_scale" for number in range(9)]

    assert f"({', '.join(names[:8])}); if" in refusal([HEAD, *names])
    assert f"ignore the key {':'.join(names[:8])}" in refusal([HEAD, *names])
    assert "(a8.logit_scale); if" in refusal([HEAD, *names], ignored=names[:8])


def test_a_named_embedding_beside_the_bias_of_an_unknown_head_is_refused():
    names = [EMBEDDING, "proj_out.bias", "proj_out.other"]
    options = {"head_tensor": EMBEDDING}

    assert "understood (proj_out.bias); if" in refusal(names, **options)
    assert choose(names, ignored=["proj_out.bias"], **options) == (EMBEDDING, True)
    assert "(logit_scale, proj_out.bias); if" in refusal([*names, "logit_scale"], **options)
    # The bias belongs to another tensor than the one that is named.
    assert choose([HEAD, "proj_out.bias"], head_tensor=HEAD) == (HEAD, False)
    assert choose([EMBEDDING, "lm_head.bias"], **options) == (EMBEDDING, True)


# Biases


@pytest.mark.parametrize(
    ("names", "weight", "is_embedding", "bias"),
    [
        ([HEAD], HEAD, False, None),
        ([HEAD, "lm_head.bias"], HEAD, False, "lm_head.bias"),
        ([OTHER, "lm_head.bias", "embed_out.bias"], OTHER, False, "embed_out.bias"),
        (["my.proj", "my.proj.bias"], "my.proj", False, None),
        ([EMBEDDING, "lm_head.bias"], EMBEDDING, True, "lm_head.bias"),
        ([EMBEDDING, "module.lm_head.bias"], EMBEDDING, True, "module.lm_head.bias"),
        ([EMBEDDING, "model.embed_tokens.bias"], EMBEDDING, True, "model.embed_tokens.bias"),
        (["my.weight", "lm_head.bias"], "my.weight", False, None),
        ([HEAD, "final_logits_bias"], HEAD, False, "final_logits_bias"),
        ([HEAD, "a.final_logits_bias"], HEAD, False, "a.final_logits_bias"),
        ([HEAD, "final_logits_bias.x", "my_final_logits_bias"], HEAD, False, None),
    ],
)
def test_the_bias_of_a_head(names, weight, is_embedding, bias):
    found = bias_of(names, weight, is_embedding=is_embedding)

    assert found == bias
    assert bias_of(names, weight, {"lm_head_bias": False}, is_embedding=is_embedding) is None
    if bias is None:
        with pytest.raises(InvalidArgument, match="the checkpoint has no bias for "):
            bias_of(names, weight, {"lm_head_bias": True}, is_embedding=is_embedding)
    else:
        required = {"lm_head_bias": True}
        assert bias_of(names, weight, required, is_embedding=is_embedding) == found


def test_several_biases_are_refused():
    for names in (
        ["final_logits_bias", "lm_head.bias"],
        ["a.final_logits_bias", "final_logits_bias"],
    ):
        with pytest.raises(InvalidArgument, match=f"several biases .*{names[0]}, {names[1]}"):
            bias_of([HEAD, *names], HEAD)


def test_the_bias_of_an_embedding_may_be_that_of_the_head_that_the_type_names():
    names = [EMBEDDING, "proj_out.bias", "lm_head.bias"]

    assert bias_of(names, EMBEDDING, {"model_type": "whisper"}, is_embedding=True) == names[1]
    assert bias_of(names, EMBEDDING, {"model_type": "llama"}, is_embedding=True) == names[2]
