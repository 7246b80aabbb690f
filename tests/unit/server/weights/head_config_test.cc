#include "server/weights/head_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

HeadConfig Parse(const std::string& json) {
  auto config = ParseHeadConfig(json);
  EXPECT_THAT(config, Succeeds());
  return config.ok() ? *config : HeadConfig{};
}

TEST(HeadConfigTest, PrefersTheNestedValueForEachKey) {
  const HeadConfig config = Parse(R"({"model_type":"outer","vocab_size":7,"hidden_size":1,
      "tie_word_embeddings":false,"text_config":{"model_type":"inner","hidden_size":2}})");

  EXPECT_EQ(config.model_type, "outer");
  EXPECT_EQ(config.hidden_size, 2);
  EXPECT_EQ(config.vocab_size, 7);
  EXPECT_EQ(config.tied.stated, false);
}

TEST(HeadConfigTest, FindsEveryNestedConfiguration) {
  for (const std::string nest : {"text_config", "llm_config", "language_config"}) {
    SCOPED_TRACE(nest);
    EXPECT_EQ(
        Parse(absl::StrCat("{\"", nest, R"(":{"hidden_size":5},"hidden_size":1})")).hidden_size, 5);
  }
  const HeadConfig thinker = Parse(
      R"({"thinker_config":{"text_config":{"hidden_size":5},"vocab_size":6},"hidden_size":1})");
  EXPECT_EQ(thinker.hidden_size, 5);
  EXPECT_EQ(thinker.vocab_size, 6);
}

TEST(HeadConfigTest, TreatsANestedNullAsOffAndStopsThere) {
  EXPECT_EQ(Parse(R"({"model_type":"paligemma","text_config":{"final_logit_softcapping":null},
      "final_logit_softcapping":30.0})")
                .softcap,
            0.0);
}

TEST(HeadConfigTest, SearchesTheFirstLevelThatIsThereAndWhatEnclosesIt) {
  const HeadConfig text =
      Parse(R"({"text_config":{"hidden_size":5},"llm_config":{"hidden_size":6,"vocab_size":7}})");
  EXPECT_EQ(text.hidden_size, 5);
  EXPECT_EQ(text.vocab_size, std::nullopt);

  const HeadConfig enclosing = Parse(
      R"({"thinker_config":{"hidden_size":5},"language_config":{"hidden_size":6,"vocab_size":7}})");
  EXPECT_EQ(enclosing.hidden_size, 5);
  EXPECT_EQ(enclosing.vocab_size, std::nullopt);
}

TEST(HeadConfigTest, AModelTypeMayHaveALevelOfItsOwnForTheText) {
  EXPECT_EQ(Parse(R"({"model_type":"t5gemma","decoder":{"hidden_size":5},
                      "text_config":{"hidden_size":6}})")
                .hidden_size,
            5);
}

TEST(HeadConfigTest, TheHiddenSizeIsThatOfTheFirstKeyThatIsNotNull) {
  EXPECT_EQ(Parse(R"({"word_embed_proj_dim":5,"hidden_size":6})").hidden_size, 5);
  EXPECT_EQ(Parse(R"({"word_embed_proj_dim":null,"hidden_size":6})").hidden_size, 6);
  EXPECT_EQ(Parse(R"({"text_config":{"hidden_size":null},"n_embd":7})").hidden_size, 7);
}

TEST(HeadConfigTest, ADimensionIsFromOneTo2To31) {
  EXPECT_EQ(Parse(R"({"vocab_size":1,"hidden_size":1})").vocab_size, 1);
  EXPECT_EQ(Parse(R"({"vocab_size":2147483648,"hidden_size":1})").vocab_size, int64_t{1} << 31);
  EXPECT_THAT(ParseHeadConfig(R"({"vocab_size":2147483649})"),
              Fails(kInvalid, "an integer from 1 to 2^31"));
}

TEST(HeadConfigTest, ReadsTheFlagOfTheBias) {
  EXPECT_EQ(Parse(R"({"lm_head_bias":true})").has_bias, true);
  EXPECT_EQ(Parse(R"({"lm_head_bias":false})").has_bias, false);
  EXPECT_EQ(Parse(R"({"lm_head_bias":null})").has_bias, std::nullopt);
}

TEST(HeadConfigTest, ReadsTheMethodOfQuantisation) {
  const auto method = [](const std::string& value) {
    return Parse(R"({"quantization_config":)" + value + "}").quantization_method;
  };
  EXPECT_EQ(method(R"({"quant_method":"gptq"})"), "gptq");
  for (const std::string value : {"{}", "null", "[]", R"("gptq")", R"({"quant_method":4})"}) {
    EXPECT_EQ(method(value), "") << value;
  }
}

TEST(HeadConfigTest, KeepsTheNamesThatAreIgnored) {
  const auto config = ParseHeadConfig(R"({"model_type":"gemma"})",
                                      {.ignored_keys = {"model_type", "a.logit_scale"}});

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(config->model_type, "unknown");
  EXPECT_EQ(config->rule, nullptr);
  EXPECT_THAT(config->ignored_names, ElementsAre("model_type", "a.logit_scale"));
}

TEST(HeadConfigTest, AKeyWithoutANameMeansNothing) {
  EXPECT_EQ(Parse(R"({"model_type":"umt5","d_model":16,"":false})").scale, 0.25);
}

TEST(HeadConfigTest, LeavesMissingValuesEmpty) {
  const HeadConfig config = Parse("{}");

  EXPECT_EQ(config.model_type, "unknown");
  EXPECT_FALSE(config.hidden_size.has_value());
  EXPECT_FALSE(config.vocab_size.has_value());
  EXPECT_FALSE(config.tied.stated.has_value());
  EXPECT_FALSE(config.has_bias.has_value());
  EXPECT_EQ(config.scale, 1.0);
  EXPECT_EQ(config.softcap, 0.0);
  EXPECT_THAT(config.warnings, ElementsAre(HasSubstr("config.json has no model_type: ")));
}

