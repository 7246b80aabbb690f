#include "server/weights/head_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "server/weights/head_weights.h"
#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using testing::FileTensor;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MakeRandomTensor;
using testing::MakeTensor;
using testing::MakeZeroTensor;
using testing::ModelFolder;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

absl::StatusOr<ModelFolderHead> Open(const std::string& config,
                                     const std::vector<FileTensor>& tensors,
                                     const ModelFolderOptions& options = {}) {
  const ModelFolder folder;
  folder.WriteConfig(config);
  folder.WriteTensors(tensors);
  return OpenModelFolder(folder.path(), options);
}

// Returns a config.json with the sizes of Head and Embedding.
std::string Config(const std::string& model_type, const std::string& more = "") {
  return R"({"model_type":")" + model_type + R"(","hidden_size":8,"vocab_size":6)" +
         (more.empty() ? "" : "," + more) + "}";
}

const std::string kTied = Config("llama", R"("tie_word_embeddings":true)");
const std::string kUntied = Config("llama", R"("tie_word_embeddings":false)");
const std::string kNoFlag = Config("llama");

FileTensor Head(uint32_t seed) {
  return MakeRandomTensor("lm_head.weight", Dtype::kBf16, {6, 8}, 1.0F, seed);
}
FileTensor Embedding(uint32_t seed) {
  return MakeRandomTensor("model.embed_tokens.weight", Dtype::kBf16, {6, 8}, 1.0F, seed);
}

TEST(HeadChoiceTest, UsesTheEmbeddingOfATiedModelWithoutAWarningWhenBothTensorsAreEqual) {
  const auto head = Open(kTied, {Head(1), Embedding(1)});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "model.embed_tokens.weight");
  EXPECT_TRUE(head->weights->info().tied);
  EXPECT_THAT(head->warnings, IsEmpty());
}

// Regressions of all these: a flag had precedence over other values in the file, so the embedding
// of such a model was served with a warning.
TEST(HeadChoiceTest, RefusesATiedModelWhoseTensorsDifferInASingleBit) {
  FileTensor changed = Embedding(1);
  changed.bytes.back() = static_cast<char>(changed.bytes.back() ^ 1);

  const auto head = Open(kTied, {Head(1), changed});

  EXPECT_THAT(head, Fails(kInvalid, "says that the head is tied to the embedding"));
  EXPECT_THAT(head, Fails(kInvalid, "transformers 5.23.0 uses lm_head.weight, and vLLM"));
  EXPECT_THAT(
      head,
      Fails(kInvalid, "--head-tensor lm_head.weight or --head-tensor model.embed_tokens.weight"));
}

TEST(HeadChoiceTest, TheAdviceOfThatRefusalWorks) {
  for (const std::string name : {"lm_head.weight", "model.embed_tokens.weight"}) {
    const auto head = Open(kTied, {Head(1), Embedding(2)}, {.head_tensor = name});
    ASSERT_THAT(head, Succeeds());
    EXPECT_EQ(head->weights->info().tensor, name);
  }
}

TEST(HeadChoiceTest, ComparesValuesWhateverTheTypes) {
  const std::vector<float> values(48, 0.5F);
  const auto head =
      Open(kTied, {MakeTensor("lm_head.weight", Dtype::kF32, {6, 8}, values),
                   MakeTensor("model.embed_tokens.weight", Dtype::kBf16, {6, 8}, values)});

  ASSERT_THAT(head, Succeeds());
  EXPECT_TRUE(head->weights->info().tied);
}

TEST(HeadChoiceTest, ComparesOnlyValidRows) {
  std::vector<float> padded(64, 0.5F);
  padded.back() = 7.0F;
  const std::vector<FileTensor> tensors = {
      MakeTensor("lm_head.weight", Dtype::kF32, {6, 8}, std::vector<float>(48, 0.5F)),
      MakeTensor("model.embed_tokens.weight", Dtype::kF32, {8, 8}, padded)};

  EXPECT_THAT(Open(kTied, tensors), Succeeds());
  EXPECT_THAT(Open(kTied, tensors, {.include_padding = true}), Fails(kInvalid, "different values"));
}

TEST(HeadChoiceTest, AStoredHeadIsUsedUnlessTheFlagOrItsDefaultSaysTied) {
  for (const std::string& config : {kNoFlag, kUntied, Config("a_new_type")}) {
    SCOPED_TRACE(config);
    const auto head = Open(config, {Head(1), Embedding(2)});
    ASSERT_THAT(head, Succeeds());
    EXPECT_EQ(head->weights->info().tensor, "lm_head.weight");
    EXPECT_FALSE(head->weights->info().tied);
  }
  EXPECT_THAT(Open(Config("gemma2"), {Head(1), Embedding(2)}),
              Fails(kInvalid, "no tie_word_embeddings, which then is true for this model type"));
  EXPECT_THAT(Open(Config("a_new_type", R"("tie_word_embeddings":true)"), {Head(1), Embedding(2)}),
              Fails(kInvalid, "different values"));
}

