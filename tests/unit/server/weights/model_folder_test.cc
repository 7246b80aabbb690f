#include "tests/support/model_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/weights/head_weights.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

namespace fs = std::filesystem;

using testing::ElementAt;
using testing::FileTensor;
using ::testing::IsEmpty;
using testing::MakeRandomTensor;
using testing::MakeTensor;
using testing::MakeZeroTensor;
using testing::ModelFolder;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

const std::string kConfig = R"({"model_type":"demo","hidden_size":4,"vocab_size":5})";

std::vector<std::byte> ReadAll(const HeadWeights& weights, int64_t begin, int64_t end,
                               int64_t pitch) {
  std::vector<std::byte> out(static_cast<size_t>((end - begin) * pitch), std::byte{0xEE});
  EXPECT_THAT(weights.ReadRows(begin, end, out.data(), pitch), Succeeds());
  return out;
}

class ReadRowsTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(ReadRowsTest, GivesTheRowsAsStoredAtAnyPitch) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  std::vector<float> values(20);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i) - 7.5F;
  }
  // Puts a tensor of odd size in front, so that rows begin at an unaligned byte.
  folder.WriteTensors({MakeZeroTensor("odd", "U8", {3}),
                       MakeTensor("lm_head.weight", GetParam(), {5, 4}, values),
                       MakeZeroTensor("more", "U8", {5})});
  const auto head = OpenModelFolder(folder.path(), {});
  ASSERT_THAT(head, Succeeds());
  const int64_t element_bytes = DtypeBytes(GetParam());
  const int64_t row_bytes = 4 * element_bytes;

  for (const int64_t pitch : {row_bytes, row_bytes + 10}) {
    const std::vector<std::byte> rows = ReadAll(*head->weights, 1, 4, pitch);
    for (int64_t row = 0; row < 3; ++row) {
      const std::byte* start = rows.data() + row * pitch;
      for (int64_t column = 0; column < 4; ++column) {
        EXPECT_EQ(ElementAt(start + column * element_bytes, GetParam()),
                  values[static_cast<size_t>((row + 1) * 4 + column)]);
      }
      EXPECT_TRUE(std::all_of(start + row_bytes, start + pitch,
                              [](std::byte byte) { return byte == std::byte{0xEE}; }));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ReadRowsTest,
                         ::testing::Values(Dtype::kF32, Dtype::kBf16, Dtype::kF16));

TEST(ModelFolderTest, DescribesTheHead) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteTensors({MakeZeroTensor("lm_head.weight", "F32", {6, 4})});

  const auto head = OpenModelFolder(folder.path(), {.head_name = "ref", .weights_version = 7});

  ASSERT_THAT(head, Succeeds());
  const HeadInfo& info = head->weights->info();
  EXPECT_EQ(info.name, "ref");
  EXPECT_EQ(info.model_type, "demo");
  EXPECT_EQ(info.weights_version, 7U);
  EXPECT_EQ(info.weight_bytes, 96);
  EXPECT_EQ(DescribeHead(info),
            "demo: hidden 4, vocab 5 of 6 rows, lm_head.weight, f32, scale 1, no cap, no bias, "
            "0.0 MiB");
}

TEST(ModelFolderTest, DescribesTransformsInOneLine) {
  HeadInfo info;
  info.model_type = "gemma2";
  info.tensor = "model.embed_tokens.weight";
  info.hidden_size = 2304;
  info.vocab_size = 256'000;
  info.vocab_rows = 256'000;
  info.tied = true;
  info.has_bias = true;
  info.scale = 0.0625F;
  info.softcap = 30.0F;
  info.weight_bytes = int64_t{256'000} * 2304 * 2;

  EXPECT_EQ(DescribeHead(info),
            "gemma2: hidden 2304, vocab 256000 of 256000 rows, model.embed_tokens.weight (tied), "
            "bf16, scale 0.0625, cap 30, bias, 1125.0 MiB");
}

TEST(ModelFolderTest, ReadsIndexedShardsAndOpensOnlyTheOneThatIsNeeded) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteShards({{MakeZeroTensor("model.layers.0.weight", "BF16", {9})},
                      {MakeRandomTensor("lm_head.weight", Dtype::kBf16, {5, 4}, 1.0F, 3)}});
  fs::remove(folder.PathOf("model-00001-of-00002.safetensors"));

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  const std::vector<std::byte> rows = ReadAll(*head->weights, 0, 5, 8);
  const FileTensor expected = MakeRandomTensor("x", Dtype::kBf16, {5, 4}, 1.0F, 3);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(rows.data()), rows.size()), expected.bytes);
}

