#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/weights/head_weights.h"
#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MakeZeroTensor;
using testing::ModelFolder;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::StatusOr<ModelFolderHead> Open(int64_t rows, int64_t config_vocab,
                                     const ModelFolderOptions& options = {}) {
  const ModelFolder folder;
  folder.WriteConfig(
      absl::StrCat(R"({"model_type":"llama","hidden_size":1,"vocab_size":)", config_vocab, "}"));
  folder.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {rows, 1})});
  return OpenModelFolder(folder.path(), options);
}

TEST(HeadVocabTest, LeavesPaddedRowsOutAndWarns) {
  const auto head = Open(50'176, 49'159);

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().vocab_rows, 50'176);
  EXPECT_EQ(head->weights->info().vocab_size, 49'159);
  EXPECT_THAT(head->warnings, ElementsAre(HasSubstr("the last 1017 are not used")));
}

TEST(HeadVocabTest, IncludesPaddingWhenAsked) {
  const auto head = Open(50'176, 49'159, {.include_padding = true});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().vocab_size, 50'176);
  EXPECT_THAT(head->warnings, IsEmpty());
}

TEST(HeadVocabTest, TheUsersValidVocabularyTakesPrecedence) {
  const auto fewer = Open(100, 90, {.valid_vocab = 80});
  ASSERT_THAT(fewer, Succeeds());
  EXPECT_EQ(fewer->weights->info().vocab_size, 80);
  EXPECT_THAT(fewer->warnings, IsEmpty());

  for (const int64_t valid : {1, 100}) {
    const auto head = Open(100, 90, {.valid_vocab = valid});
    ASSERT_THAT(head, Succeeds());
    EXPECT_EQ(head->weights->info().vocab_size, valid);
  }
}

TEST(HeadVocabTest, AValidVocabularyOutsideTheRowsIsRefused) {
  for (const int64_t valid : {int64_t{-1}, int64_t{0}, int64_t{101}}) {
    EXPECT_THAT(Open(100, 90, {.valid_vocab = valid}),
                Fails(kInvalid, absl::StrCat("--valid-vocab ", valid, " must be from 1 to")));
  }
}

TEST(HeadVocabTest, ValidVocabularyAndPaddingContradictEachOther) {
  EXPECT_THAT(Open(100, 90, {.valid_vocab = 80, .include_padding = true}),
              Fails(kInvalid, "contradict"));
}

TEST(HeadVocabTest, FewerRowsThanTheConfigsVocabularyIsAnErrorThatNamesBoth) {
  EXPECT_THAT(Open(89, 90), Fails(kInvalid, "89 rows, fewer than config.json's vocab_size 90"));
}

TEST(HeadVocabTest, AVocabularyBeyondTheKernelsLimitIsRefused) {
  EXPECT_THAT(Open((1 << 20) + 1, (1 << 20) + 1),
              Fails(kInvalid, "1048577 ids, the limit is 1048576"));
  EXPECT_THAT(Open(1 << 20, 1 << 20), Succeeds());
  EXPECT_THAT(Open((1 << 20) + 1, (1 << 20) + 1, {.valid_vocab = 1 << 20}), Succeeds());
}

TEST(HeadVocabTest, TheTensorDecidesWhenTheConfigHasNoVocabulary) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"model_type":"llama"})");
  folder.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {6, 8})});

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().vocab_size, 6);
  EXPECT_EQ(head->weights->info().hidden_size, 8);
  EXPECT_THAT(head->warnings, ElementsAre(HasSubstr("no hidden_size"), HasSubstr("no vocab_size")));
}

}  // namespace
}  // namespace logprobd