TEST(HeadChoiceTest, ObeysTheFlagOfTheLevelThatTheClassReads) {
  const auto config = [](const std::string& type, const std::string& outer,
                         const std::string& inner) {
    return Config(type, R"("tie_word_embeddings":)" + outer +
                            R"(,"text_config":{"model_type":"x",)" + R"("tie_word_embeddings":)" +
                            inner + "}");
  };
  const std::vector<FileTensor> both = {Head(1), Embedding(2)};
  EXPECT_THAT(Open(config("qwen3_vl_moe", "false", "true"), both), Succeeds());
  EXPECT_THAT(Open(config("qwen3_vl_moe", "true", "false"), both), Fails(kInvalid, "is true"));
  // The class of blip-2 contains a causal model, which reads its own config.
  EXPECT_THAT(Open(config("blip-2", "true", "false"), both), Succeeds());
  EXPECT_THAT(Open(config("blip-2", "false", "true"), both),
              Fails(kInvalid, "text_config.tie_word_embeddings is true"));
  // The config of llava copies the flag of its text model.
  EXPECT_THAT(Open(config("llava", "false", "true"), both), Fails(kInvalid, "is true"));
  // Nobody knows what an unknown class reads.
  EXPECT_THAT(Open(config("a_new_type", "false", "true"), both), Fails(kInvalid, "contradict"));
}

TEST(HeadChoiceTest, AnEmbeddingAloneIsTheHeadOnlyOfATiedModel) {
  EXPECT_THAT(Open(kTied, {Embedding(1)}), Succeeds());
  EXPECT_THAT(Open(Config("gemma2"), {Embedding(1)}), Succeeds());
  EXPECT_THAT(Open(Config("t5", R"("tie_word_embeddings":false)"),
                   {MakeZeroTensor("shared.weight", "BF16", {6, 8})}),
              Succeeds());
  EXPECT_THAT(Open(kUntied, {Embedding(1)}),
              Fails(kInvalid,
                    "not tied to the embedding (tie_word_embeddings is false), but the "
                    "checkpoint has no head"));
  EXPECT_THAT(Open(kNoFlag, {Embedding(1)}), Fails(kInvalid, "then is false for this model type"));
  EXPECT_THAT(Open(Config("kimi_linear", R"("tie_word_embeddings":true)"), {Embedding(1)}),
              Fails(kInvalid, "never ties"));
  EXPECT_THAT(Open(Config("a_new_type"), {Embedding(1)}),
              Fails(kInvalid, "the model type is not known"));
  EXPECT_THAT(Open(kUntied, {Embedding(1)}, {.head_tensor = "model.embed_tokens.weight"}),
              Succeeds());
}

struct UnknownForm {
  std::string name;
  std::vector<std::string> tensors;
  std::string complaint;
};

class UnknownFormTest : public ::testing::TestWithParam<UnknownForm> {};