TEST(HeadConfigTest, AcceptsTheNumbersThatPythonWritesWhereTheyDoNotMatter) {
  const HeadConfig config = Parse(
      R"({"time_step_limit":[0.0,Infinity],"a":-Infinity,"b":NaN,"s":"NaN \" Infinity",
          "model_type":"cohere","hidden_size":3,"logit_scale":2.0})");

  EXPECT_EQ(config.hidden_size, 3);
  EXPECT_EQ(config.scale, 2.0);
  EXPECT_EQ(Parse(R"({"empty":"","n":NaN,"hidden_size":3})").hidden_size, 3);
}

TEST(HeadConfigTest, AcceptsUpTo64LevelsAndAnyNumberOfSiblings) {
  const auto nested = [](size_t levels) {
    return R"({"a":)" + std::string(levels - 1, '[') + std::string(levels - 1, ']') + "}";
  };
  EXPECT_THAT(ParseHeadConfig(nested(64)), Succeeds());
  EXPECT_THAT(ParseHeadConfig(nested(65)), Fails(kInvalid, "nested deeper than 64"));
  std::string siblings = R"({"z":0)";
  for (int i = 0; i < 100; ++i) {
    absl::StrAppend(&siblings, ",\"a", i, "\":[{}]");
  }
  EXPECT_THAT(ParseHeadConfig(siblings + "}"), Succeeds());
}

// Regression: a scale or cap that is no number was taken for one that is missing.
TEST(HeadConfigTest, RefusesNumbersThatAreNotFiniteWhereTheyMatter) {
  for (const std::string value : {"NaN", "Infinity", "-Infinity"}) {
    EXPECT_THAT(ParseHeadConfig(R"({"model_type":"cohere","logit_scale":)" + value + "}"),
                Fails(kInvalid, "\\\"" + value + "\\\"', expected a number"));
    EXPECT_THAT(
        ParseHeadConfig(R"({"model_type":"gemma2","final_logit_softcapping":)" + value + "}"),
        Fails(kInvalid, "\\\"" + value + "\\\"', expected a number"));
  }
}

TEST(HeadConfigTest, NeverUsesOtherSoftCapsForTheHead) {
  const HeadConfig config = Parse(
      R"({"model_type":"gemma3_text","attn_logit_softcapping":50.0,"router_logit_softcapping":30.0,
          "attention_logit_cap":1,"output_router_logits":true,"num_logits_to_keep":1})");

  EXPECT_EQ(config.softcap, 0.0);
  EXPECT_THAT(config.warnings, IsEmpty());
}

TEST(HeadConfigTest, TreatsACapOfZeroOrFalseAsOff) {
  EXPECT_EQ(Parse(R"({"model_type":"gemma2","final_logit_softcapping":0})").softcap, 0.0);
  EXPECT_EQ(Parse(R"({"model_type":"gemma2","final_logit_softcapping":0.0})").softcap, 0.0);
  EXPECT_EQ(Parse(R"({"model_type":"gemma2","final_logit_softcapping":false})").softcap, 0.0);
}

TEST(HeadConfigTest, AFactorOfFalseOrNullIsOff) {
  for (const std::string value : {"false", "null"}) {
    const HeadConfig config = Parse(R"({"model_type":"cohere","logit_scale":)" + value + "}");
    EXPECT_EQ(config.scale, 1.0) << value;
    EXPECT_THAT(config.warnings, IsEmpty()) << value;
  }
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"cohere","logit_scale":true})"),
              Fails(kInvalid, "expected a number"));
}

TEST(HeadConfigTest, AnIgnoredKeyOfTheTypeIsOff) {
  const LogitOverrides ignoring = {
      .ignored_keys = {"logits_scaling", "final_logit_softcapping", "dim_model_base"}};
  const auto granite = ParseHeadConfig(R"({"model_type":"granite","logits_scaling":8})", ignoring);
  ASSERT_THAT(granite, Succeeds());
  EXPECT_EQ(granite->scale, 1.0);
  const auto gemma =
      ParseHeadConfig(R"({"model_type":"gemma2","final_logit_softcapping":50})", ignoring);
  ASSERT_THAT(gemma, Succeeds());
  EXPECT_EQ(gemma->softcap, 0.0);
  const auto jais = ParseHeadConfig(
      R"({"model_type":"jais","width_scale":8,"mup_output_alpha":2,"mup_width_scale":0.25})",
      {.ignored_keys = {"width_scale"}});
  ASSERT_THAT(jais, Succeeds());
  EXPECT_EQ(jais->scale, 0.5);
  // A key that the type needs need not be there if it is ignored.
  const auto minicpm = ParseHeadConfig(R"({"model_type":"minicpm","hidden_size":8})", ignoring);
  ASSERT_THAT(minicpm, Succeeds());
  EXPECT_EQ(minicpm->scale, 1.0);
}

// Regression: such keys were ignored with a warning, or understood by their names alone.
TEST(HeadConfigTest, RefusesKeysThatMayChangeTheLogitsAtEveryLevel) {
  for (const std::string json :
       {R"("Logit_Bonus":2.0)", R"("mup_width_scale":0.5)",
        R"("text_config":{"output_logits_scaling":2})", R"("a":{"b":{"final_softcap":2}})",
        R"("logits_scaling":8.0)", R"("norm_head":true)", R"("logits_soft_cap":30.0)",
        // Words that contain a harmless one, such as "gate" and "rope", are not harmless.
        R"("aggregate_logit_scale":2.0)", R"("additional_config":{"logit_scale":2.0})",
        R"("property":{"logit_scale":2.0})", R"("text_encoder_config":{"logit_scale":2.0})",
        R"("logit_transform":{"scale":2.0})", R"("heads":[{"logit_scale":2.0}])",
        R"("logit_caps":[30.0])",
        // A key that is off hides no other, and keys of other types are known to matter.
        R"("logit_a":null,"logit_b":2.0)", R"("dim_model_base":256)", R"("width_scale":2.0)"}) {
    const auto config = ParseHeadConfig(R"({"model_type":"llama",)" + json + "}");
    EXPECT_THAT(config, Fails(kUnimplemented, "not understood for model type llama")) << json;
    EXPECT_THAT(config, Fails(kUnimplemented, "--softcap")) << json;
  }
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"llama","logit_off":null,"logit_no":false,
      "logit_zero":0,"warmup_steps":10,"vision_config":{"logit_scale":2.0},
      "router_logit_scale":2.0})"),
              Succeeds());
}

