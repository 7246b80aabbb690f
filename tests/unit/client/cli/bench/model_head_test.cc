#include "client/cli/bench/model_head.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cli/bench/model_case.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ModelHeadTest : public ::testing::Test {
 protected:
  std::string Message(const Head& head) {
    return std::string(OpenModelHead(folder_.path(""), head).status().message());
  }

  const NamedTensor weight_ = CaseWeight(RandomValues(128 * 8, 1));
  const NamedTensor bias_ = {.name = "lm_head.bias",
                             .dtype = "F32",
                             .shape = {128},
                             .bytes = ElementsOf(RandomValues(128, 2), Dtype::kF32)};
  TempFolder folder_;
};

TEST_F(ModelHeadTest, FindsTheWeightInASingleFile) {
  folder_.Write("model.safetensors", SafetensorsOf({weight_}));

  const auto model = OpenModelHead(folder_.path(""), CaseHead());

  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(model->weight.shape, ElementsAre(128, 8));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(model->weight.data.data()), 2'048),
            weight_.bytes);
  EXPECT_TRUE(model->bias.empty());
}

TEST_F(ModelHeadTest, FollowsAnIndex) {
  folder_.Write("one.safetensors", SafetensorsOf({bias_}));
  folder_.Write("two.safetensors", SafetensorsOf({weight_}));
  folder_.Write(
      "model.safetensors.index.json",
      R"({"weight_map":{"lm_head.weight":"two.safetensors","lm_head.bias":"one.safetensors"}})");
  Head head = CaseHead();
  head.has_bias = true;

  const auto model = OpenModelHead(folder_.path(""), head);

  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->bias.size(), 128U);
  EXPECT_EQ(model->bias[5], static_cast<double>(RandomValues(128, 2)[5]));
}

TEST_F(ModelHeadTest, FindsTheBiasOfATiedHead) {
  NamedTensor embedding = weight_;
  embedding.name = "model.embed_tokens.weight";
  folder_.Write("model.safetensors", SafetensorsOf({embedding, bias_}));
  Head head = CaseHead();
  head.tensor = embedding.name;
  head.has_bias = true;

  const auto model = OpenModelHead(folder_.path(""), head);

  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->bias.size(), 128U);
}

TEST_F(ModelHeadTest, SaysThatTheFolderIsOfAnotherModel) {
  folder_.Write("model.safetensors", SafetensorsOf({bias_}));

  EXPECT_THAT(Message(CaseHead()),
              AllOf(HasSubstr("has no tensor lm_head.weight"),
                    HasSubstr("--verify wants the folder that the server was given")));
}

TEST_F(ModelHeadTest, SaysThatTheShapesDiffer) {
  folder_.Write("model.safetensors", SafetensorsOf({weight_}));
  Head head = CaseHead();
  head.vocab_rows = 160;

  EXPECT_THAT(Message(head), HasSubstr("is bf16 [128, 8], the served head bf16 [160, 8]"));
}

TEST_F(ModelHeadTest, SaysThatTheTypesDiffer) {
  folder_.Write("model.safetensors", SafetensorsOf({weight_}));
  Head head = CaseHead();
  head.dtype = Dtype::kF16;

  EXPECT_THAT(Message(head), HasSubstr("is bf16 [128, 8], the served head f16 [128, 8]"));
}

TEST_F(ModelHeadTest, SaysThatTheBiasIsMissingOrDoesNotFit) {
  folder_.Write("model.safetensors", SafetensorsOf({weight_}));
  Head head = CaseHead();
  head.has_bias = true;
  EXPECT_THAT(Message(head), HasSubstr("has no lm_head.bias"));

  NamedTensor small = bias_;
  small.shape = {4};
  small.bytes.resize(16);
  folder_.Write("model.safetensors", SafetensorsOf({weight_, small}));
  EXPECT_THAT(Message(head), HasSubstr("is f32 [4], the head needs [128]"));
}

TEST_F(ModelHeadTest, SaysWhatIsWrongWithTheFolder) {
  EXPECT_THAT(std::string(OpenModelHead("/no/such", CaseHead()).status().message()),
              HasSubstr("cannot read /no/such"));
  EXPECT_THAT(Message(CaseHead()), HasSubstr("holds no .safetensors file"));
}

TEST_F(ModelHeadTest, RefusesAnIndexThatLeavesTheFolder) {
  for (const char* index : {R"({"weight_map":{"lm_head.weight":"../x.safetensors"}})",
                            R"({"weight_map":{"lm_head.weight":7}})"}) {
    folder_.Write("model.safetensors.index.json", index);
    EXPECT_THAT(Message(CaseHead()), HasSubstr("something else than a file beside it")) << index;
  }
  folder_.Write("model.safetensors.index.json", "[]");
  EXPECT_THAT(Message(CaseHead()), HasSubstr("it has no weight_map"));
  folder_.Write("model.safetensors.index.json", R"({"weight_map":{}})");
  EXPECT_THAT(Message(CaseHead()), HasSubstr("has no tensor lm_head.weight"));
}

}  // namespace
}  // namespace logprobd::client