TEST_P(UnknownFormTest, IsRefusedAndNotReplacedByTheEmbedding) {
  std::vector<FileTensor> tensors = {Embedding(1)};
  for (const std::string& name : GetParam().tensors) {
    tensors.push_back(MakeZeroTensor(name, "BF16", {6, 8}));
  }

  for (const std::string& config : {kTied, kNoFlag}) {
    EXPECT_THAT(Open(config, tensors), Fails(kUnimplemented, GetParam().complaint));
    EXPECT_THAT(Open(config, tensors), Fails(kUnimplemented, GetParam().tensors.front()));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Forms, UnknownFormTest,
    ::testing::Values(
        UnknownForm{"Exl3", {"lm_head.trellis", "lm_head.suh", "lm_head.svh"}, "not understood"},
        UnknownForm{"TorchAo", {"lm_head._weight_qdata"}, "not understood"},
        UnknownForm{"Quanto", {"lm_head.weight._data", "lm_head.weight._scale"}, "not understood"},
        UnknownForm{"Hqq", {"lm_head.W_q"}, "not understood"},
        UnknownForm{"AFormOfTomorrow", {"decoder.text_head.blob"}, "not understood"},
        UnknownForm{"Unembedding", {"unembed.W_U"}, "not understood"},
        UnknownForm{"Peft",
                    {"lm_head.base_layer.weight", "lm_head.lora_A.default.weight"},
                    "merge_and_unload"},
        UnknownForm{"PeftSaved", {"lm_head.modules_to_save.default.weight"}, "merge_and_unload"},
        UnknownForm{
            "PeftWrapped", {"base_model.model.lm_head.base_layer.weight"}, "merge_and_unload"},
        UnknownForm{"PeftEmbedding", {"model.embed_tokens.lora_embedding_A"}, "merge_and_unload"},
        UnknownForm{"BesideTheHead", {"lm_head.lora_A.weight", "lm_head.weight"}, "merge"}),
    [](const auto& info) { return info.param.name; });

TEST(HeadChoiceTest, NamesThatAreNoHeadsDoNotMatter) {
  std::vector<FileTensor> tensors = {Embedding(1)};
  for (const std::string name :
       {"mtp.layers.0.shared_head.head.weight", "model.layers.61.shared_head.head.weight",
        "v_head.summary.weight", "talker.codec_head.weight",
        "vision_tower.vision_model.head.weight", "score.weight",
        "model.layers.0.router_logits.weight", "audio_tower.proj_out.weight"}) {
    tensors.push_back(MakeZeroTensor(name, "F32", {1}));
  }
  EXPECT_THAT(Open(kTied, tensors), Succeeds());

  EXPECT_THAT(Open(kUntied, {Head(1), MakeZeroTensor("lm_head.input_scale", "F32", {1})}),
              Succeeds());
}

TEST(HeadChoiceTest, SeveralHeadsAreRefused) {
  const auto tensor = [](const std::string& name, uint32_t seed) {
    return MakeRandomTensor(name, Dtype::kBf16, {6, 8}, 1.0F, seed);
  };
  EXPECT_THAT(Open(kUntied, {tensor("output.weight", 1), tensor("head.weight", 2)}),
              Fails(kInvalid, "several tensors may be the head (output.weight, head.weight)"));
  EXPECT_THAT(Open(kUntied, {Head(1), tensor("thinker.lm_head.weight", 2)}),
              Fails(kInvalid, "several tensors may be the head"));
  EXPECT_THAT(Open(kTied, {Embedding(1), tensor("transformer.wte.weight", 2)}),
              Fails(kInvalid, "several tensors may be the head"));
  EXPECT_THAT(Open(kUntied, {tensor("output.weight", 1), tensor("head.weight", 1)}), Succeeds());
  EXPECT_THAT(Open(kTied, {Embedding(1), tensor("transformer.wte.weight", 1)}), Succeeds());
}

// Regression: the names of adapters and quantised heads were looked for in the first 64 only.
TEST(HeadChoiceTest, FindsAnAdapterBehindManyOtherNames) {
  std::vector<FileTensor> tensors = {Head(1)};
  for (int i = 0; i < 100; ++i) {
    tensors.push_back(MakeZeroTensor("model.embed_tokens.a" + std::to_string(i), "F32", {1}));
  }
  tensors.push_back(MakeZeroTensor("lm_head.lora_A.weight", "F32", {1}));

  EXPECT_THAT(Open(kUntied, tensors), Fails(kUnimplemented, "merge_and_unload"));
}

// Regression: a part named "layers" hid the head in front of it, so the embedding was served.
TEST(HeadChoiceTest, FindsAHeadOfSeveralLayers) {
  EXPECT_THAT(
      Open(kTied, {Embedding(1), MakeZeroTensor("lm_head.layers.0.weight", "BF16", {6, 8})}),
      Fails(kUnimplemented, "lm_head.layers.0.weight"));
}

// Regression: the text type's default decided although the unknown whole says something else.
TEST(HeadChoiceTest, TheFlagOfAnUnknownModelHasPrecedenceOverTheDefaultOfItsTextModel) {
  const std::string config =
      R"({"model_type":"a_new_type","tie_word_embeddings":FLAG,
          "text_config":{"model_type":"llama","hidden_size":8,"vocab_size":6}})";
  const auto with_flag = [&config](const std::string& flag) {
    return std::string(config).replace(config.find("FLAG"), 4, flag);
  };

  EXPECT_THAT(Open(with_flag("true"), {Embedding(1)}), Succeeds());
  EXPECT_THAT(Open(with_flag("false"), {Embedding(1)}), Fails(kInvalid, "not tied"));
  EXPECT_THAT(Open(with_flag("null"), {Embedding(1)}), Fails(kInvalid, "which then is false"));
  EXPECT_THAT(Open(with_flag("true"), {Head(1), Embedding(2)}),
              Fails(kInvalid, "different values"));
}

// Regression: the type's default of the tie was believed although its type was to be ignored.
TEST(HeadChoiceTest, AnIgnoredTypeHasNoDefaultOfTheTie) {
  const ModelFolderOptions ignoring = {.logits = {.ignored_keys = {"model_type"}}};
  EXPECT_THAT(Open(Config("gemma2"), {Embedding(1)}), Succeeds());
  EXPECT_THAT(Open(Config("gemma2"), {Embedding(1)}, ignoring), Fails(kInvalid, "--head-tensor"));
  EXPECT_THAT(Open(Config("gemma2"), {Head(1), Embedding(2)}, ignoring), Succeeds());
}

