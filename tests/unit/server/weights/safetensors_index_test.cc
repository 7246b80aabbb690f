#include "server/weights/safetensors_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/memory_bytes.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using testing::MemoryBytes;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

absl::StatusOr<WeightMap> Read(const std::string& json) {
  return ReadSafetensorsIndex(MemoryBytes(json), [](absl::string_view) { return true; });
}

TEST(SafetensorsIndexTest, KeepsTheEntriesThatAreWanted) {
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
        IndexCase{"ForeignFile", Mapping("config.json"), kInvalid, "no name of a .safetensors"},
        IndexCase{"PickleFile", Mapping("model.bin"), kInvalid, "no name of a .safetensors"},
        IndexCase{"EmptyFileName", Mapping(""), kInvalid, "no name of a .safetensors"},
        IndexCase{"NulInAFileName", Mapping("a\\u0000.safetensors"), kInvalid,
                  "no name of a .safetensors"},
        IndexCase{"DeepMetadata", absl::StrCat("{\"metadata\":", std::string(1'000, '[')), kInvalid,
                  "nested deeper than 64"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace logprobd
