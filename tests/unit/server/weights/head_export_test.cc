#include "server/weights/head_export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/weights/content_check.h"
#include "server/weights/head_weights.h"
#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

namespace fs = std::filesystem;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MakeRandomTensor;
using testing::MakeTensor;
using testing::MakeZeroTensor;
using testing::ModelFolder;
using ::testing::UnorderedElementsAre;

const std::string kConfig =
    R"({"model_type":"llama","hidden_size":4,"vocab_size":6,"num_hidden_layers":2})";

void Ignore(absl::string_view /*step*/, int64_t /*done*/, int64_t /*total*/) {}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

std::string DigestOf(const std::string& path) {
  const auto head = OpenModelFolder(path, {});
  EXPECT_THAT(head, Succeeds());
  return CheckContent(*head->weights, {})->sha256;
}

/// A model, and a folder in which the folder of its head is written.
class HeadExportTest : public ::testing::Test {
 protected:
  std::string Out() const { return parent_.PathOf("head"); }
  std::string OutFile(const std::string& name) const { return Out() + "/" + name; }

  absl::StatusOr<HeadExport> Export(bool force = false) const {
    return ExportHead({.model = model_.path(), .out = Out(), .force = force, .version = "1.2.3"},
                      Ignore);
  }

  nlohmann::json Manifest() const {
    return nlohmann::json::parse(ReadFile(OutFile("manifest.json")));
  }

  const ModelFolder model_;
  const ModelFolder parent_;
};

TEST_F(HeadExportTest, WritesTheHeadUnderTheNameThatWasFound) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeRandomTensor("model.embed_tokens.weight", Dtype::kBf16, {6, 4}, 1, 1),
                       MakeRandomTensor("output.weight", Dtype::kBf16, {6, 4}, 1, 2),
                       MakeRandomTensor("output.bias", Dtype::kF32, {6}, 1, 3)});

  const auto exported = Export();

  ASSERT_THAT(exported, Succeeds());
  EXPECT_EQ(exported->head.tensor, "output.weight");
  EXPECT_TRUE(exported->head.has_bias);
  EXPECT_EQ(exported->sha256, DigestOf(model_.path()));
  EXPECT_EQ(exported->sha256, DigestOf(Out()));
  EXPECT_THAT(NamesIn(Out()),
              UnorderedElementsAre("config.json", "manifest.json", "model.safetensors"));
  EXPECT_THAT(NamesIn(parent_.path()), ElementsAre("head"));
}

TEST_F(HeadExportTest, WritesATiedEmbeddingAndItsBiasAsAHead) {
  model_.WriteConfig(
      R"({"model_type":"llama","hidden_size":4,"vocab_size":6,"tie_word_embeddings":true})");
  model_.WriteTensors({MakeRandomTensor("wte.weight", Dtype::kF16, {6, 4}, 1, 1),
                       MakeRandomTensor("lm_head.bias", Dtype::kBf16, {6}, 1, 2)});

  const auto exported = Export();

  ASSERT_THAT(exported, Succeeds());
  EXPECT_EQ(exported->head.tensor, "lm_head.weight");
  EXPECT_FALSE(exported->head.tied);
  EXPECT_EQ(exported->sha256, DigestOf(model_.path()));
  EXPECT_THAT(exported->warnings, IsEmpty());
  EXPECT_EQ(Manifest()["tensors"]["lm_head.weight"]["source"], "wte.weight");
  EXPECT_EQ(Manifest()["tensors"]["lm_head.bias"]["dtype"], "BF16");
}

TEST_F(HeadExportTest, NamesATensorThatWasChosenByHandSoThatItIsFound) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {6, 4}),
                       MakeRandomTensor("value.proj.weight", Dtype::kBf16, {6, 4}, 1, 2)});

  const auto exported = ExportHead(
      {.model = model_.path(), .out = Out(), .head_tensor = "value.proj.weight"}, Ignore);

  ASSERT_THAT(exported, Succeeds());
  EXPECT_EQ(exported->head.tensor, "lm_head.weight");
  EXPECT_NE(exported->sha256, DigestOf(model_.path()));
  EXPECT_EQ(exported->sha256, DigestOf(Out()));
}