// Regression: Mistral Small 3 states no flag, and its text model is not tied.
TEST(HeadChoiceTest, AStoredHeadOfAModelWithoutFlagIsUsedIfItsTextModelIsUntied) {
  const auto head = Open(
      R"({"model_type":"mistral3",
          "text_config":{"model_type":"mistral","hidden_size":8,"vocab_size":6}})",
      {Head(1), Embedding(2)});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "lm_head.weight");
}

// Regressions: these were said to have different values, and following the advice failed.
TEST(HeadChoiceTest, SaysWhyHeadAndEmbeddingCannotBeOneTensor) {
  const auto tensor = [](const std::string& name, const std::string& dtype, int64_t rows) {
    return MakeZeroTensor(name, dtype, {rows, 8});
  };
  const std::string embedding = "model.embed_tokens.weight";
  EXPECT_THAT(Open(kTied, {tensor("lm_head.weight", "BF16", 5), tensor(embedding, "BF16", 5)}),
              Fails(kInvalid, "([5, 8] BF16) cannot be the same tensor of 6 ids"));
  EXPECT_THAT(Open(kTied, {tensor("lm_head.weight", "F64", 6), tensor(embedding, "F64", 6)}),
              Fails(kInvalid, "([6, 8] F64) cannot be the same tensor of 6 ids in F32"));
  EXPECT_THAT(Open(kTied, {tensor("lm_head.weight", "F8_E4M3", 6), Embedding(1)},
                   {.head_tensor = embedding}),
              Succeeds());
}

// Regression: tensors of other sizes were not compared, so the first was served.
TEST(HeadChoiceTest, SeveralHeadsOfDifferentSizesAreRefused) {
  const auto tensor = [](const std::string& name, int64_t rows, int64_t columns) {
    return MakeZeroTensor(name, "BF16", {rows, columns});
  };
  EXPECT_THAT(Open(R"({"model_type":"llama","hidden_size":8})",
                   {tensor("lm_head.weight", 6, 8), tensor("output.weight", 7, 8)}),
              Fails(kInvalid, "several tensors may be the head"));
  EXPECT_THAT(Open(R"({"model_type":"llama","vocab_size":6})",
                   {tensor("lm_head.weight", 6, 8), tensor("output.weight", 6, 9)}),
              Fails(kInvalid, "several tensors may be the head"));
  EXPECT_THAT(Open(kUntied, {tensor("lm_head.weight", 6, 8), tensor("output.weight", 6, 9)}),
              Succeeds());
}

// Regression: only the first eight were known, so ignoring these served the others.
TEST(HeadChoiceTest, FindsAnyNumberOfTensorsThatMayShiftTheLogits) {
  std::vector<FileTensor> tensors = {Head(1)};
  std::vector<std::string> first;
  for (int i = 0; i < 9; ++i) {
    tensors.push_back(MakeZeroTensor("a" + std::to_string(i) + ".logit_scale", "F32", {1}));
    first.push_back(tensors.back().name);
  }
  first.pop_back();
  EXPECT_THAT(Open(kUntied, tensors, {.logits = {.ignored_keys = first}}),
              Fails(kUnimplemented, "a8.logit_scale"));
}

// Regression: the bias of a head with an unknown name was lost with the name.
TEST(HeadChoiceTest, RefusesAnEmbeddingBesideTheBiasOfAnUnknownHead) {
  const std::vector<FileTensor> tensors = {Embedding(1),
                                           MakeZeroTensor("proj_out.bias", "F32", {6})};
  ModelFolderOptions options = {.head_tensor = "model.embed_tokens.weight"};
  EXPECT_THAT(Open(kTied, tensors, options),
              Fails(kUnimplemented, "--ignore-config-key proj_out.bias"));
  options.logits.ignored_keys = {"proj_out.bias"};
  EXPECT_THAT(Open(kTied, tensors, options), Succeeds());
}

// Regression: T5 ties its head whatever the flag says, also inside of another model.
TEST(HeadChoiceTest, ATextModelThatIsAlwaysTiedIsTied) {
  const std::string config =
      R"({"model_type":"blip-2","text_config":{"model_type":"t5","d_model":8,"vocab_size":6}})";
  EXPECT_THAT(Open(config, {MakeZeroTensor("language_model.shared.weight", "F32", {6, 8})}),
              Succeeds());
}

TEST(HeadChoiceTest, RefusesTensorsThatMayShiftTheLogits) {
  for (const std::string name : {"lm_head_bias", "logit_scale", "model.logits_bias"}) {
    const std::vector<FileTensor> tensors = {Head(1), MakeZeroTensor(name, "F32", {1})};
    EXPECT_THAT(Open(kUntied, tensors), Fails(kUnimplemented, "--ignore-config-key " + name));
    EXPECT_THAT(Open(kUntied, tensors, {.logits = {.ignored_keys = {name}}}), Succeeds());
  }
  EXPECT_THAT(Open(kUntied, {Head(1), MakeZeroTensor("vision_model.logit_scale", "F32", {1})}),
              Succeeds());
}

