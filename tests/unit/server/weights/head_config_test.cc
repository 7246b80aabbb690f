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
  EXPECT_EQ(config.tied, false);
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
  EXPECT_EQ(Parse(R"({"text_config":{"final_logit_softcapping":null},
      "final_logit_softcapping":30.0})")
                .softcap,
            0.0);
}

TEST(HeadConfigTest, LeavesMissingValuesEmpty) {
  const HeadConfig config = Parse("{}");

  EXPECT_EQ(config.model_type, "unknown");
  EXPECT_FALSE(config.hidden_size.has_value());
  EXPECT_FALSE(config.vocab_size.has_value());
  EXPECT_FALSE(config.tied.has_value());
  EXPECT_FALSE(config.has_bias.has_value());
  EXPECT_EQ(config.scale, 1.0);
  EXPECT_EQ(config.softcap, 0.0);
  EXPECT_THAT(config.warnings, IsEmpty());
}

TEST(HeadConfigTest, AcceptsTheNumbersThatPythonWrites) {
  const HeadConfig config = Parse(
      R"({"time_step_limit":[0.0,Infinity],"a":-Infinity,"b":NaN,"s":"NaN \" Infinity",
          "hidden_size":3,"logit_scale":Infinity})");

  EXPECT_EQ(config.hidden_size, 3);
  EXPECT_EQ(config.scale, 1.0);
}

TEST(HeadConfigTest, NeverUsesOtherSoftCapsForTheHead) {
  const HeadConfig config = Parse(R"({"attn_logit_softcapping":50.0,"router_logit_softcapping":30.0,
          "attention_logit_cap":1,"output_router_logits":true,"num_logits_to_keep":1})");

  EXPECT_EQ(config.softcap, 0.0);
  EXPECT_THAT(config.warnings, IsEmpty());
}

TEST(HeadConfigTest, TreatsACapOfZeroOrFalseAsOff) {
  EXPECT_EQ(Parse(R"({"final_logit_softcapping":0})").softcap, 0.0);
  EXPECT_EQ(Parse(R"({"final_logit_softcapping":0.0})").softcap, 0.0);
  EXPECT_EQ(Parse(R"({"final_logit_softcapping":false})").softcap, 0.0);
}

TEST(HeadConfigTest, WarnsOfUnknownKeysThatMayChangeTheLogits) {
  const HeadConfig config = Parse(
      R"({"Logit_Bonus":2.0,"mup_width_scale":0.5,"logit_off":null,"logit_no":false,
          "warmup_steps":10,"text_config":{"output_logits_scaling":2}})");

  EXPECT_THAT(config.warnings,
              ElementsAre(HasSubstr("'output_logits_scaling'"), HasSubstr("'Logit_Bonus'"),
                          HasSubstr("'mup_width_scale'")));
}

TEST(HeadConfigTest, MultipliesSeveralScalesAndWarns) {
  const HeadConfig config =
      Parse(R"({"hidden_size":512,"logit_scale":0.5,"dim_model_base":256,"logits_scaling":2})");

  EXPECT_EQ(config.scale, 0.125);
  EXPECT_THAT(config.warnings,
              ElementsAre(HasSubstr("logit_scale, logits_scaling, dim_model_base")));
}

TEST(HeadConfigTest, UsesTheDefaultsThatConfigsLeaveOut) {
  const HeadConfig cohere = Parse(R"({"model_type":"cohere"})");
  EXPECT_EQ(cohere.scale, 0.0625);
  EXPECT_THAT(cohere.warnings, ElementsAre(HasSubstr("logit_scale")));
  EXPECT_EQ(Parse(R"({"model_type":"gemma2"})").softcap, 30.0);
  EXPECT_EQ(Parse(R"({"model_type":"gemma2","final_logit_softcapping":null})").softcap, 0.0);
}

