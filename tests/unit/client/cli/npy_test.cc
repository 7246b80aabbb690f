#include <cstddef>
#include <string>
#include <vector>

#include "client/cli/tensor_files/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/cli/file_bytes.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(NpyTest, ReadsFilesOfNumPy) {
  const testing::TempFolder folder;
  const std::string path = folder.Write(
      "a.npy", Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }          \n",
                   BytesOf<float>({1, 2, 3, 4, 5, 6})));

  const absl::StatusOr<Tensor> tensor = ReadNpy(path);

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->type, ElementType::kF32);
  EXPECT_THAT(tensor->shape, ElementsAre(2, 3));
  EXPECT_EQ(tensor->data.size(), 24U);
}

// An array of one dimension is in both orders.
TEST(NpyTest, ReadsARowThatIsInFortranOrder) {
  const testing::TempFolder folder;
  const std::string path = folder.Write(
      "a.npy",
      Npy("{'descr': '<f4', 'fortran_order': True, 'shape': (3,)}", BytesOf<float>({1, 2, 3})));

  const absl::StatusOr<Tensor> tensor = ReadNpy(path);

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(tensor->shape, ElementsAre(3));
}

TEST(NpyTest, ReadsEverySupportedType) {
  const testing::TempFolder folder;
  const std::vector<std::pair<std::string, ElementType>> types = {
      {"<f2", ElementType::kF16}, {"<f8", ElementType::kF64}, {"<i4", ElementType::kI32},
      {"<i8", ElementType::kI64}, {"|u1", ElementType::kU8},  {"<u2", ElementType::kU16},
      {"<V2", ElementType::kBf16}};

  for (const auto& [descr, type] : types) {
    const std::string data(static_cast<size_t>(ElementBytes(type)) * 2, '\0');
    const auto tensor = ReadNpy(folder.Write("a.npy", Npy(NpyHeader(descr, "(2,)"), data)));

    ASSERT_TRUE(tensor.ok()) << descr << ": " << tensor.status();
    EXPECT_EQ(tensor->type, type) << descr;
  }
}

TEST(NpyTest, ReadsBackAWrittenFile) {
  const testing::TempFolder folder;
  const std::vector<int32_t> ids = {7, -1, 3};

  ASSERT_TRUE(WriteNpy(folder.path("ids.npy"), "<i4", {3},
                       {reinterpret_cast<const std::byte*>(ids.data()), 12})
                  .ok());
  const absl::StatusOr<Tensor> tensor = ReadNpy(folder.path("ids.npy"));

  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_THAT(*ToTokenIds(*tensor), ElementsAre(7, -1, 3));
  EXPECT_EQ((folder.Read("ids.npy").size() - 12) % 64, 0U);  // alignment that the format requires
}

struct BadNpy {
  std::string name;
  std::string bytes;
  std::string message;
};

class BadNpyTest : public ::testing::TestWithParam<BadNpy> {};

TEST_P(BadNpyTest, SaysWhatIsWrong) {
  const testing::TempFolder folder;

  const absl::Status status = ReadNpy(folder.Write("bad.npy", GetParam().bytes)).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("bad.npy: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

const std::string kFourBytes(4, 'x');

INSTANTIATE_TEST_SUITE_P(
    Files, BadNpyTest,
    ::testing::Values(
        BadNpy{"Empty", "", "not a .npy file"},
        BadNpy{"OtherMagic", std::string(64, 'x'), "not a .npy file"},
        BadNpy{"UnknownVersion", std::string("\x93NUMPY\x09\x00\x00\x00", 10), "version 9"},
        BadNpy{"CutHeader", std::string("\x93NUMPY\x01\x00\xFF\x00", 10), "ends inside its header"},
        BadNpy{"CutLength", std::string("\x93NUMPY\x02\x00\x01\x00", 10), "ends inside its header"},
        BadNpy{"EmptyHeader", std::string("\x93NUMPY\x01\x00\x00\x00", 10), "header is malformed"},
        BadNpy{"NoDictionary", Npy("[1, 2]\n", ""), "header is malformed"},
        BadNpy{"KeyMissing", Npy("{'descr': '<f4', 'shape': (1,)}", kFourBytes),
               "header is malformed"},
        BadNpy{"UnknownKey",
               Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", kFourBytes),
               "header is malformed"},
        BadNpy{"KeyTwice",
               Npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
                   kFourBytes),
               "header is malformed"},
        BadNpy{"ListAsShape", Npy(NpyHeader("<f4", "[1]"), kFourBytes), "header is malformed"},
        BadNpy{"JsonBoolean",
               Npy("{'descr': '<f4', 'fortran_order': false, 'shape': (1,)}", kFourBytes),
               "header is malformed"},
        BadNpy{"TextBehindTheHeader",
               Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x", kFourBytes),
               "header is malformed"},
        BadNpy{"NegativeDimension", Npy(NpyHeader("<f4", "(-1,)"), kFourBytes),
               "header is malformed"},
        BadNpy{"HugeShape", Npy(NpyHeader("<f4", "(9000000000000000000, 9)"), kFourBytes),
               "has more than 2^63 - 1 bytes"},
        BadNpy{"DimensionBeyondInt64", Npy(NpyHeader("<f4", "(99999999999999999999,)"), kFourBytes),
               "header is malformed"},
        BadNpy{"BigEndian", Npy(NpyHeader(">f4", "(1,)"), kFourBytes), "type >f4"},
        BadNpy{"PickledObjects", Npy(NpyHeader("|O", "(1,)"), kFourBytes), "type |O"},
        BadNpy{"FortranOrder",
               Npy("{'descr': '<f2', 'fortran_order': True, 'shape': (2, 1)}", kFourBytes),
               "Fortran order"},
        BadNpy{"DataTooShort", Npy(NpyHeader("<f4", "(2,)"), kFourBytes),
               "needs 8 bytes of data, but the file has 4"},
        BadNpy{"DataTooLong", Npy(NpyHeader("<f2", "(1,)"), kFourBytes),
               "needs 2 bytes of data, but the file has 4"}),
    [](const auto& tested) { return tested.param.name; });

TEST(NpyTest, NamesAMissingFile) {
  const absl::Status status = ReadNpy("/no/such/file.npy").status();

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot open /no/such/file.npy"));
}

TEST(NpyTest, RefusesAFolder) {
  const testing::TempFolder folder;

  EXPECT_THAT(std::string(ReadNpy(folder.path("")).status().message()),
              HasSubstr("is not a regular file"));
}

}  // namespace
}  // namespace logprobd::client