TEST(HeadChoiceTest, TakesTheHeadOfTheModelType) {
  const auto head = Open(
      R"({"model_type":"t5gemma","decoder":{"hidden_size":8,"vocab_size":6,
          "final_logit_softcapping":5.0},"encoder":{"final_logit_softcapping":9.0}})",
      {MakeRandomTensor("lm_head.out_proj.weight", Dtype::kBf16, {6, 8}, 1.0F, 1),
       MakeRandomTensor("model.decoder.embed_tokens.weight", Dtype::kBf16, {6, 8}, 1.0F, 1)});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().softcap, 5.0F);
}

TEST(HeadChoiceTest, AModelTypeMayHaveNamesOfItsOwn) {
  const std::vector<FileTensor> tensors = {
      MakeRandomTensor("pred_layer.proj.weight", Dtype::kBf16, {6, 8}, 1.0F, 1),
      MakeRandomTensor("transformer.embeddings.weight", Dtype::kBf16, {6, 8}, 1.0F, 1), Head(3)};

  const auto tied = Open(Config("xlm"), tensors);
  const auto untied = Open(Config("xlm", R"("tie_word_embeddings":false)"), tensors);
  const auto alone = Open(Config("xlm"), {tensors[1]});

  ASSERT_THAT(tied, Succeeds());
  EXPECT_EQ(tied->weights->info().tensor, "transformer.embeddings.weight");
  ASSERT_THAT(untied, Succeeds());
  EXPECT_EQ(untied->weights->info().tensor, "pred_layer.proj.weight");
  ASSERT_THAT(alone, Succeeds());
  EXPECT_TRUE(alone->weights->info().tied);
}

// Regression: the width of the head was compared with that of the layers.
TEST(HeadChoiceTest, TheWidthOfAHeadMayDifferFromThatOfTheLayers) {
  const auto head = Open(R"({"model_type":"opt","hidden_size":16,"word_embed_proj_dim":8,
                             "vocab_size":6})",
                         {MakeZeroTensor("model.decoder.embed_tokens.weight", "F16", {6, 8})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().hidden_size, 8);
}

TEST(HeadChoiceTest, AnExplicitTensorTakesPrecedence) {
  const auto head = Open(kTied, {Head(1), Embedding(2), MakeZeroTensor("my.proj", "F16", {6, 8})},
                         {.head_tensor = "my.proj"});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "my.proj");
  EXPECT_EQ(head->weights->info().dtype, Dtype::kF16);
  EXPECT_FALSE(head->weights->info().tied);
}

TEST(HeadChoiceTest, AnExplicitEmbeddingIsATiedHeadWhateverItsName) {
  for (const std::string name : {"model.embed_tokens.weight", "transformer.wte.weight"}) {
    const auto head =
        Open(kUntied, {Head(1), MakeZeroTensor(name, "BF16", {6, 8})}, {.head_tensor = name});

    ASSERT_THAT(head, Succeeds());
    EXPECT_TRUE(head->weights->info().tied) << name;
  }
}

TEST(HeadChoiceTest, AnExplicitTensorMayBeACopyOfMultiTokenPrediction) {
  const auto head = Open(
      kUntied, {Head(1), MakeZeroTensor("model.layers.61.shared_head.head.weight", "BF16", {6, 8})},
      {.head_tensor = "model.layers.61.shared_head.head.weight"});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "model.layers.61.shared_head.head.weight");
}

TEST(HeadChoiceTest, AMissingExplicitTensorIsNotFound) {
  EXPECT_THAT(Open(kTied, {Head(1)}, {.head_tensor = "my\nproj"}),
              Fails(kInvalid, "has no tensor 'my\\nproj'"));
}

TEST(HeadChoiceTest, WithoutAKnownNameIsNotFoundAndListsSimilarNames) {
  const auto head =
      Open(kTied, {MakeZeroTensor("decoder.my_output.weight", "BF16", {6, 8}),
                   MakeZeroTensor("mtp.head.weight", "BF16", {6, 8}),
                   MakeZeroTensor("model.layers.0.self_attn.head.weight", "U8", {1})});

  EXPECT_THAT(head, Fails(kInvalid, "--head-tensor"));
  EXPECT_THAT(head, Fails(kInvalid, "look like one: 'decoder.my_output"));
  EXPECT_THAT(head.status().message(), ::testing::Not(HasSubstr("mtp")));
}