// Regression: only the outermost type was used, so such a model was scored without cap or scale.
TEST(HeadConfigTest, UsesTheDefaultsOfANestedTextModel) {
  const HeadConfig paligemma =
      Parse(R"({"model_type":"paligemma","text_config":{"model_type":"gemma2"}})");
  EXPECT_EQ(paligemma.model_type, "paligemma");
  EXPECT_EQ(paligemma.softcap, 30.0);
  EXPECT_THAT(paligemma.warnings, ElementsAre(HasSubstr("gemma2")));
  EXPECT_EQ(Parse(R"({"model_type":"aya_vision","text_config":{"model_type":"cohere2"}})").scale,
            0.0625);
  EXPECT_EQ(Parse(R"({"thinker_config":{"model_type":"cohere","text_config":{}}})").scale, 0.0625);
  EXPECT_EQ(Parse(R"({"text_config":{"model_type":"gemma3n_text"}})").softcap, 30.0);
  EXPECT_EQ(Parse(R"({"text_config":{"model_type":"granite_docling_text"}})").scale, 0.25);
  const HeadConfig muse = Parse(R"({"text_config":{"model_type":"muse_spark_text"}})");
  EXPECT_EQ(muse.scale, 0.1767766952966369);
  EXPECT_EQ(muse.softcap, 20.0);
  EXPECT_EQ(Parse(R"({"model_type":"paligemma","text_config":{"model_type":"gemma2",
      "final_logit_softcapping":null}})")
                .softcap,
            0.0);
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
        ConfigCase{"ScaleZero", R"({"logit_scale":0})", "logit_scale is '0'"},
        ConfigCase{"ScaleNegative", R"({"logits_scaling":-2.0})", "logits_scaling is '-2.0'"},
        ConfigCase{"ScaleAsText", R"({"lm_head_multiplier":"2"})", "a number"},
        ConfigCase{"ScaleBeyondFloat", R"({"logit_scale":1e200})", "fits fp32"},
        ConfigCase{"ScaleBelowFloat", R"({"logit_scale":1e-200})", "fits fp32"},
        ConfigCase{"ProductBeyondFloat", R"({"logit_scale":1e30,"output_multiplier":1e30})",
                   "does not fit fp32"},
        ConfigCase{"CapNegative", R"({"final_logit_softcapping":-30})", "positive"},
        ConfigCase{"CapAsList", R"({"final_logit_softcapping":[30]})", "a number"},
        ConfigCase{"MiniCpmWithoutHidden", R"({"dim_model_base":256})", "needs hidden_size"}),
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
       {R"({"model_type":"outer","final_logit_softcapping":30.0,
            "text_config":{"final_logit_softcapping":null,"hidden_size":5,"vocab_size":7}})",
        R"({"model_type":"gemma3n","text_config":{"model_type":"gemma3n_text","hidden_size":5}})",
        R"({"thinker_config":{"text_config":{"logits_scaling":8.0},"logit_scale":0.5}})",
        R"({"model_type":"gemma2","text_config":null,"final_logit_softcapping":null})",
        R"({"model_type":"mpt","logit_scale":"inv_sqrt_d_model","d_model":5})",
        R"({"dim_model_base":256,"n_embd":5,"logit_scale":NaN})"}) {
    SCOPED_TRACE(json);
    const HeadConfig before = Parse(json);

    const auto text = ConfigOfHead(json, 5, 7);

    ASSERT_THAT(text, Succeeds());
    const HeadConfig after = Parse(*text);
    EXPECT_EQ(after.model_type, before.model_type);
    EXPECT_EQ(after.scale, before.scale);
    EXPECT_EQ(after.softcap, before.softcap);
    EXPECT_EQ(after.hidden_size, 5);
    EXPECT_EQ(after.vocab_size, 7);
    EXPECT_EQ(after.tied, false);
  }
}

TEST(ConfigOfHeadTest, KeepsKeysThatAreNotUnderstoodSoThatTheServerWarnsAgain) {
  const std::string json = R"({"my_logit_shift":2.0,"router_logit_scale":3.0})";

  const auto config = ConfigOfHead(json, 4, 5);

  ASSERT_THAT(config, Succeeds());
  EXPECT_THAT(Parse(*config).warnings, ElementsAre(HasSubstr("my_logit_shift")));
  EXPECT_EQ(config->find("router"), std::string::npos);
}

TEST(ConfigOfHeadTest, RefusesTextThatIsNotAnObject) {
  EXPECT_THAT(ConfigOfHead("[]", 4, 5), Fails(kInvalid, "not a JSON object"));
  EXPECT_THAT(ConfigOfHead("{", 4, 5), Fails(kInvalid, "not a JSON object"));
}

}  // namespace
}  // namespace logprobd
