#include "server/weights/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/memory_bytes.h"
#include "tests/support/model_folder.h"
#include "tests/support/safetensors_cases.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using testing::MemoryBytes;
using testing::SafetensorsCase;

bool SelectAll(absl::string_view /*name*/) { return true; }

class SafetensorsCasesTest : public ::testing::TestWithParam<SafetensorsCase> {};

TEST_P(SafetensorsCasesTest, IsAcceptedOrRefusedAsTheFormatSays) {
  const auto header = ReadSafetensorsHeader(MemoryBytes(GetParam().bytes), SelectAll);

  if (GetParam().complaint.empty()) {
    EXPECT_THAT(header, Succeeds());
  } else {
    EXPECT_THAT(header, Fails(absl::StatusCode::kInvalidArgument, GetParam().complaint));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, SafetensorsCasesTest,
                         ::testing::ValuesIn(testing::SafetensorsCases()),
                         [](const auto& info) { return info.param.name; });

TEST(SafetensorsHeaderTest, DescribesTheSelectedTensors) {
  const std::string bytes = testing::SafetensorsBytes({testing::MakeZeroTensor("a", "U8", {3}),
                                                       testing::MakeZeroTensor("b", "BF16", {2, 4}),
                                                       testing::MakeZeroTensor("c", "I64", {})});

  const auto header =
      ReadSafetensorsHeader(MemoryBytes(bytes), [](absl::string_view name) { return name == "b"; });

  ASSERT_THAT(header, Succeeds());
  EXPECT_EQ(header->num_tensors, 3);
  ASSERT_EQ(header->tensors.size(), 1U);
  const TensorEntry* b = header->Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, "BF16");
  EXPECT_THAT(b->shape, ElementsAre(2, 4));
  EXPECT_EQ(b->file_end - b->file_begin, 16);
  EXPECT_EQ(b->file_end, static_cast<int64_t>(bytes.size()) - 8);
  EXPECT_EQ(header->Find("a"), nullptr);
}

TEST(SafetensorsHeaderTest, ReadsNothingAfterTheHeader) {
  const std::string json = R"({"t":{"dtype":"U8","shape":[1000000],"data_offsets":[0,1000000]}})";
  const MemoryBytes file(testing::SafetensorsBytesOf(json, std::string(1'000'000, '\0')));

  ASSERT_THAT(ReadSafetensorsHeader(file, SelectAll), Succeeds());

  EXPECT_EQ(file.read_bytes(), static_cast<int64_t>(8 + json.size()));
}