TEST(HeadChoiceTest, ListsUpToEightSimilarNames) {
  std::vector<FileTensor> tensors;
  for (int i = 1; i <= 9; ++i) {
    tensors.push_back(MakeZeroTensor("part" + std::to_string(i) + ".embed.weight", "F32", {1}));
  }

  const auto head = Open(kTied, tensors);

  EXPECT_THAT(head, Fails(kInvalid, "'part8.embed.weight'"));
  EXPECT_THAT(head.status().message(), ::testing::Not(HasSubstr("part9")));
}

TEST(HeadChoiceTest, NamesAreSimilarIfTheyAreThoseOfWeightsOutsideOfLayers) {
  const auto is_listed = [](const std::string& name) {
    const auto head = Open(kTied, {MakeZeroTensor(name, "F32", {1})});
    EXPECT_THAT(head, Fails(kInvalid, "no head under a known name")) << name;
    return std::string(head.status().message()).find("'" + name + "'") != std::string::npos;
  };
  for (const std::string name :
       {"a.subheader.weight", "a.embedded.weight", "a.wte.weight", "a.my_output.weight"}) {
    EXPECT_TRUE(is_listed(name)) << name;
  }
  for (const std::string name :
       {"a.wte.bias", "a.layers.0.wte.weight", "mtp.wte.weight", "a.norm.weight"}) {
    EXPECT_FALSE(is_listed(name)) << name;
  }
}

TEST(HeadChoiceTest, NeverTakesACopyOfMultiTokenPrediction) {
  EXPECT_THAT(
      Open(kUntied, {MakeZeroTensor("mtp.lm_head.weight", "BF16", {6, 8}),
                     MakeZeroTensor("model.layers.61.shared_head.head.weight", "BF16", {6, 8})}),
      Fails(kInvalid, "no head under a known name"));
}

struct QuantizedCase {
  std::string name;
  std::vector<FileTensor> tensors;
  std::string complaint;
};

class QuantizedHeadTest : public ::testing::TestWithParam<QuantizedCase> {};

TEST_P(QuantizedHeadTest, IsUnimplementedWithAMessageThatSaysWhatToDo) {
  const auto head = Open(kUntied, GetParam().tensors);

  EXPECT_THAT(head, Fails(kUnimplemented, "unsupported: quantised head"));
  EXPECT_THAT(head, Fails(kUnimplemented, GetParam().complaint));
  EXPECT_THAT(head, Fails(kUnimplemented, "serve the model's unquantised checkpoint"));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, QuantizedHeadTest,
    ::testing::Values(
        QuantizedCase{"Gptq",
                      {Embedding(1), MakeZeroTensor("lm_head.qweight", "I32", {2, 6}),
                       MakeZeroTensor("lm_head.scales", "F16", {1, 6})},
                      "'lm_head.qweight'"},
        QuantizedCase{"CompressedTensors",
                      {Embedding(1), MakeZeroTensor("lm_head.weight_packed", "I32", {6, 1})},
                      "'lm_head.weight_packed'"},
        QuantizedCase{"Fp8WithScale",
                      {MakeZeroTensor("lm_head.weight", "F8_E4M3", {6, 8}),
                       MakeZeroTensor("lm_head.weight_scale_inv", "F32", {1, 1})},
                      "'lm_head.weight_scale_inv'"},
        QuantizedCase{"Fp8Alone",
                      {MakeZeroTensor("lm_head.weight", "F8_E4M3", {6, 8})},
                      "'lm_head.weight' is F8_E4M3"},
        QuantizedCase{"Int8Alone", {MakeZeroTensor("lm_head.weight", "I8", {6, 8})}, "is I8"},
        QuantizedCase{"BitsAndBytes",
                      {MakeZeroTensor("lm_head.weight", "U8", {24, 1}),
                       MakeZeroTensor("lm_head.weight.absmax", "U8", {1})},
                      "'lm_head.weight.absmax'"},
        QuantizedCase{"QuantizedEmbedding",
                      {MakeZeroTensor("model.embed_tokens.qweight", "I32", {2, 6})},
                      "'model.embed_tokens.qweight'"},
        QuantizedCase{"MlxEmbedding",
                      {MakeZeroTensor("model.embed_tokens.weight", "U32", {6, 2}),
                       MakeZeroTensor("model.embed_tokens.scales", "BF16", {6, 1})},
                      "'model.embed_tokens.scales'"}),
    [](const auto& info) { return info.param.name; });

TEST(HeadChoiceTest, ADtypeThatIsNotServedSaysWhatToDo) {
  EXPECT_THAT(Open(kUntied, {MakeZeroTensor("lm_head.weight", "F64", {6, 8})}),
              Fails(kUnimplemented, "is F64; store it as F32, BF16 or F16"));
}

TEST(HeadChoiceTest, AQuantisedBodyDoesNotMatter) {
  EXPECT_THAT(
      Open(kUntied, {MakeZeroTensor("model.layers.0.mlp.up_proj.weight", "F8_E4M3", {2}),
                     MakeZeroTensor("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", {1, 1}),
                     MakeZeroTensor("model.layers.0.mlp.down_proj.qweight", "I32", {1}), Head(1)}),
      Succeeds());
}

