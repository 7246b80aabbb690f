// Tests published model families: their configs and tensor names must resolve to the right head.
// Hidden sizes and factors are the real ones; vocabularies are cut to 16 rows.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/weights/head_export.h"
#include "server/weights/head_weights.h"
#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/model_families.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using testing::FileTensor;
using testing::MakeRandomTensor;
using testing::MakeZeroTensor;
using testing::ModelFolder;

std::string WithSizes(std::string config, int64_t hidden) {
  for (const auto& [mark, value] :
       {std::pair<std::string, int64_t>{"$H", hidden}, {"$V", kFamilyRows}}) {
    for (size_t at = config.find(mark); at != std::string::npos; at = config.find(mark)) {
      config.replace(at, mark.size(), absl::StrCat(value));
    }
  }
  return config;
}

void WriteFamily(const ModelFolder& folder, const Family& family) {
  folder.WriteConfig(WithSizes(family.config, family.hidden));
  std::vector<FileTensor> tensors;
  uint32_t seed = 1;
  for (const std::string& name : family.tensors) {
    const bool is_bias = name.find("bias") != std::string::npos;
    // The tensors of a tied model are copies of each other, and those of another model differ.
    tensors.push_back(is_bias ? MakeZeroTensor(name, "BF16", {kFamilyRows})
                              : MakeRandomTensor(name, Dtype::kBf16, {kFamilyRows, family.hidden},
                                                 1.0F, family.tied ? 0 : seed++));
  }
  folder.WriteTensors(tensors);
}

class HeadFamiliesTest : public ::testing::TestWithParam<Family> {};

TEST_P(HeadFamiliesTest, ResolvesToItsHead) {
  const Family& family = GetParam();
  const ModelFolder folder;
  WriteFamily(folder, family);

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  const HeadInfo& info = head->weights->info();
  EXPECT_EQ(info.tensor, family.head);
  EXPECT_EQ(info.hidden_size, family.hidden);
  EXPECT_EQ(info.vocab_size, kFamilyRows);
  EXPECT_EQ(info.vocab_rows, kFamilyRows);
  EXPECT_EQ(info.dtype, Dtype::kBf16);
  EXPECT_EQ(info.tied, family.tied);
  EXPECT_FLOAT_EQ(info.scale, static_cast<float>(family.scale));
  EXPECT_EQ(info.softcap, static_cast<float>(family.softcap));
  EXPECT_EQ(info.has_bias, family.has_bias);
  EXPECT_EQ(info.weight_bytes, kFamilyRows * family.hidden * 2);
  EXPECT_EQ(static_cast<int>(head->warnings.size()), family.num_warnings)
      << ::testing::PrintToString(head->warnings);
}

TEST_P(HeadFamiliesTest, KeepsItsHeadInAnExport) {
  const Family& family = GetParam();
  const ModelFolder folder;
  WriteFamily(folder, family);
  const ModelFolder parent;

  const auto exported = ExportHead({.model = folder.path(), .out = parent.PathOf("head")},
                                   [](absl::string_view, int64_t, int64_t) {});

  ASSERT_THAT(exported, Succeeds());
  const auto head = OpenModelFolder(parent.PathOf("head"), {});
  ASSERT_THAT(head, Succeeds());
  const HeadInfo& info = head->weights->info();
  EXPECT_EQ(info.tensor, family.tied ? kHead : family.head);
  EXPECT_EQ(info.hidden_size, family.hidden);
  EXPECT_EQ(info.vocab_size, kFamilyRows);
  EXPECT_FALSE(info.tied);
  EXPECT_FLOAT_EQ(info.scale, static_cast<float>(family.scale));
  EXPECT_EQ(info.softcap, static_cast<float>(family.softcap));
  EXPECT_EQ(info.has_bias, family.has_bias);
}

const auto kFamilyName = [](const ::testing::TestParamInfo<Family>& info) {
  return info.param.name;
};

INSTANTIATE_TEST_SUITE_P(QwenAndLlama, HeadFamiliesTest, ::testing::ValuesIn(QwenAndLlama()),
                         kFamilyName);
INSTANTIATE_TEST_SUITE_P(GemmaAndPhi, HeadFamiliesTest, ::testing::ValuesIn(GemmaAndPhi()),
                         kFamilyName);
INSTANTIATE_TEST_SUITE_P(DeepSeekAndOthers, HeadFamiliesTest,
                         ::testing::ValuesIn(DeepSeekAndOthers()), kFamilyName);
INSTANTIATE_TEST_SUITE_P(Scaled, HeadFamiliesTest, ::testing::ValuesIn(Scaled()), kFamilyName);

}  // namespace
}  // namespace logprobd
