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

const std::string kTied = R"({"hidden_size":8,"vocab_size":6,"tie_word_embeddings":true})";
const std::string kUntied = R"({"hidden_size":8,"vocab_size":6,"tie_word_embeddings":false})";
const std::string kNoFlag = R"({"hidden_size":8,"vocab_size":6})";

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

TEST(HeadChoiceTest, UsesTheEmbeddingOfATiedModelAndWarnsWhenASingleBitDiffers) {
  FileTensor changed = Embedding(1);
  changed.bytes.back() = static_cast<char>(changed.bytes.back() ^ 1);

  const auto head = Open(kTied, {Head(1), changed});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "model.embed_tokens.weight");
  EXPECT_THAT(head->warnings, ElementsAre(HasSubstr("--head-tensor lm_head.weight")));
}

TEST(HeadChoiceTest, WarnsWhenTiedTensorsHaveDifferentShapes) {
  const auto head =
      Open(kTied, {Head(1), MakeZeroTensor("model.embed_tokens.weight", "F32", {6, 8})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "model.embed_tokens.weight");
  EXPECT_EQ(head->warnings.size(), 1U);
}

TEST(HeadChoiceTest, AStoredHeadTakesPrecedenceOverAMissingFlag) {
  const auto head = Open(kNoFlag, {Head(1), Embedding(2)});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "lm_head.weight");
  EXPECT_FALSE(head->weights->info().tied);
}

TEST(HeadChoiceTest, FallsBackToTheEmbeddingAndWarnsWhenAnUntiedModelHasNoHead) {
  const auto head = Open(kUntied, {Embedding(1)});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "model.embed_tokens.weight");
  EXPECT_THAT(head->warnings, ElementsAre(HasSubstr("not tied")));
}

TEST(HeadChoiceTest, AnExplicitTensorTakesPrecedence) {
  const auto head = Open(kTied, {Head(1), Embedding(2), MakeZeroTensor("my.proj", "F16", {6, 8})},
                         {.head_tensor = "my.proj"});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "my.proj");
  EXPECT_EQ(head->weights->info().dtype, Dtype::kF16);
  EXPECT_FALSE(head->weights->info().tied);
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
              Fails(absl::StatusCode::kNotFound, "has no tensor 'my\\nproj'"));
}

TEST(HeadChoiceTest, WithoutAKnownNameIsNotFoundAndListsSimilarNames) {
  const auto head =
      Open(kTied, {MakeZeroTensor("decoder.output_proj.weight", "BF16", {6, 8}),
                   MakeZeroTensor("mtp.head.weight", "BF16", {6, 8}),
                   MakeZeroTensor("model.layers.0.self_attn.head.weight", "U8", {1})});

  EXPECT_THAT(head, Fails(absl::StatusCode::kNotFound, "--head-tensor"));
  EXPECT_THAT(head, Fails(absl::StatusCode::kNotFound, "look like one: 'decoder.output_proj"));
  EXPECT_THAT(head.status().message(), ::testing::Not(HasSubstr("mtp")));
}

TEST(HeadChoiceTest, NeverTakesACopyOfMultiTokenPrediction) {
  EXPECT_THAT(
      Open(kUntied, {MakeZeroTensor("mtp.lm_head.weight", "BF16", {6, 8}),
                     MakeZeroTensor("model.layers.61.shared_head.head.weight", "BF16", {6, 8})}),
      Fails(absl::StatusCode::kNotFound, "no head under a known name"));
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
  folder.WriteConfig(R"({"hidden_size":2,"vocab_size":3)" + flag + "}");
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

TEST(HeadBiasTest, IsEmptyWhenThereIsNoTensor) {
  const auto head = OpenWithFlag("", {SmallHead()});

  ASSERT_THAT(head, Succeeds());
  EXPECT_FALSE(head->weights->info().has_bias);
  EXPECT_THAT(head->weights->bias(), IsEmpty());
}

TEST(HeadBiasTest, IsTheHeadsBiasForATiedEmbedding) {
  const auto head = OpenWithFlag("", {MakeZeroTensor("model.embed_tokens.weight", "BF16", {3, 2}),
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