TEST(HeadChoiceTest, TheRankMustBeTwo) {
  EXPECT_THAT(Open(kUntied, {MakeZeroTensor("lm_head.weight", "BF16", {48})}),
              Fails(kInvalid, "has the shape [48]"));
  EXPECT_THAT(Open(kUntied, {MakeZeroTensor("lm_head.weight", "BF16", {1, 6, 8})}),
              Fails(kInvalid, "has the shape [1, 6, 8]"));
  EXPECT_THAT(Open(kUntied, {MakeZeroTensor("lm_head.weight", "BF16", {})}),
              Fails(kInvalid, "has the shape []"));
}

TEST(HeadChoiceTest, AHeadMayHaveOneRowOrOneColumn) {
  EXPECT_THAT(Open(R"({"model_type":"llama","hidden_size":8,"vocab_size":1})",
                   {MakeZeroTensor("lm_head.weight", "BF16", {1, 8})}),
              Succeeds());
  EXPECT_THAT(Open(R"({"model_type":"llama","hidden_size":1,"vocab_size":6})",
                   {MakeZeroTensor("lm_head.weight", "BF16", {6, 1})}),
              Succeeds());
}

TEST(HeadChoiceTest, AnEmptyTensorIsRefused) {
  EXPECT_THAT(Open(kUntied, {MakeZeroTensor("lm_head.weight", "BF16", {0, 8})}),
              Fails(kInvalid, "[0, 8]"));
  EXPECT_THAT(Open(kUntied, {MakeZeroTensor("lm_head.weight", "BF16", {6, 0})}),
              Fails(kInvalid, "[6, 0]"));
}

TEST(HeadChoiceTest, AHiddenSizeThatDiffersFromTheConfigNamesBoth) {
  const auto head = Open(kUntied, {MakeZeroTensor("lm_head.weight", "BF16", {6, 9})});
  EXPECT_THAT(head, Fails(kInvalid, "rows of 9 values"));
  EXPECT_THAT(head, Fails(kInvalid, "hidden_size 8"));
}

TEST(HeadChoiceTest, ATransposedHeadIsRecognised) {
  EXPECT_THAT(Open(kUntied, {MakeZeroTensor("lm_head.weight", "BF16", {8, 6})}),
              Fails(kInvalid, "looks transposed"));
}

}  // namespace

namespace {

absl::StatusOr<ModelFolderHead> OpenWithFlag(const std::string& flag,
                                             const std::vector<FileTensor>& tensors) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"model_type":"phi","hidden_size":2,"vocab_size":3)" + flag + "}");
  folder.WriteTensors(tensors);
  return OpenModelFolder(folder.path(), {});
}

FileTensor SmallHead() { return MakeZeroTensor("lm_head.weight", "BF16", {3, 2}); }

class HeadBiasDtypesTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(HeadBiasDtypesTest, IsReadAsFloat) {
  const auto head = OpenWithFlag(
      "", {SmallHead(), MakeTensor("lm_head.bias", GetParam(), {3}, {-1.5F, 0.0F, 0.0078125F})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_TRUE(head->weights->info().has_bias);
  EXPECT_THAT(head->weights->bias(), ElementsAre(-1.5F, 0.0F, 0.0078125F));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, HeadBiasDtypesTest,
                         ::testing::Values(Dtype::kF32, Dtype::kBf16, Dtype::kF16));

TEST(HeadBiasTest, WidensSpecialHalfFloats) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float smallest = std::ldexp(1.0F, -24);

  const auto head = OpenWithFlag(
      "", {SmallHead(), MakeTensor("lm_head.bias", Dtype::kF16, {3}, {kInfinity, smallest, NAN})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->bias()[0], kInfinity);
  EXPECT_EQ(head->weights->bias()[1], smallest);
  EXPECT_TRUE(std::isnan(head->weights->bias()[2]));
}

TEST(HeadBiasTest, WidensNegativeHalfFloats) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float smallest = std::ldexp(-1.0F, -24);

  const auto head = OpenWithFlag("", {SmallHead(), MakeTensor("lm_head.bias", Dtype::kF16, {3},
                                                              {-kInfinity, smallest, -65'504})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->weights->bias(), ElementsAre(-kInfinity, smallest, -65'504));
}

TEST(HeadBiasTest, IsEmptyWhenThereIsNoTensor) {
  const auto head = OpenWithFlag("", {SmallHead()});

  ASSERT_THAT(head, Succeeds());
  EXPECT_FALSE(head->weights->info().has_bias);
  EXPECT_THAT(head->weights->bias(), IsEmpty());
}

TEST(HeadBiasTest, IsTheHeadsBiasForATiedEmbedding) {
  const auto head = OpenWithFlag(R"(,"tie_word_embeddings":true)",
                                 {MakeZeroTensor("model.embed_tokens.weight", "BF16", {3, 2}),
                                  MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, 2, 3})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->weights->bias(), ElementsAre(1, 2, 3));
}

TEST(HeadBiasTest, IsTheSiblingOfTheChosenHead) {
  const auto head = OpenWithFlag("", {MakeZeroTensor("embed_out.weight", "BF16", {3, 2}),
                                      MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, 2, 3}),
                                      MakeTensor("embed_out.bias", Dtype::kF32, {3}, {4, 5, 6})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->weights->bias(), ElementsAre(4, 5, 6));
}

// Regression: the bias of BART was ignored.
TEST(HeadBiasTest, IsTheBiasOfTheLogitsUnlessThatIsZero) {
  const auto with_bias = [](const std::vector<float>& values, const std::string& head_tensor) {
    const ModelFolder folder;
    folder.WriteConfig(R"({"model_type":"bart","d_model":2,"vocab_size":3})");
    folder.WriteTensors({MakeZeroTensor("model.shared.weight", "BF16", {3, 2}),
                         MakeTensor("final_logits_bias", Dtype::kF32, {1, 3}, values)});
    const auto head = OpenModelFolder(folder.path(), {.head_tensor = head_tensor});
    EXPECT_THAT(head, Succeeds());
    return head->weights->bias();
  };

  for (const std::string head_tensor : {"", "model.shared.weight"}) {
    EXPECT_THAT(with_bias({1, 2, 3}, head_tensor), ElementsAre(1, 2, 3));
    EXPECT_THAT(with_bias({0, 0, 0}, head_tensor), IsEmpty());
  }
}

// Regression: behind other parts it was ignored.
TEST(HeadBiasTest, TheBiasOfTheLogitsMayBePartOfAModelInside) {
  const auto head = OpenWithFlag("", {SmallHead(), MakeTensor("language_model.final_logits_bias",
                                                              Dtype::kF32, {1, 3}, {1, 2, 3})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->weights->bias(), ElementsAre(1, 2, 3));
}

// The index and the file both have the name.
TEST(HeadBiasTest, TheBiasOfTheLogitsMayLieInAFileOfAnIndex) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"model_type":"bart","d_model":2,"vocab_size":3})");
  folder.WriteShards({{MakeZeroTensor("model.shared.weight", "BF16", {3, 2}),
                       MakeTensor("final_logits_bias", Dtype::kF32, {1, 3}, {1, 2, 3})}});

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->weights->bias(), ElementsAre(1, 2, 3));
}

TEST(HeadBiasTest, SeveralBiasesAreRefused) {
  EXPECT_THAT(OpenWithFlag("", {SmallHead(), MakeZeroTensor("lm_head.bias", "F32", {3}),
                                MakeZeroTensor("final_logits_bias", "F32", {1, 3})}),
              Fails(kInvalid, "several biases of the head ('final_logits_bias', 'lm_head.bias')"));
  EXPECT_THAT(OpenWithFlag("", {SmallHead(), MakeZeroTensor("a.final_logits_bias", "F32", {1, 3}),
                                MakeZeroTensor("b.final_logits_bias", "F32", {1, 3})}),
              Fails(kInvalid, "several biases"));
}

TEST(HeadBiasTest, MustExistWhenTheConfigRequiresIt) {
  EXPECT_THAT(OpenWithFlag(R"(,"lm_head_bias":true)", {SmallHead()}),
              Fails(kInvalid, "has no bias"));
}

TEST(HeadBiasTest, IsIgnoredWithAWarningWhenTheConfigDeniesIt) {
  const auto head =
      OpenWithFlag(R"(,"lm_head_bias":false)",
                   {SmallHead(), MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, 2, 3})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_FALSE(head->weights->info().has_bias);
  EXPECT_THAT(head->warnings, ElementsAre(HasSubstr("'lm_head.bias' is ignored")));
}

TEST(HeadBiasTest, MustHaveOneElementPerRow) {
  EXPECT_THAT(OpenWithFlag("", {SmallHead(), MakeZeroTensor("lm_head.bias", "F32", {4})}),
              Fails(kInvalid, "has the shape [4]; the head needs [3]"));
  EXPECT_THAT(OpenWithFlag("", {SmallHead(), MakeZeroTensor("lm_head.bias", "F32", {1, 3})}),
              Fails(kInvalid, "has the shape [1, 3]"));
}

TEST(HeadBiasTest, WithAnUnsupportedTypeSaysWhatToDo) {
  EXPECT_THAT(OpenWithFlag("", {SmallHead(), MakeZeroTensor("lm_head.bias", "F64", {3})}),
              Fails(absl::StatusCode::kUnimplemented, "store the bias as F32"));
}

}  // namespace

}  // namespace logprobd
