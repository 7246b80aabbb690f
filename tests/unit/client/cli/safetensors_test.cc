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

// The tests of server/weights have the other malformed headers.
INSTANTIATE_TEST_SUITE_P(
    Files, BadSafetensorsTest,
    ::testing::Values(
        BadFile{"Empty", "", "not a safetensors file"},
        BadFile{"HeaderBeyondTheFile", std::string("\xFF\x00\x00\x00\x00\x00\x00\x00{}", 10),
                "the header has 255 bytes, but only 2 follow"},
        BadFile{
            "UnknownDtype",
            Safetensors(R"({"x":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}})", "xxxx"),
            "x has dtype F8_E4M3, which is not supported"},
        BadFile{"ShapeUnlikeTheRange",
                Safetensors(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "xxxx"),
                "its shape needs 8 bytes, but its data_offsets span 4"}),
    [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace logprobd::client