TEST(HeadConfigTest, TheAdviceOfThatRefusalWorks) {
  const std::string json = R"({"model_type":"llama","my_logit_cap":20.0,"my_logit_factor":0.5})";
  EXPECT_THAT(ParseHeadConfig(json),
              Fails(kUnimplemented, "--ignore-config-key 'my_logit_cap:my_logit_factor'"));

  const auto config = ParseHeadConfig(
      json, {.softcap = 20.0, .scale = 0.5, .ignored_keys = {"my_logit_cap", "my_logit_factor"}});

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(config->softcap, 20.0);
  EXPECT_EQ(config->scale, 0.5);
}

TEST(HeadConfigTest, ThatRefusalNamesEachKeyWithItsValue) {
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"llama","my_logit_cap":20.5})"),
              Fails(kUnimplemented,
                    "has the key 'my_logit_cap' ('20.5'), which may change the logits and is not "
                    "understood"));
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"llama","my_logit_cap":20.5,"norm_head":true})"),
              Fails(kUnimplemented,
                    "has the keys 'my_logit_cap' ('20.5'), 'norm_head' ('true'), which may change "
                    "the logits and are not understood"));
}

TEST(HeadConfigTest, OverridesHavePrecedenceOverTheConfig) {
  const auto config = ParseHeadConfig(R"({"model_type":"gemma2"})", {.softcap = 0.0, .scale = 2.0});

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(config->softcap, 0.0);
  EXPECT_EQ(config->scale, 2.0);
}

// Regression: all these were served with another scale, cap or weight than the model's.
TEST(HeadConfigTest, AKeyMeansWhatItMeansForItsModelType) {
  EXPECT_EQ(Parse(R"({"model_type":"granite","logits_scaling":8.0})").scale, 0.125);
  EXPECT_EQ(Parse(R"({"model_type":"hyperclovax","logits_scaling":8.0})").scale, 8.0);
  EXPECT_EQ(Parse(R"({"model_type":"mpt","logit_scale":"inv_sqrt_d_model"})").scale, 1.0);
  EXPECT_EQ(Parse(R"({"model_type":"recurrent_gemma","logits_soft_cap":5.0})").softcap, 5.0);
  EXPECT_EQ(Parse(R"({"model_type":"inkling_text","logits_mup_width_multiplier":2.0})").scale, 0.5);
  EXPECT_EQ(Parse(R"({"model_type":"t5","d_model":16})").scale, 0.25);
  EXPECT_EQ(Parse(R"({"model_type":"t5","d_model":16,"tie_word_embeddings":false})").scale, 1.0);
  EXPECT_EQ(Parse(R"({"model_type":"umt5","d_model":16,"tie_word_embeddings":false})").scale, 0.25);
  EXPECT_EQ(Parse(R"({"model_type":"jais","mup_output_alpha":2,"mup_width_scale":0.25})").scale,
            0.5);
  EXPECT_EQ(Parse(R"({"model_type":"minicpm","dim_model_base":256,"hidden_size":1024})").scale,
            0.25);
}

TEST(HeadConfigTest, WarnsOnlyOfADefaultThatScalesTheLogits) {
  for (const std::string json :
       {R"({"model_type":"granite"})", R"({"model_type":"granite","logits_scaling":8.0})",
        R"({"model_type":"t5","d_model":16})", R"({"model_type":"umt5","d_model":16})",
        R"({"model_type":"umt5","d_model":16,"tie_word_embeddings":true})",
        R"({"model_type":"t5","d_model":16,"tie_word_embeddings":false})",
        R"({"model_type":"paligemma"})"}) {
    EXPECT_THAT(Parse(json).warnings, IsEmpty()) << json;
  }
  EXPECT_THAT(Parse(R"({"model_type":"gemma2"})").warnings,
              ElementsAre(HasSubstr("config.json has no final_logit_softcapping; the default of "
                                    "the model's class is used: cap 30")));
}

TEST(HeadConfigTest, WarnsOfAScaleThatOlderReleasesTieToTheFlag) {
  EXPECT_THAT(Parse(R"({"model_type":"umt5","d_model":16,"tie_word_embeddings":false})").warnings,
              ElementsAre(HasSubstr("scales the logits of umt5 by 0.25 although "
                                    "tie_word_embeddings is false")));
}

TEST(HeadConfigTest, RefusesTypesWhoseLogitsAreNoPlainProduct) {
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"baichuan","vocab_size":125696})"),
              Fails(kUnimplemented, "each row of its head is divided by its norm"));
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"baichuan"})"),
              Fails(kUnimplemented, "each row of its head is divided by its norm"));
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"baichuan","vocab_size":64000})"), Succeeds());
  // A text model makes the logits of the models around it.
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"a_new_type","text_config":{"model_type":"bert"}})"),
              Fails(kUnimplemented, "dense layer"));
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"bailing_moe","norm_head":true})"),
              Fails(kUnimplemented, "norm_head"));
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"bert"})"), Fails(kUnimplemented, "dense layer"));
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"bert"})", {.ignored_keys = {"model_type"}}),
              Succeeds());
}

// The class of the whole model does not scale, and that of its text model does.
TEST(HeadConfigTest, RefusesATextModelWhoseTransformTheWholeModelLacks) {
  const std::string json = R"({"model_type":"aya_vision","text_config":{"model_type":"cohere2"}})";
  EXPECT_THAT(ParseHeadConfig(json), Fails(kUnimplemented, "changes its logits by logit_scale"));

  const auto config = ParseHeadConfig(json, {.scale = 0.0625, .ignored_keys = {"logit_scale"}});

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(config->scale, 0.0625);
}