TEST(ModelFolderTest, DescribesACapBelowOne) {
  HeadInfo info;
  info.softcap = 0.5F;

  EXPECT_THAT(DescribeHead(info), ::testing::HasSubstr("cap 0.5"));
}

TEST(ModelFolderTest, AnIndexedModelHasNoWarningOfItsOwn) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"model_type":"llama","hidden_size":4,"vocab_size":5})");
  folder.WriteShards({{MakeZeroTensor("lm_head.weight", "BF16", {5, 4})}});

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->warnings, IsEmpty());
}

TEST(ModelFolderTest, ReadsHeadAndBiasFromDifferentShards) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteShards({{MakeTensor("lm_head.bias", Dtype::kF32, {5}, {1, 2, 3, 4, 5})},
                      {MakeZeroTensor("lm_head.weight", "BF16", {5, 4})}});

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_EQ(head->weights->bias().size(), 5U);
}

TEST(ModelFolderTest, FollowsTheLinksOfADownloadCache) {
  const ModelFolder cache;
  cache.WriteFile("blobs/aaa", kConfig);
  cache.WriteFile("blobs/bbb",
                  testing::SafetensorsBytes({MakeZeroTensor("lm_head.weight", "BF16", {5, 4})}));
  cache.WriteFile("snapshots/1/README.md", "");
  fs::create_symlink("../../blobs/aaa", cache.PathOf("snapshots/1/config.json"));
  fs::create_symlink("../../blobs/bbb", cache.PathOf("snapshots/1/model.safetensors"));

  EXPECT_THAT(OpenModelFolder(cache.PathOf("snapshots/1"), {}), Succeeds());
}

TEST(ModelFolderTest, FollowsLinkedShards) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("blob",
                   testing::SafetensorsBytes({MakeZeroTensor("lm_head.weight", "BF16", {5, 4})}));
  fs::create_symlink("blob", folder.PathOf("model-00001-of-00001.safetensors"));
  folder.WriteIndex({{"lm_head.weight", "model-00001-of-00001.safetensors"}});

  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Succeeds());
}

TEST(ModelFolderTest, SeveralThreadsReadAtTheSameTime) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"hidden_size":64,"vocab_size":1000})");
  const FileTensor tensor = MakeRandomTensor("lm_head.weight", Dtype::kBf16, {1000, 64}, 1.0F, 5);
  folder.WriteTensors({tensor});
  const auto head = OpenModelFolder(folder.path(), {});
  ASSERT_THAT(head, Succeeds());

  std::vector<std::string> results(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&head, &results, i] {
      results[i].resize(250 * 128);
      const auto begin = static_cast<int64_t>(i) * 250;
      const absl::Status status = head->weights->ReadRows(
          begin, begin + 250, reinterpret_cast<std::byte*>(results[i].data()), 128);
      EXPECT_THAT(status, Succeeds());
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }

  EXPECT_EQ(results[0] + results[1] + results[2] + results[3], tensor.bytes);
}

class ReadRowsErrorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_.WriteConfig(kConfig);
    folder_.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {5, 4})});
    auto head = OpenModelFolder(folder_.path(), {});
    ASSERT_THAT(head, Succeeds());
    weights_ = std::move(head->weights);
  }

  absl::Status Read(int64_t begin, int64_t end) {
    std::vector<std::byte> out(64);
    return weights_->ReadRows(begin, end, out.data(), 8);
  }

  ModelFolder folder_;
  std::unique_ptr<HeadWeights> weights_;
};

TEST_F(ReadRowsErrorsTest, RowsOutsideTheTensorAreOutOfRange) {
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{-1, 1}, {3, 2}, {0, 6}, {6, 6}}) {
    EXPECT_THAT(Read(begin, end), Fails(absl::StatusCode::kOutOfRange, "which has 5"));
  }
  EXPECT_THAT(Read(5, 5), Succeeds());
}

TEST_F(ReadRowsErrorsTest, AFileThatShrankIsDataLoss) {
  fs::resize_file(folder_.PathOf("model.safetensors"), 20);

  EXPECT_THAT(Read(0, 5), Fails(absl::StatusCode::kDataLoss, "shrunk"));
}

TEST_F(ReadRowsErrorsTest, AFileThatGrewIsDataLoss) {
  const std::string path = folder_.PathOf("model.safetensors");
  fs::resize_file(path, fs::file_size(path) + 1);

  EXPECT_THAT(Read(0, 5), Fails(absl::StatusCode::kDataLoss, "changed while it was read"));
}