TEST(SafetensorsHeaderTest, ReadsALongHeaderInPieces) {
  std::vector<testing::FileTensor> tensors;
  for (int i = 0; i < 5'000; ++i) {
    tensors.push_back(testing::MakeZeroTensor(absl::StrCat("layer.", i, ".weight"), "U8", {2}));
  }

  const auto header =
      ReadSafetensorsHeader(MemoryBytes(testing::SafetensorsBytes(tensors)), SelectAll);

  ASSERT_THAT(header, Succeeds());
  EXPECT_EQ(header->num_tensors, 5'000);
}

TEST(SafetensorsHeaderTest, AcceptsMegabytesOfPadding) {
  const std::string json =
      absl::StrCat(std::string(3 << 20, ' '), "{}", std::string(3 << 20, '\n'));

  EXPECT_THAT(ReadSafetensorsHeader(MemoryBytes(testing::SafetensorsBytesOf(json, "")), SelectAll),
              Succeeds());
}

TEST(SafetensorsHeaderTest, StopsAtTheLimitOfTensors) {
  // Read completely, this would be about the largest header that the format allows.
  std::string json = "{";
  for (int i = 0; i < 1'500'000; ++i) {
    absl::StrAppend(&json, i == 0 ? "" : ",", "\"", i,
                    R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
  }
  json += "}";
  ASSERT_LT(static_cast<int64_t>(json.size()), kSafetensorsHeaderBytesMax);
  const MemoryBytes file(testing::SafetensorsBytesOf(json, ""));

  const auto header = ReadSafetensorsHeader(file, SelectAll);

  EXPECT_THAT(header, Fails(absl::StatusCode::kInvalidArgument, "more than 500000 tensors"));
  EXPECT_LT(file.read_bytes(), file.size_bytes() / 2);
}

TEST(SafetensorsHeaderTest, StopsAtTheLimitOfMetadata) {
  std::string json = R"({"__metadata__":{)";
  for (int i = 0; i < 600'000; ++i) {
    absl::StrAppend(&json, i == 0 ? "" : ",", "\"", i, "\":\"\"");
  }
  json += "}}";

  EXPECT_THAT(ReadSafetensorsHeader(MemoryBytes(testing::SafetensorsBytesOf(json, "")), SelectAll),
              Fails(absl::StatusCode::kInvalidArgument, "more than 500000 entries"));
}

}  // namespace

namespace {

using ::testing::Pair;
using ::testing::UnorderedElementsAre;

absl::StatusOr<WeightMap> Read(const std::string& json) {
  return ReadSafetensorsIndex(MemoryBytes(json), [](absl::string_view) { return true; });
}

TEST(SafetensorsIndexTest, KeepsTheSelectedEntries) {
  const MemoryBytes file(R"({"metadata":{"total_size":12,"deep":[{"weight_map":{"x":"y"}}]},
      "weight_map":{"a":"1.safetensors","b":"parts/2.safetensors"}})");

  const auto index = ReadSafetensorsIndex(file, [](absl::string_view name) { return name == "b"; });

  ASSERT_THAT(index, Succeeds());
  EXPECT_THAT(*index, UnorderedElementsAre(Pair("b", "parts/2.safetensors")));
}

struct IndexCase {
  std::string name;
  std::string json;
  absl::StatusCode code;
  std::string complaint;
};

class SafetensorsIndexCasesTest : public ::testing::TestWithParam<IndexCase> {};

TEST_P(SafetensorsIndexCasesTest, IsRefused) {
  EXPECT_THAT(Read(GetParam().json), Fails(GetParam().code, GetParam().complaint));
}

std::string Mapping(const std::string& file_name) {
  return absl::StrCat(R"({"weight_map":{"a":")", file_name, "\"}}");
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kDenied = absl::StatusCode::kPermissionDenied;

INSTANTIATE_TEST_SUITE_P(
    Cases, SafetensorsIndexCasesTest,
    ::testing::Values(
        IndexCase{"Empty", "", kInvalid, "not a JSON object"},
        IndexCase{"Array", "[]", kInvalid, "not a JSON object"},
        IndexCase{"Open", "{\"weight_map\":{", kInvalid, "not valid JSON"},
        IndexCase{"NoWeightMap", "{\"metadata\":{}}", kInvalid, "no weight_map"},
        IndexCase{"WeightMapThatIsAList", "{\"weight_map\":[]}", kInvalid, "not an object"},
        IndexCase{"WeightMapThatIsAString", "{\"weight_map\":\"\"}", kInvalid, "not an object"},
        IndexCase{"WeightMapTwice", "{\"weight_map\":{},\"weight_map\":{}}", kInvalid, "twice"},
        IndexCase{"NameTwice", R"({"weight_map":{"a":"1.safetensors","a":"2.safetensors"}})",
                  kInvalid, "'a' occurs twice"},
        IndexCase{"NumberAsFile", R"({"weight_map":{"a":1}})", kInvalid, "'a' is mapped"},
        IndexCase{"ListAsFile", R"({"weight_map":{"a":["1.safetensors"]}})", kInvalid,
                  "'a' is mapped"},
        IndexCase{"ObjectAsFile", R"({"weight_map":{"a":{}}})", kInvalid, "'a' is mapped"},
        IndexCase{"AbsolutePath", Mapping("/etc/x.safetensors"), kDenied, "is absolute"},
        IndexCase{"ParentFolder", Mapping("../x.safetensors"), kDenied, "leaves the model folder"},
        IndexCase{"ParentFolderInside", Mapping("a/../../x.safetensors"), kDenied,
                  "leaves the model folder"},
        IndexCase{"ParentFolderAtTheEnd", Mapping("a/.."), kDenied, "leaves the model folder"},
        IndexCase{"ForeignFile", Mapping("config.json"), kInvalid,
                  "not the name of a .safetensors"},
        IndexCase{"PickleFile", Mapping("model.bin"), kInvalid, "not the name of a .safetensors"},
        IndexCase{"EmptyFileName", Mapping(""), kInvalid, "not the name of a .safetensors"},
        IndexCase{"NulInAFileName", Mapping("a\\u0000.safetensors"), kInvalid,
                  "not the name of a .safetensors"},
        IndexCase{"DeepMetadata", absl::StrCat("{\"metadata\":", std::string(1'000, '[')), kInvalid,
                  "nested deeper than 64"}),
    [](const auto& info) { return info.param.name; });

}  // namespace

}  // namespace logprobd