TEST_F(HeadExportTest, KeepsPaddingAndTheVocabularyOfTheConfig) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeRandomTensor("lm_head.weight", Dtype::kBf16, {8, 4}, 1, 1)});

  const auto exported = Export();

  ASSERT_THAT(exported, Succeeds());
  EXPECT_EQ(exported->head.vocab_size, 6);
  EXPECT_EQ(exported->head.vocab_rows, 8);
  EXPECT_EQ(exported->sha256, DigestOf(model_.path()));
  EXPECT_THAT(exported->warnings, ElementsAre(HasSubstr("the head has 8 rows")));
}

TEST_F(HeadExportTest, DescribesItsSourcesAndFilesInTheManifest) {
  model_.WriteConfig(kConfig);
  model_.WriteShards({{MakeTensor("model.norm.weight", Dtype::kBf16, {4}, {1, 1, 1, 1})},
                      {MakeRandomTensor("lm_head.weight", Dtype::kBf16, {6, 4}, 1, 1)}});

  ASSERT_THAT(Export(), Succeeds());

  const nlohmann::json manifest = Manifest();
  EXPECT_EQ(manifest["format"], 1);
  EXPECT_EQ(manifest["logprobd_version"], "1.2.3");
  EXPECT_EQ(manifest["head_sha256"], DigestOf(Out()));
  EXPECT_EQ(manifest["tensors"],
            nlohmann::json::parse(R"({"lm_head.weight": {"dtype": "BF16", "shape": [6, 4],
                "source": "lm_head.weight",
                "source_files": ["model-00002-of-00002.safetensors"]}})"));
  const auto keys = [](const nlohmann::json& object) {
    std::vector<std::string> names;
    for (const auto& [name, value] : object.items()) {
      names.push_back(name);
    }
    return names;
  };
  EXPECT_THAT(keys(manifest["sources"]),
              ElementsAre("config.json", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json"));
  EXPECT_THAT(keys(manifest["files"]), ElementsAre("config.json", "model.safetensors"));
  // printf '%s' '{"model_type":"llama",...}' | sha256sum, with the text of kConfig
  EXPECT_EQ(manifest["sources"]["config.json"]["bytes"], kConfig.size());
  EXPECT_EQ(manifest["sources"]["config.json"]["sha256"],
            "193fa2cde8304247b71deaf3a7827864d4040995b271c24504fa3eb2826b5c7b");
  EXPECT_EQ(manifest["files"]["model.safetensors"]["bytes"],
            ReadFile(OutFile("model.safetensors")).size());
}

TEST_F(HeadExportTest, AlignsEachTensorToItsElements) {
  model_.WriteConfig(R"({"model_type":"llama","hidden_size":3,"vocab_size":5})");
  model_.WriteTensors({MakeRandomTensor("lm_head.weight", Dtype::kBf16, {5, 3}, 1, 1),
                       MakeRandomTensor("lm_head.bias", Dtype::kF32, {5}, 1, 2)});

  ASSERT_THAT(Export(), Succeeds());

  const std::string bytes = ReadFile(OutFile("model.safetensors"));
  const size_t header_bytes = static_cast<unsigned char>(bytes[0]);
  EXPECT_EQ(header_bytes % 8, 0U);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  EXPECT_EQ(header["lm_head.bias"]["data_offsets"], nlohmann::json({0, 20}));
  EXPECT_EQ(header["lm_head.weight"]["data_offsets"], nlohmann::json({20, 50}));
  EXPECT_EQ(header["__metadata__"]["format"], "pt");
}

TEST_F(HeadExportTest, WritesTheSameBytesAgain) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeRandomTensor("lm_head.weight", Dtype::kBf16, {6, 4}, 1, 1)});

  ASSERT_THAT(Export(), Succeeds());
  ASSERT_THAT(
      ExportHead({.model = model_.path(), .out = parent_.PathOf("again/"), .version = "1.2.3"},
                 Ignore),
      Succeeds());

  for (const std::string name : {"config.json", "manifest.json", "model.safetensors"}) {
    EXPECT_EQ(ReadFile(OutFile(name)), ReadFile(parent_.PathOf("again/" + name))) << name;
  }
}