TEST(HeadConfigTest, RefusesATextModelOnlyForATransformThatIsOn) {
  const auto parse = [](const std::string& outer, const std::string& text) {
    return ParseHeadConfig(R"({"model_type":")" + outer + R"(","text_config":{"model_type":)" +
                           text + "}}");
  };
  EXPECT_THAT(parse("llava", R"("gemma2")"),
              Fails(kUnimplemented,
                    "the text model, gemma2, changes its logits by "
                    "final_logit_softcapping (30), but transformers"));
  EXPECT_THAT(parse("llava", R"("gemma3_text","final_logit_softcapping":1)"),
              Fails(kUnimplemented, "final_logit_softcapping (1)"));
  EXPECT_THAT(parse("llava", R"("granite","logits_scaling":8.0)"),
              Fails(kUnimplemented, "--ignore-config-key logits_scaling"));
  EXPECT_THAT(parse("llava", R"("granite","logits_scaling":"8")"), Fails(kInvalid, "a number"));
  for (const std::string text :
       {R"("gemma3_text")", R"("granite")", R"("granite","logits_scaling":1.0)",
        R"("granite","logits_scaling":0)", R"("cohere2","logit_scale":null)",
        R"("cohere2","logit_scale":false)", R"("gemma2","final_logit_softcapping":null)",
        R"("gemma2","final_logit_softcapping":0)", R"("t5")",
        R"("mpt","logit_scale":"inv_sqrt_d_model")"}) {
    const auto config = parse("llava", text);
    ASSERT_THAT(config, Succeeds()) << text;
    EXPECT_EQ(config->scale, 1.0) << text;
    EXPECT_EQ(config->softcap, 0.0) << text;
  }
  // The class of the whole model reads the key, so it transforms the logits, too.
  EXPECT_THAT(parse("paligemma", R"("gemma2")"), Succeeds());
}

TEST(HeadConfigTest, RefusesATextModelWithATransformBehindAnIgnoredOne) {
  const std::string json =
      R"({"model_type":"llava","text_config":{"model_type":"muse_spark_text"}})";

  EXPECT_THAT(ParseHeadConfig(json, {.ignored_keys = {"output_multiplier"}}),
              Fails(kUnimplemented, "final_logit_softcapping (20)"));
  EXPECT_THAT(
      ParseHeadConfig(json, {.ignored_keys = {"output_multiplier", "final_logit_softcapping"}}),
      Succeeds());
}

TEST(HeadConfigTest, RefusesATextModelThatIsNotServed) {
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"llava","text_config":{"model_type":"bert"}})"),
              Fails(kUnimplemented, "models of type bert are not served"));
}

TEST(HeadConfigTest, WarnsOfATextModelThatMakesTheLogitsAndIsNotKnown) {
  const auto parse = [](const std::string& text, bool strict) {
    return ParseHeadConfig(R"({"model_type":"llama4","text_config":{)" + text + "}}",
                           {.strict = strict});
  };
  EXPECT_THAT(parse(R"("model_type":"a_new_type")", false)->warnings,
              ElementsAre(HasSubstr("the text model of llama4, 'a_new_type', is not known")));
  EXPECT_THAT(parse("", false)->warnings,
              ElementsAre(HasSubstr("llama4, which states no model_type, is not known")));
  EXPECT_THAT(parse(R"("model_type":"a_new_type")", true),
              Fails(kUnimplemented, "--strict-config refuses"));
  const auto known = parse(R"("model_type":"llama4_text")", true);
  ASSERT_THAT(known, Succeeds());
  EXPECT_THAT(known->warnings, IsEmpty());
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"llama"})", {.strict = true}), Succeeds());
}

TEST(HeadConfigTest, ServesAnUnknownTypeAsAPlainHeadUnlessItIsStrict) {
  const std::string json = R"({"model_type":"a_new_type"})";
  EXPECT_THAT(Parse(json).warnings, ElementsAre(HasSubstr("served as a plain one")));
  EXPECT_THAT(ParseHeadConfig(json, {.strict = true}), Fails(kUnimplemented, "--strict-config"));
  EXPECT_THAT(
      Parse(R"({"model_type":"a_new_type","text_config":{"model_type":"gemma2"}})").warnings,
      ElementsAre(HasSubstr("its text model, gemma2, decides"), HasSubstr("cap 30")));
}

TEST(HeadConfigTest, TheNumberOfValidIdsMayHaveAKeyOfItsOwn) {
  EXPECT_EQ(
      Parse(R"({"model_type":"inkling2_text","vocab_size":9,"unpadded_vocab_size":7})").vocab_size,
      7);
}