TEST_F(ReadRowsErrorsTest, AFileWithANewModificationTimeIsDataLoss) {
  const std::string path = folder_.PathOf("model.safetensors");
  fs::last_write_time(path, fs::last_write_time(path) - std::chrono::hours(1));

  EXPECT_THAT(Read(0, 5), Fails(absl::StatusCode::kDataLoss, "rename it into place"));
}

// Regression: the sha256 was checked on a first read and the weights were taken from a second one;
// a row that was overwritten in between, with the file's time put back, was live under that sha256.
TEST_F(ReadRowsErrorsTest, ARowThatIsOverwrittenBetweenTwoReadsIsDataLossWhateverTheTime) {
  ASSERT_THAT(Read(0, 5), Succeeds());
  const std::string path = folder_.PathOf("model.safetensors");
  const auto time = fs::last_write_time(path);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('x');
  }
  fs::last_write_time(path, time);

  EXPECT_THAT(Read(0, 4), Succeeds());
  EXPECT_THAT(Read(0, 5), Fails(absl::StatusCode::kDataLoss, "row 4 of lm_head.weight changed"));
}

TEST_F(ReadRowsErrorsTest, AFileThatIsReplacedByRenameStaysReadable) {
  folder_.WriteFile("next", "other");
  fs::rename(folder_.PathOf("next"), folder_.PathOf("model.safetensors"));

  EXPECT_THAT(Read(0, 5), Succeeds());
}

TEST(ModelFolderTest, AMissingShardIsNotFound) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteIndex({{"lm_head.weight", "model-00001-of-00001.safetensors"}});

  EXPECT_THAT(OpenModelFolder(folder.path(), {}),
              Fails(absl::StatusCode::kNotFound,
                    "in a file that is missing (download it again): cannot open"));
}

TEST(ModelFolderTest, AMalformedShardIsInvalid) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("1.safetensors", "short");
  folder.WriteIndex({{"lm_head.weight", "1.safetensors"}});

  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "not a safetensors file"));
}

TEST(ModelFolderTest, AShardWithoutTheTensorIsInvalid) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("1.safetensors", testing::SafetensorsBytes({MakeZeroTensor("x", "U8", {1})}));
  folder.WriteIndex({{"lm_head.weight", "1.safetensors"}});

  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "which has no such tensor"));
}

// Regression: a bias of the head that the index does not list was not applied.
TEST(ModelFolderTest, AFileWithATensorThatTheIndexDoesNotListIsInvalid) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("1.safetensors",
                   testing::SafetensorsBytes({MakeZeroTensor("lm_head.weight", "BF16", {5, 4}),
                                              MakeZeroTensor("lm_head.bias", "F32", {5})}));
  folder.WriteIndex({{"lm_head.weight", "1.safetensors"}});

  EXPECT_THAT(OpenModelFolder(folder.path(), {}),
              Fails(kInvalid, "'lm_head.bias', which the index does not list"));
}

TEST(ModelFolderTest, AFileMayContainATensorThatDoesNotMatterAndIsNotListed) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("1.safetensors",
                   testing::SafetensorsBytes({MakeZeroTensor("lm_head.weight", "BF16", {5, 4}),
                                              MakeZeroTensor("model.norm.weight", "F32", {4})}));
  folder.WriteIndex({{"lm_head.weight", "1.safetensors"}});

  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Succeeds());
}

TEST(ModelFolderTest, WarnsOfAnAdapterThatTransformersWouldApply) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"model_type":"llama","hidden_size":4,"vocab_size":5})");
  folder.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {5, 4})});
  folder.WriteFile("adapter_config.json", R"({"peft_type":"LORA"})");

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->warnings,
              ::testing::ElementsAre(::testing::HasSubstr("merge it into the model")));
}

TEST(ModelFolderTest, AnIndexThatLeavesTheFolderIsDenied) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  for (const std::string name : {"../x.safetensors", "/tmp/x.safetensors"}) {
    folder.WriteIndex({{"lm_head.weight", name}});
    EXPECT_THAT(OpenModelFolder(folder.path(), {}),
                Fails(absl::StatusCode::kPermissionDenied, "'lm_head.weight': the path"));
  }
}

TEST(ModelFolderTest, MalformedFilesAreNamed) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("model.safetensors", "short");
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "model.safetensors'"));

  folder.WriteConfig("{");
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "config.json'"));
}

TEST(ModelFolderTest, MessagesEscapeTextFromFiles) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("model.safetensors",
                   testing::SafetensorsBytesOf("{\"\\u001b[2J\\nlm_head\":[]}", ""));

  const auto head = OpenModelFolder(folder.path(), {});

  EXPECT_THAT(head, Fails(kInvalid, R"('\x1b[2J\nlm_head')"));
}

}  // namespace
}  // namespace logprobd
