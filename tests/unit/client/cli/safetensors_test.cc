#include <string>

#include "client/cli/tensor_files/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/cli/file_bytes.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SafetensorsTest, ReadsOneTensorOfSeveral) {
  const testing::TempFolder folder;
  const std::string path = folder.Write(
      "a.safetensors", Safetensors(R"({"__metadata__":{"format":"pt"},)"
                                   R"("x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                   R"("ids":{"dtype":"I64","shape":[2],"data_offsets":[4,20]}})",
                                   BytesOf<float>({1}) + BytesOf<int64_t>({5, 6})));

  const absl::StatusOr<Tensor> tensor = ReadSafetensors(path, "ids");

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->type, ElementType::kI64);
  EXPECT_THAT(*ToInt64(*tensor), ElementsAre(5, 6));  // the data starts at an odd address
}

TEST(SafetensorsTest, ListsTheNamesWhenOneIsMissing) {
  const testing::TempFolder folder;
  const std::string path = folder.Write(
      "a.safetensors", Safetensors(R"({"states":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                                   BytesOf<float>({1})));

  const absl::Status status = ReadSafetensors(path, "hidden").status();

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no tensor \"hidden\"; it has: states"));
}

struct BadFile {
  std::string name;
  std::string bytes;
  std::string message;
};

class BadSafetensorsTest : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadSafetensorsTest, SaysWhatIsWrong) {
  const testing::TempFolder folder;

  const absl::Status status =
      ReadSafetensors(folder.Write("bad.safetensors", GetParam().bytes), "x").status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("bad.safetensors: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

/// A file with one entry "x" of four bytes.
std::string WithEntry(const std::string& entry) {
  std::string header = "{\"x\":";
  return Safetensors(header.append(entry).append("}"), std::string(4, 'x'));
}

INSTANTIATE_TEST_SUITE_P(
    Files, BadSafetensorsTest,
    ::testing::Values(
        BadFile{"Empty", "", "too short"},
        BadFile{"HeaderBeyondTheFile", std::string("\xFF\x00\x00\x00\x00\x00\x00\x00{}", 10),
                "claims 255 bytes"},
        BadFile{"HeaderOfTerabytes", std::string(16, '\xFF'), "claims 18446744073709551615 bytes"},
        BadFile{"NotJson", Safetensors("{x", ""), "not valid JSON"},
        BadFile{"NotAnObject", Safetensors("[]", ""), "not valid JSON"},
        BadFile{"NameTwice",
                Safetensors(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                            "x"),
                "not valid JSON"},
        BadFile{"EntryNotAnObject", WithEntry("3"), "has no dtype"},
        BadFile{"NoOffsets", WithEntry(R"({"dtype":"F32","shape":[1]})"), "has no dtype"},
        BadFile{"UnknownDtype",
                WithEntry(R"({"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]})"),
                "dtype F8_E4M3"},
        BadFile{"NegativeDimension",
                WithEntry(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"),
                "not lists of non-negative integers"},
        BadFile{"FractionalOffset",
                WithEntry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4.0]})"),
                "not lists of non-negative integers"},
        BadFile{"ThreeOffsets", WithEntry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,4]})"),
                "not lists of non-negative integers"},
        BadFile{"RangeBackwards", WithEntry(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})"),
                "is the file truncated"},
        BadFile{"RangeBeyondTheFile",
                WithEntry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})"),
                "claims bytes 0 to 8 of 4"},
        BadFile{"ShapeUnlikeTheRange",
                WithEntry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"),
                "which is 8 bytes, but its data_offsets span 4 bytes"},
        BadFile{
            "ShapeThatOverflows",
            WithEntry(R"({"dtype":"F32","shape":[9000000000000000000,9],"data_offsets":[0,4]})"),
            "has more than 2^63 - 1 bytes"}),
    [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace logprobd::client