TEST(HeadConfigTest, TheDefaultNumberOfValidIdsIsNoMoreThanTheVocabulary) {
  const auto vocab = [](const std::string& more) {
    return Parse(R"({"model_type":"inkling2_text")" + more + "}").vocab_size;
  };
  EXPECT_EQ(vocab(""), 200'058);
  EXPECT_EQ(vocab(R"(,"vocab_size":200059)"), 200'058);
  EXPECT_EQ(vocab(R"(,"vocab_size":200057)"), 200'057);
  EXPECT_EQ(vocab(R"(,"vocab_size":200059,"unpadded_vocab_size":null)"), 200'059);
  EXPECT_EQ(Parse(R"({"model_type":"inkling_text","vocab_size":9})").vocab_size, 9);
}

// Regression: such a model was served without the cap of its text model.
TEST(HeadConfigTest, RefusesATextModelAtALevelThatIsNotKnown) {
  for (const std::string level : {"language_model_config", "decoder_config", "llm_cfg"}) {
    const std::string json =
        R"({"model_type":"a_new_type",")" + level + R"(":{"model_type":"gemma2"}})";
    EXPECT_THAT(ParseHeadConfig(json), Fails(kUnimplemented, "move it to text_config"));
    EXPECT_THAT(ParseHeadConfig(json, {.softcap = 30.0, .ignored_keys = {"model_type"}}),
                Succeeds());
  }
  for (const std::string more :
       {R"("architectures":["A"],"decoder_config":{"model_type":"gemma2"})",
        R"("a":{"b":{"model_type":"cohere"}})", R"("z":{"model_type":"bert"})"}) {
    EXPECT_THAT(ParseHeadConfig(R"({"model_type":"a_new_type",)" + more + "}"),
                Fails(kUnimplemented, "a level that is not known"))
        << more;
  }
  EXPECT_THAT(
      ParseHeadConfig(R"({"model_type":"a_new_type","decoder_config":{"model_type":"llama"}})"),
      Succeeds());
  EXPECT_THAT(
      ParseHeadConfig(R"({"model_type":"a_new_type","vision_config":{"model_type":"gemma2"}})"),
      Succeeds());
}

// Regression: the width of the whole model was compared with the head of the text model.
TEST(HeadConfigTest, TheWidthIsThatOfTheInnermostLevelThatHasAKeyForIt) {
  EXPECT_EQ(Parse(R"({"hidden_size":4,"text_config":{"d_model":8}})").hidden_size, 8);
}

// Regression: Marian's decoder may have a vocabulary of its own.
TEST(HeadConfigTest, AFlagMayDecideWhichKeyHasTheNumberOfIds) {
  const std::string sizes = R"({"model_type":"marian","vocab_size":16,"decoder_vocab_size":20)";
  EXPECT_EQ(Parse(sizes + "}").vocab_size, 16);
  EXPECT_EQ(Parse(sizes + R"(,"share_encoder_decoder_embeddings":true})").vocab_size, 16);
  EXPECT_EQ(Parse(sizes + R"(,"share_encoder_decoder_embeddings":false})").vocab_size, 20);
}

TEST(HeadConfigTest, BoundsItsMessageAboutManyKeys) {
  std::string json = R"({"model_type":"llama")";
  for (int i = 0; i < 1'000; ++i) {
    json += ",\"my_logit_" + std::to_string(i) + "\":1";
  }
  const auto config = ParseHeadConfig(json + "}");
  EXPECT_THAT(config, Fails(kUnimplemented, "and 968 more"));
  EXPECT_LT(config.status().message().size(), 4'000U);
}

TEST(HeadConfigTest, NamesUpTo32Keys) {
  const auto with_keys = [](int num_keys) {
    std::string json = R"({"model_type":"llama")";
    for (int i = 0; i < num_keys; ++i) {
      absl::StrAppend(&json, ",\"my_logit_", 10 + i, "\":1");
    }
    return ParseHeadConfig(json + "}").status().message();
  };
  EXPECT_THAT(with_keys(32), AllOf(HasSubstr("'my_logit_41' ('1')"), HasSubstr(":my_logit_41'"),
                                   Not(HasSubstr("more"))));
  EXPECT_THAT(with_keys(33), AllOf(HasSubstr("'my_logit_41' ('1') and 1 more, which"),
                                   HasSubstr(":my_logit_41'"), Not(HasSubstr("my_logit_42"))));
}

// Regression: its default, 1, was taken for a factor that the config leaves out.
TEST(HeadConfigTest, RefusesATypeWhoseFactorHasNoDefault) {
  for (const std::string type : {"jais", "btlm", "minicpm"}) {
    EXPECT_THAT(ParseHeadConfig(R"({"model_type":")" + type + R"(","hidden_size":8})"),
                Fails(kUnimplemented, "set --logit-scale"))
        << type;
  }
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"jais"})"),
              Fails(kUnimplemented,
                    "jais scale their logits by width_scale or mup_output_alpha or "
                    "mup_width_scale, which config.json lacks"));
  EXPECT_THAT(ParseHeadConfig(R"({"model_type":"jais"})", {.scale = 2.0}), Succeeds());
}

TEST(HeadConfigTest, UsesTheDefaultsThatConfigsLeaveOut) {
  const HeadConfig cohere = Parse(R"({"model_type":"cohere"})");
  EXPECT_EQ(cohere.scale, 0.0625);
  EXPECT_THAT(cohere.warnings, ElementsAre(HasSubstr("logit_scale")));
  EXPECT_EQ(Parse(R"({"model_type":"gemma2"})").softcap, 30.0);
  EXPECT_EQ(Parse(R"({"model_type":"gemma2","final_logit_softcapping":null})").softcap, 0.0);
}

// Regression: PaliGemma 2 has the cap of its text model, which no key of its config states.
TEST(HeadConfigTest, AKeyOfTheTextModelHasTheDefaultOfItsType) {
  EXPECT_EQ(Parse(R"({"model_type":"paligemma","text_config":{"model_type":"gemma2"}})").softcap,
            30.0);
  EXPECT_EQ(Parse(R"({"model_type":"paligemma","text_config":{"model_type":"gemma"}})").softcap,
            0.0);
  const auto scale = [](const std::string& outer, const std::string& text) {
    return Parse(R"({"model_type":")" + outer + R"(","text_config":{"model_type":")" + text +
                 "\"}}")
        .scale;
  };
  EXPECT_EQ(scale("cohere_compass", "cohere"), 0.0625);
  EXPECT_EQ(scale("cohere_compass", "cohere_compass_text"), 1.0);
  EXPECT_EQ(scale("cohere2", "cohere_compass_text"), 0.0625);
}

// Regression: only the outermost type was used, so such a model was scored without cap or scale.
TEST(HeadConfigTest, UsesTheDefaultsOfANestedTextModel) {
  EXPECT_EQ(Parse(R"({"thinker_config":{"model_type":"cohere","text_config":{}}})").scale, 0.0625);
  EXPECT_EQ(Parse(R"({"text_config":{"model_type":"gemma3n_text"}})").softcap, 30.0);
  EXPECT_EQ(Parse(R"({"text_config":{"model_type":"granite_docling_text"}})").scale, 0.25);
  const HeadConfig muse = Parse(R"({"text_config":{"model_type":"muse_spark_text"}})");
  EXPECT_EQ(muse.scale, 0.1767766952966369);
  EXPECT_EQ(muse.softcap, 20.0);
}

struct TieCase {
  std::string name;
  std::string json;
  std::optional<bool> stated;
  std::optional<bool> elsewhere;
  std::optional<bool> by_default;
  std::string flag = "tie_word_embeddings";
};

class TieFlagTest : public ::testing::TestWithParam<TieCase> {};

TEST_P(TieFlagTest, SaysWhereTheFlagIsStatedAndWhatTheClassAssumes) {
  const TieFlag tied = Parse(GetParam().json).tied;

  EXPECT_EQ(tied.stated, GetParam().stated);
  EXPECT_EQ(tied.elsewhere, GetParam().elsewhere);
  EXPECT_EQ(tied.by_default, GetParam().by_default);
  EXPECT_EQ(tied.name, GetParam().flag);
  EXPECT_FALSE(tied.is_contradictory);
}

constexpr std::nullopt_t kUnset = std::nullopt;

// Of a type that is not known, all levels count, and the text model has the default.
INSTANTIATE_TEST_SUITE_P(
    UnknownTypes, TieFlagTest,
    ::testing::Values(
        TieCase{"Nothing", "{}", kUnset, kUnset, kUnset},
        TieCase{"Flag", R"({"tie_word_embeddings":false})", false, kUnset, kUnset},
        TieCase{"FlagOfTheText",
                R"({"tie_word_embeddings":null,"text_config":{"tie_word_embeddings":true}})", true,
                kUnset, kUnset},
        TieCase{"UntiedText", R"({"text_config":{"model_type":"llama"}})", kUnset, kUnset, false},
        TieCase{"TiedText", R"({"text_config":{"model_type":"gemma"}})", kUnset, kUnset, true},
        TieCase{"AlwaysTiedText", R"({"text_config":{"model_type":"mt5"}})", kUnset, kUnset, true},
        TieCase{"NeverTiedText", R"({"text_config":{"model_type":"kimi_linear"}})", kUnset, kUnset,
                false}),
    [](const auto& info) { return info.param.name; });

// Of llava the default is untied, and of hunyuan_vl it is tied; each level counts.
INSTANTIATE_TEST_SUITE_P(
    AnyLevel, TieFlagTest,
    ::testing::Values(
        TieCase{"UntiedClass", R"({"model_type":"llava"})", kUnset, kUnset, false},
        TieCase{"TrueInTheText",
                R"({"model_type":"llava","text_config":{"tie_word_embeddings":true}})", true,
                kUnset, false},
        TieCase{"FalseInTheText",
                R"({"model_type":"llava","text_config":{"tie_word_embeddings":false}})", false,
                kUnset, false},
        TieCase{"TiedText", R"({"model_type":"llava","text_config":{"model_type":"gemma"}})",
                kUnset, kUnset, true},
        TieCase{"TiedTextAndFalseAtTheTop",
                R"({"model_type":"llava","tie_word_embeddings":false,
                    "text_config":{"model_type":"gemma"}})",
                kUnset, kUnset, true},
        TieCase{"TiedTextThatStatesFalse",
                R"({"model_type":"llava","text_config":{"model_type":"gemma",
                    "tie_word_embeddings":false}})",
                false, kUnset, false},
        TieCase{"TiedClass", R"({"model_type":"hunyuan_vl"})", kUnset, kUnset, true},
        TieCase{"TiedClassThatStatesFalse",
                R"({"model_type":"hunyuan_vl","tie_word_embeddings":false})", false, kUnset, false},
        TieCase{"TiedClassWithFalseInTheText",
                R"({"model_type":"hunyuan_vl","text_config":{"tie_word_embeddings":false}})",
                kUnset, kUnset, true},
        TieCase{"TextOfTheSameTypeHasNoDefaultOfItsOwn",
                R"({"model_type":"hunyuan_vl","tie_word_embeddings":false,
                    "text_config":{"model_type":"hunyuan_vl"}})",
                false, kUnset, false}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    OneLevel, TieFlagTest,
    ::testing::Values(
        TieCase{"Top", R"({"model_type":"gemma","tie_word_embeddings":false})", false, kUnset,
                true},
        TieCase{"OnlyElsewhere",
                R"({"model_type":"mistral3","text_config":{"tie_word_embeddings":true}})", kUnset,
                true, true},
        TieCase{"UntiedText", R"({"model_type":"mistral3","text_config":{"model_type":"mistral"}})",
                kUnset, false, true},
        TieCase{"TiedText", R"({"model_type":"mistral3","text_config":{"model_type":"gemma"}})",
                kUnset, kUnset, true},
        TieCase{"UntiedTextOfTheSameType",
                R"({"model_type":"llama","text_config":{"model_type":"llama"}})", kUnset, kUnset,
                false},
        TieCase{"OwnKeyFirst",
                R"({"model_type":"lfm2","tie_embedding":false,"tie_word_embeddings":true})", false,
                kUnset, true},
        TieCase{"UsualKeyWithoutTheOwn",
                R"({"model_type":"lfm2","tie_embedding":null,"tie_word_embeddings":false})", false,
                kUnset, true},
        TieCase{"LevelOfTheText",
                R"({"model_type":"perception_lm","tie_word_embeddings":true,
                    "text_config":{"tie_word_embeddings":false}})",
                false, kUnset, false, "text_config.tie_word_embeddings"},
        TieCase{"LevelOfATiedText",
                R"({"model_type":"perception_lm","text_config":{"model_type":"gemma"}})", kUnset,
                kUnset, true, "text_config.tie_word_embeddings"},
        TieCase{"LevelOfAnUntiedText",
                R"({"model_type":"blip-2","text_config":{"model_type":"llama"}})", kUnset, false,
                false, "text_config.tie_word_embeddings"},
        TieCase{"LevelOfATextThatIsNotKnown",
                R"({"model_type":"blip-2","text_config":{"model_type":"a_new_type"}})", kUnset,
                kUnset, true, "text_config.tie_word_embeddings"},
        TieCase{"LevelThatTheFileLacks", R"({"model_type":"blip-2","tie_word_embeddings":false})",
                false, kUnset, true},
        TieCase{"EnclosingLevelWithATiedText",
                R"({"model_type":"qwen2_5_omni",
                    "thinker_config":{"model_type":"qwen2_5_omni_thinker",
                                      "text_config":{"model_type":"gemma"}}})",
                kUnset, kUnset, false, "thinker_config.tie_word_embeddings"},
        TieCase{"EnclosingLevel",
                R"({"model_type":"qwen2_5_omni","tie_word_embeddings":false,
                    "thinker_config":{"tie_word_embeddings":true,
                                      "text_config":{"tie_word_embeddings":false}}})",
                true, kUnset, false, "thinker_config.tie_word_embeddings"}),
    [](const auto& info) { return info.param.name; });