TEST_F(HeadExportTest, ReplacesOnlyWithForceAndOnlyAnExport) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeRandomTensor("lm_head.weight", Dtype::kBf16, {6, 4}, 1, 1)});
  ASSERT_THAT(Export(), Succeeds());
  const std::string first = DigestOf(Out());
  model_.WriteTensors({MakeRandomTensor("lm_head.weight", Dtype::kBf16, {6, 4}, 1, 2)});

  EXPECT_THAT(Export(), Fails(absl::StatusCode::kAlreadyExists, "--force"));
  EXPECT_EQ(DigestOf(Out()), first);
  EXPECT_THAT(Export(/*force=*/true), Succeeds());
  EXPECT_EQ(DigestOf(Out()), DigestOf(model_.path()));
  EXPECT_THAT(NamesIn(parent_.path()), ElementsAre("head"));

  parent_.WriteFile("head/notes.txt", "keep me");
  EXPECT_THAT(Export(/*force=*/true),
              Fails(absl::StatusCode::kFailedPrecondition, "it contains 'notes.txt'"));
  fs::remove(OutFile("notes.txt"));
  fs::remove(OutFile("manifest.json"));
  EXPECT_THAT(Export(/*force=*/true),
              Fails(absl::StatusCode::kFailedPrecondition, "it has no manifest.json"));
  EXPECT_THAT(NamesIn(parent_.path()), ElementsAre("head"));
}

TEST_F(HeadExportTest, FillsAnEmptyFolder) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {6, 4})});
  fs::create_directory(Out());

  EXPECT_THAT(Export(), Succeeds());
}

TEST_F(HeadExportTest, RefusesAPlaceThatIsNotAFolder) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {6, 4})});
  parent_.WriteFile("head", "a file");
  EXPECT_THAT(Export(/*force=*/true), Fails(absl::StatusCode::kFailedPrecondition, "not a folder"));

  EXPECT_THAT(ExportHead({.model = model_.path(), .out = parent_.PathOf("absent/head")}, Ignore),
              Fails(absl::StatusCode::kUnavailable, "No such file or directory"));
}

TEST_F(HeadExportTest, LeavesNothingBehindWhenItFails) {
  model_.WriteConfig(kConfig);
  EXPECT_THAT(Export(), Fails(absl::StatusCode::kNotFound, "neither model.safetensors"));

  model_.WriteTensors({MakeRandomTensor("lm_head.weight", Dtype::kBf16, {6, 4}, 1, 1)});
  const auto shrunk = ExportHead({.model = model_.path(), .out = Out()},
                                 [this](absl::string_view step, int64_t, int64_t) {
                                   if (step == "hashing model.safetensors") {
                                     fs::resize_file(model_.PathOf("model.safetensors"), 40);
                                   }
                                 });

  EXPECT_THAT(shrunk, Fails(absl::StatusCode::kDataLoss, "model.safetensors"));
  EXPECT_THAT(NamesIn(parent_.path()), IsEmpty());
}

TEST_F(HeadExportTest, WarnsOfValuesThatAreNotFinite) {
  model_.WriteConfig(R"({"model_type":"llama","hidden_size":2,"vocab_size":2})");
  model_.WriteTensors({MakeTensor("lm_head.weight", Dtype::kBf16, {2, 2}, {1, 2, 3, NAN})});

  const auto exported = Export();

  ASSERT_THAT(exported, Succeeds());
  EXPECT_THAT(exported->warnings, ElementsAre(HasSubstr("row 1 column 1 is NaN or Inf")));
}

TEST_F(HeadExportTest, TellsItsProgress) {
  model_.WriteConfig(kConfig);
  model_.WriteTensors({MakeZeroTensor("lm_head.weight", "BF16", {6, 4})});
  std::vector<std::string> steps;

  ASSERT_THAT(ExportHead({.model = model_.path(), .out = Out()},
                         [&steps](absl::string_view step, int64_t done, int64_t total) {
                           EXPECT_LE(done, total);
                           if (steps.empty() || steps.back() != step) {
                             steps.emplace_back(step);
                           }
                         }),
              Succeeds());

  EXPECT_THAT(steps, ElementsAre("hashing config.json", "hashing model.safetensors", "copying",
                                 "checking"));
}

}  // namespace
}  // namespace logprobd
