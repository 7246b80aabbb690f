#include "server/weights/head_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
}

// Regression: a scale or cap that is no number was taken for one that is missing.
TEST(HeadConfigTest, RefusesNumbersThatAreNotFiniteWhereTheyMatter) {
  for (const std::string value : {"NaN", "Infinity", "-Infinity"}) {
    EXPECT_THAT(ParseHeadConfig(R"({"model_type":"cohere","logit_scale":)" + value + "}"),
                Fails(kInvalid, "expected a number"));
    EXPECT_THAT(
        ParseHeadConfig(R"({"model_type":"gemma2","final_logit_softcapping":)" + value + "}"),
        Fails(kInvalid, "expected a number"));
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
        R"("logit_caps":[30.0])"}) {
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

// Regression: such a model was served without the cap of its text model.
TEST(HeadConfigTest, RefusesATextModelAtALevelThatIsNotKnown) {
  for (const std::string level : {"language_model_config", "decoder_config", "llm_cfg"}) {
    const std::string json =
        R"({"model_type":"a_new_type",")" + level + R"(":{"model_type":"gemma2"}})";
    EXPECT_THAT(ParseHeadConfig(json), Fails(kUnimplemented, "move it to text_config"));
    EXPECT_THAT(ParseHeadConfig(json, {.softcap = 30.0, .ignored_keys = {"model_type"}}),
                Succeeds());
  }
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

// Regression: its default, 1, was taken for a factor that the config leaves out.
TEST(HeadConfigTest, RefusesATypeWhoseFactorHasNoDefault) {
  for (const std::string type : {"jais", "btlm", "minicpm"}) {
    EXPECT_THAT(ParseHeadConfig(R"({"model_type":")" + type + R"(","hidden_size":8})"),
                Fails(kUnimplemented, "set --logit-scale"))
        << type;
  }
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

TEST(ConfigOfHeadTest, RefusesTextThatIsNotAnObject) {
  EXPECT_THAT(ConfigOfHead("[]", 4, 5), Fails(kInvalid, "not a JSON object"));
  EXPECT_THAT(ConfigOfHead("{", 4, 5), Fails(kInvalid, "not a JSON object"));
}

}  // namespace
}  // namespace logprobd