TEST(HeadConfigTest, LevelsOfATypeThatIsNotKnownMustAgreeAboutTheTie) {
  const std::string text = R"("text_config":{"model_type":"gemma","tie_word_embeddings":true})";

  const TieFlag tied = Parse(R"({"tie_word_embeddings":false,)" + text + "}").tied;

  EXPECT_TRUE(tied.is_contradictory);
  EXPECT_EQ(tied.stated, std::nullopt);
  EXPECT_EQ(tied.by_default, std::nullopt);
  EXPECT_FALSE(Parse(R"({"tie_word_embeddings":true,)" + text + "}").tied.is_contradictory);
}

TEST(HeadConfigTest, SomeClassesTieAlwaysOrNever) {
  EXPECT_TRUE(Parse(R"({"model_type":"t5","d_model":4})").tied.is_always);
  EXPECT_FALSE(Parse(R"({"model_type":"t5","d_model":4})").tied.is_never);
  EXPECT_TRUE(Parse(R"({"model_type":"kimi_linear"})").tied.is_never);
  EXPECT_FALSE(Parse(R"({"model_type":"kimi_linear"})").tied.is_always);
  EXPECT_FALSE(Parse(R"({"model_type":"gemma"})").tied.is_always);
  EXPECT_FALSE(Parse(R"({"model_type":"gemma"})").tied.is_never);
  const std::string inner = R"({"model_type":"blip-2","text_config":{"model_type":)";
  EXPECT_TRUE(Parse(inner + R"("t5","d_model":4}})").tied.is_always);
  EXPECT_FALSE(Parse(inner + R"("opt"}})").tied.is_always);
}

