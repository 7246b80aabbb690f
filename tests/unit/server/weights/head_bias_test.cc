#include "server/weights/head_bias.h"

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
using testing::MakeTensor;
using testing::MakeZeroTensor;
using testing::ModelFolder;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::StatusOr<ModelFolderHead> Open(const std::string& flag,
                                     const std::vector<FileTensor>& tensors) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"hidden_size":2,"vocab_size":3)" + flag + "}");
  folder.WriteTensors(tensors);
  return OpenModelFolder(folder.path(), {});
}

FileTensor Head() { return MakeZeroTensor("lm_head.weight", "BF16", {3, 2}); }

class HeadBiasDtypesTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(HeadBiasDtypesTest, IsReadAsFloat) {
  const auto head =
      Open("", {Head(), MakeTensor("lm_head.bias", GetParam(), {3}, {-1.5F, 0.0F, 0.0078125F})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_TRUE(head->weights->info().has_bias);
  EXPECT_THAT(head->weights->bias(), ElementsAre(-1.5F, 0.0F, 0.0078125F));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, HeadBiasDtypesTest,
                         ::testing::Values(Dtype::kF32, Dtype::kBf16, Dtype::kF16));

TEST(HeadBiasTest, WidensSpecialHalfFloats) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float smallest = std::ldexp(1.0F, -24);

  const auto head =
      Open("", {Head(), MakeTensor("lm_head.bias", Dtype::kF16, {3}, {kInfinity, smallest, NAN})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->bias()[0], kInfinity);
  EXPECT_EQ(head->weights->bias()[1], smallest);
  EXPECT_TRUE(std::isnan(head->weights->bias()[2]));
}

TEST(HeadBiasTest, IsEmptyWithoutOne) {
  const auto head = Open("", {Head()});

  ASSERT_THAT(head, Succeeds());
  EXPECT_FALSE(head->weights->info().has_bias);
  EXPECT_THAT(head->weights->bias(), IsEmpty());
}

TEST(HeadBiasTest, OfTheHeadBelongsToATiedEmbeddingToo) {
  const auto head = Open("", {MakeZeroTensor("model.embed_tokens.weight", "BF16", {3, 2}),
                              MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, 2, 3})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->weights->bias(), ElementsAre(1, 2, 3));
}

TEST(HeadBiasTest, IsTheSiblingOfTheHeadThatIsUsed) {
  const auto head = Open("", {MakeZeroTensor("embed_out.weight", "BF16", {3, 2}),
                              MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, 2, 3}),
                              MakeTensor("embed_out.bias", Dtype::kF32, {3}, {4, 5, 6})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->weights->bias(), ElementsAre(4, 5, 6));
}

TEST(HeadBiasTest, ThatTheConfigAsksForMustBeThere) {
  EXPECT_THAT(Open(R"(,"lm_head_bias":true)", {Head()}), Fails(kInvalid, "has no bias"));
}

TEST(HeadBiasTest, ThatTheConfigDeniesIsIgnoredWithAWarning) {
  const auto head = Open(R"(,"lm_head_bias":false)",
                         {Head(), MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, 2, 3})});

  ASSERT_THAT(head, Succeeds());
  EXPECT_FALSE(head->weights->info().has_bias);
  EXPECT_THAT(head->warnings, ElementsAre(HasSubstr("'lm_head.bias' is ignored")));
}

TEST(HeadBiasTest, MustHaveTheShapeOfTheRows) {
  EXPECT_THAT(Open("", {Head(), MakeZeroTensor("lm_head.bias", "F32", {4})}),
              Fails(kInvalid, "has the shape [4], the head needs [3]"));
  EXPECT_THAT(Open("", {Head(), MakeZeroTensor("lm_head.bias", "F32", {1, 3})}),
              Fails(kInvalid, "has the shape [1, 3]"));
}

TEST(HeadBiasTest, OfAnotherTypeSaysWhatToDo) {
  EXPECT_THAT(Open("", {Head(), MakeZeroTensor("lm_head.bias", "F64", {3})}),
              Fails(absl::StatusCode::kUnimplemented, "store the bias as F32"));
}

}  // namespace
}  // namespace logprobd
