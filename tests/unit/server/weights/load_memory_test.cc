// Tests the cost of loading: bytes read, memory and time must not depend on the size of the
// checkpoint.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/weights/head_weights.h"
#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using testing::ModelFolder;

constexpr int64_t kMebibyte = int64_t{1} << 20;

// Returns a number from /proc/self/<file>, in the unit of that file.
int64_t ProcessNumber(const std::string& file, const std::string& key) {
  std::ifstream lines("/proc/self/" + file);
  std::string word;
  while (lines >> word) {
    if (word == key) {
      int64_t value = 0;
      lines >> value;
      return value;
    }
  }
  return -1;
}

int64_t BytesReadSoFar() { return ProcessNumber("io", "rchar:"); }

int64_t PeakMemoryBytes() { return ProcessNumber("status", "VmHWM:") * 1024; }

// Writes a header and extends the file to the size of its tensors, without using disk blocks.
bool WriteSparse(const std::string& path, const std::string& json, int64_t data_bytes) {
  const std::string head = testing::SafetensorsBytesOf(json, "");
  std::ofstream file(path, std::ios::binary);
  file << head;
  file.close();
  return file.good() && truncate(path.c_str(), static_cast<off_t>(head.size()) + data_bytes) == 0;
}

TEST(LoadMemoryTest, AFileOfAHundredGigabytesOpensByReadingItsHeaderOnly) {
  constexpr int64_t kBodyBytes = 100'000'000'000;
  constexpr int64_t kRowBytes = 4096 * 2;
  const ModelFolder folder;
  folder.WriteConfig(R"({"hidden_size":4096,"vocab_size":1000})");
  const int64_t head_bytes = 1000 * kRowBytes;
  const std::string json = absl::StrCat(
      R"({"body":{"dtype":"U8","shape":[)", kBodyBytes, R"(],"data_offsets":[0,)", kBodyBytes,
      R"(]},"lm_head.weight":{"dtype":"BF16","shape":[1000,4096],"data_offsets":[)", kBodyBytes,
      ",", kBodyBytes + head_bytes, "]}}");
  if (!WriteSparse(folder.PathOf("model.safetensors"), json, kBodyBytes + head_bytes)) {
    GTEST_SKIP() << "the file system of the temporary folder has no sparse files";
  }
  const int64_t read_before = BytesReadSoFar();
  const int64_t memory_before = PeakMemoryBytes();

  const auto head = OpenModelFolder(folder.path(), {});
  ASSERT_THAT(head, Succeeds());
  std::vector<std::byte> rows(10 * kRowBytes);
  ASSERT_THAT(head->weights->ReadRows(990, 1000, rows.data(), kRowBytes), Succeeds());

  // Counts headers, the ten rows, and what this test itself reads from /proc.
  EXPECT_LT(BytesReadSoFar() - read_before, 10 * kRowBytes + 32 * 1024);
  EXPECT_LT(PeakMemoryBytes() - memory_before, 8 * kMebibyte);
}

TEST(LoadMemoryTest, AHeadHasAtMost16777216Rows) {
  for (const int64_t rows : {int64_t{1} << 24, (int64_t{1} << 24) + 1}) {
    const ModelFolder folder;
    folder.WriteConfig(R"({"hidden_size":1})");
    const std::string json = absl::StrCat(R"({"lm_head.weight":{"dtype":"BF16","shape":[)", rows,
                                          R"(,1],"data_offsets":[0,)", 2 * rows, "]}}");
    if (!WriteSparse(folder.PathOf("model.safetensors"), json, 2 * rows)) {
      GTEST_SKIP() << "the file system of the temporary folder has no sparse files";
    }

    const auto head = OpenModelFolder(folder.path(), {.valid_vocab = 1});

    if (rows == int64_t{1} << 24) {
      EXPECT_THAT(head, Succeeds());
    } else {
      EXPECT_THAT(head, Fails(absl::StatusCode::kInvalidArgument, "1 to 16777216 rows"));
    }
  }
}

// All valid rows are compared, a block at a time.
TEST(LoadMemoryTest, ATiedModelThatStoresHeadAndEmbeddingIsComparedWithLittleMemory) {
  constexpr int64_t kRows = int64_t{1} << 14;
  constexpr int64_t kTensorBytes = kRows * 4096 * 2;
  const ModelFolder folder;
  folder.WriteConfig(R"({"hidden_size":4096,"vocab_size":16384,"tie_word_embeddings":true})");
  const std::string json = absl::StrCat(
      R"({"lm_head.weight":{"dtype":"BF16","shape":[)", kRows, R"(,4096],"data_offsets":[0,)",
      kTensorBytes, R"(]},"model.embed_tokens.weight":{"dtype":"BF16","shape":[)", kRows,
      R"(,4096],"data_offsets":[)", kTensorBytes, ",", 2 * kTensorBytes, "]}}");
  if (!WriteSparse(folder.PathOf("model.safetensors"), json, 2 * kTensorBytes)) {
    GTEST_SKIP() << "the file system of the temporary folder has no sparse files";
  }
  const int64_t memory_before = PeakMemoryBytes();

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->info().tensor, "model.embed_tokens.weight");
  EXPECT_LT(PeakMemoryBytes() - memory_before, 24 * kMebibyte);
}

TEST(LoadMemoryTest, ALargeHeaderAndALargeIndexNeedLittleMemory) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"hidden_size":4,"vocab_size":5})");
  {
    // The header of 60 MB has twice as many tensors as the largest published models, and long
    // names.
    std::ofstream file(folder.PathOf("a.safetensors"), std::ios::binary);
    std::ofstream index(folder.PathOf("model.safetensors.index.json"));
    std::string json = "{";
    index << R"({"weight_map":{)";
    for (int i = 0; i < 400'000; ++i) {
      const std::string name =
          absl::StrCat("model.layers.1.a_rather_long_module_name_for_an_expert.", i, ".weight");
      absl::StrAppend(&json, "\"", name, R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)");
      index << '"' << name << R"(":"a.safetensors",)";
    }
    json += R"("lm_head.weight":{"dtype":"BF16","shape":[5,4],"data_offsets":[0,40]}})";
    index << R"("lm_head.weight":"a.safetensors"}})";
    file << testing::SafetensorsBytesOf(json, std::string(40, '\0'));
    ASSERT_GT(json.size(), 40'000'000U);
  }
  // The freed strings above still count towards the peak. On Linux, writing 5 resets the peak.
  std::ofstream("/proc/self/clear_refs") << "5";
  const int64_t resident = ProcessNumber("status", "VmRSS:") * 1024;

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_LT(PeakMemoryBytes() - resident, 64 * kMebibyte);
}

}  // namespace
}  // namespace logprobd