TEST(HeadConfigTest, EscapesAndCutsTheModelType) {
  EXPECT_EQ(Parse(R"({"model_type":"a\nb"})").model_type, "a\\nb");
  EXPECT_EQ(
      Parse(absl::StrCat(R"({"model_type":")", std::string(1'000, 'x'), "\"}")).model_type.size(),
      64U);
}

struct ConfigCase {
  std::string name;
  std::string json;
  std::string complaint;
};

class HeadConfigCasesTest : public ::testing::TestWithParam<ConfigCase> {};

TEST_P(HeadConfigCasesTest, IsRefused) {
  EXPECT_THAT(ParseHeadConfig(GetParam().json), Fails(kInvalid, GetParam().complaint));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, HeadConfigCasesTest,
    ::testing::Values(
        ConfigCase{"Empty", "", "not valid JSON"}, ConfigCase{"Open", "{", "not valid JSON"},
        ConfigCase{"Array", "[]", "not a JSON object"},
        ConfigCase{"NotUtf", "{\"a\":\"\xFF\"}", "not valid JSON in UTF-8"},
        ConfigCase{"Nul", std::string("{}\0{}", 5), "NUL"},
        ConfigCase{"DeepNesting", std::string(100'000, '['), "nested deeper than 64"},
        ConfigCase{"NestThatIsAList", R"({"text_config":[]})", "text_config is not an object"},
        ConfigCase{"HiddenAsText", R"({"hidden_size":"64"})", "hidden_size is '\\\"64\\\"'"},
        ConfigCase{"HiddenZero", R"({"hidden_size":0})", "hidden_size is '0'"},
        ConfigCase{"HiddenNegative", R"({"n_embd":-1})", "n_embd is '-1'"},
        ConfigCase{"HiddenFraction", R"({"d_model":64.0})", "d_model is '64.0'"},
        ConfigCase{"VocabHuge", R"({"vocab_size":99999999999})", "vocab_size is '99999999999'"},
        ConfigCase{"TiedAsNumber", R"({"tie_word_embeddings":1})", "true or false"},
        ConfigCase{"BiasAsText", R"({"lm_head_bias":"yes"})", "true or false"},
        ConfigCase{"ScaleZero", R"({"model_type":"cohere","logit_scale":0})", "logit_scale is '0'"},
        ConfigCase{"ScaleNegative", R"({"model_type":"granite","logits_scaling":-2.0})",
                   "logits_scaling is '-2.0'"},
        ConfigCase{"ScaleAsText", R"({"model_type":"falcon_h1","lm_head_multiplier":"2"})",
                   "a number"},
        ConfigCase{"ScaleBeyondFloat", R"({"model_type":"cohere","logit_scale":1e200})",
                   "fits fp32"},
        ConfigCase{"ScaleBelowFloat", R"({"model_type":"cohere","logit_scale":1e-200})",
                   "fits fp32"},
        ConfigCase{"ProductBeyondFloat",
                   R"({"model_type":"jais","mup_output_alpha":1e30,"mup_width_scale":1e30})",
                   "does not fit fp32"},
        ConfigCase{"ProductBelowFloat",
                   R"({"model_type":"jais","mup_output_alpha":1e-30,"mup_width_scale":1e-30})",
                   "does not fit fp32"},
        ConfigCase{"FactorOfAFlagAsNumber",
                   R"({"model_type":"t5","d_model":4,"scale_decoder_outputs":1})", "true or false"},
        ConfigCase{"OwnTieFlagAsNumber", R"({"model_type":"lfm2","tie_embedding":1})",
                   "tie_embedding is '1', expected true or false"},
        ConfigCase{"FlagOfTheVocabularyAsNumber",
                   R"({"model_type":"marian","share_encoder_decoder_embeddings":1})",
                   "true or false"},
        ConfigCase{"CapNegative", R"({"model_type":"gemma2","final_logit_softcapping":-30})",
                   "positive"},
        ConfigCase{"CapAsList", R"({"model_type":"gemma2","final_logit_softcapping":[30]})",
                   "a number"},
        ConfigCase{"MiniCpmWithoutHidden", R"({"model_type":"minicpm","dim_model_base":256})",
                   "needs hidden_size"}),
    [](const auto& info) { return info.param.name; });

TEST(ConfigOfHeadTest, KeepsTheKeysThatDescribeTheHead) {
  const auto config = ConfigOfHead(
      R"({"model_type":"gemma2","architectures":["Gemma2ForCausalLM"],"torch_dtype":"bfloat16",
          "hidden_size":8,"vocab_size":9,"num_hidden_layers":2,"attn_logit_softcapping":50.0,
          "final_logit_softcapping":30.0,"logit_scale":0.0625,"tie_word_embeddings":true,
          "quantization_config":{"quant_method":"fp8"}})",
      8, 9);

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(*config, R"({
  "architectures": [
    "Gemma2ForCausalLM"
  ],
  "final_logit_softcapping": 30.0,
  "hidden_size": 8,
  "logit_scale": 0.0625,
  "model_type": "gemma2",
  "tie_word_embeddings": false,
  "vocab_size": 9
}
)");
}

TEST(ConfigOfHeadTest, KeepsThePrecedenceOfLevelsAndTheDefaultsOfModelTypes) {
  for (const std::string json :
       {R"({"model_type":"paligemma","final_logit_softcapping":30.0,
            "text_config":{"final_logit_softcapping":null,"hidden_size":5,"vocab_size":7}})",
        R"({"model_type":"gemma3n","text_config":{"model_type":"gemma3n_text","hidden_size":5}})",
        R"({"model_type":"x","thinker_config":{"text_config":{"logits_scaling":8.0,
            "model_type":"granite"}}})",
        R"({"model_type":"gemma2","text_config":null,"final_logit_softcapping":null})",
        R"({"model_type":"t5","tie_word_embeddings":false,"d_model":5})",
        R"({"model_type":"t5","tie_word_embeddings":true,"scale_decoder_outputs":false})",
        R"({"model_type":"t5gemma","decoder":{"final_logit_softcapping":3}})",
        R"({"model_type":"inkling_text","unpadded_vocab_size":6,"vocab_size":7})",
        R"({"model_type":"minicpm","dim_model_base":256,"n_embd":5})"}) {
    SCOPED_TRACE(json);
    const HeadConfig before = Parse(json);

    const auto text = ConfigOfHead(json, 5, 7);

    ASSERT_THAT(text, Succeeds());
    const HeadConfig after = Parse(*text);
    EXPECT_EQ(after.model_type, before.model_type);
    EXPECT_EQ(after.scale, before.scale);
    EXPECT_EQ(after.softcap, before.softcap);
    EXPECT_EQ(after.hidden_size, 5);
    EXPECT_EQ(after.vocab_size, before.vocab_size.value_or(7));
  }
}

TEST(ConfigOfHeadTest, KeepsKeysThatAreNotUnderstoodSoThatTheServerRefusesThemAgain) {
  const std::string json = R"({"my_logit_shift":2.0,"router_logit_scale":3.0})";

  const auto config = ConfigOfHead(json, 4, 5);

  ASSERT_THAT(config, Succeeds());
  EXPECT_THAT(ParseHeadConfig(*config), Fails(kUnimplemented, "my_logit_shift"));
  EXPECT_EQ(config->find("router"), std::string::npos);
  const auto without = ConfigOfHead(json, 4, 5, {"my_logit_shift"});
  ASSERT_THAT(without, Succeeds());
  EXPECT_THAT(ParseHeadConfig(*without), Succeeds());
  const auto type =
      ConfigOfHead(R"({"a_logit_shift":2.0,"model_type":"gemma"})", 4, 5, {"a_logit_shift"});
  ASSERT_THAT(type, Succeeds());
  EXPECT_EQ(Parse(*type).model_type, "gemma");
}

// Regression: the class has a default for a key that is left out.
TEST(ConfigOfHeadTest, KeepsAnIgnoredTransformOff) {
  const std::string json = R"({"model_type":"gemma2","final_logit_softcapping":50.0})";
  const LogitOverrides ignoring = {.ignored_keys = {"final_logit_softcapping"}};
  ASSERT_THAT(ParseHeadConfig(json, ignoring), Succeeds());

  const auto config = ConfigOfHead(json, 4, 5, ignoring.ignored_keys);

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(Parse(*config).softcap, 0.0);
}

// Regression: null is the default of a flag, which is true.
TEST(ConfigOfHeadTest, KeepsAnIgnoredFlagOff) {
  for (const std::string key : {"scale_decoder_outputs", "tie_word_embeddings"}) {
    const std::string json = key == "tie_word_embeddings"
                                 ? R"({"model_type":"switch_transformers","d_model":4})"
                                 : R"({"model_type":"t5","d_model":4})";
    const auto config = ConfigOfHead(json, 4, 5, {key});
    ASSERT_THAT(config, Succeeds());
    EXPECT_EQ(Parse(*config).scale, 1.0) << key;
  }
}

// Regression: without the level, keys were searched in another one.
TEST(ConfigOfHeadTest, KeepsALevelThatHidesOthers) {
  const std::string json =
      R"({"model_type":"paligemma","text_config":{"num_layers":2},
          "llm_config":{"final_logit_softcapping":30.0}})";

  const auto config = ConfigOfHead(json, 4, 5);

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(Parse(*config).softcap, Parse(json).softcap);
}

TEST(ConfigOfHeadTest, DropsATieAtEveryLevel) {
  const auto config = ConfigOfHead(
      R"({"model_type":"llava","tie_word_embeddings":true,
          "text_config":{"model_type":"llama","tie_word_embeddings":true}})",
      4, 5);

  ASSERT_THAT(config, Succeeds());
  EXPECT_EQ(Parse(*config).tied.stated, false);
}

TEST(ConfigOfHeadTest, WritesAnIgnoredFactorAsNull) {
  const auto config = ConfigOfHead(R"({"model_type":"cohere"})", 4, 5, {"logit_scale"});

  ASSERT_THAT(config, Succeeds());
  EXPECT_THAT(*config, HasSubstr("\"logit_scale\": null"));
}

TEST(ConfigOfHeadTest, RefusesTextThatIsNotAnObject) {
  EXPECT_THAT(ConfigOfHead("[]", 4, 5), Fails(kInvalid, "not a JSON object"));
  EXPECT_THAT(ConfigOfHead("{", 4, 5), Fails(kInvalid, "not a JSON object"));
}

}  // namespace
}  // namespace logprobd
