#include "tests/support/safetensors_cases.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/support/model_folder.h"

namespace logprobd::testing {
namespace {

std::string LengthField(uint64_t length, absl::string_view rest) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>((length >> (8 * i)) & 0xFFU);
  }
  return absl::StrCat(bytes, rest);
}

std::string Header(absl::string_view json, size_t data_bytes = 0) {
  return SafetensorsBytesOf(json, std::string(data_bytes, '\0'));
}

// A file with a single tensor, "t", whose header entry is `entry`.
std::string Entry(absl::string_view entry, size_t data_bytes = 0) {
  return Header(absl::StrCat(R"({"t":)", entry, "}"), data_bytes);
}

std::string Tensor(absl::string_view dtype, absl::string_view shape, absl::string_view offsets,
                   size_t data_bytes = 0) {
  return Entry(absl::StrCat(R"({"dtype":")", dtype, R"(","shape":[)", shape,
                            R"(],"data_offsets":[)", offsets, "]}"),
               data_bytes);
}

std::string TwoTensors(absl::string_view first_offsets, absl::string_view second_offsets,
                       size_t data_bytes) {
  return Header(
      absl::StrCat(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[)", first_offsets,
                   R"(]},"b":{"dtype":"U8","shape":[4],"data_offsets":[)", second_offsets, "]}}"),
      data_bytes);
}

void AddLengthCases(std::vector<SafetensorsCase>& cases) {
  cases.push_back({"EmptyFile", "", "at least 8 are required"});
  cases.push_back({"SevenBytes", std::string(7, '\0'), "at least 8 are required"});
  cases.push_back({"EmptyHeader", LengthField(0, ""), "not a JSON object"});
  cases.push_back({"HeaderBeyondTheFile", LengthField(100, "{}"), "truncated"});
  cases.push_back({"HeaderOneByteBeyondTheFile", LengthField(3, "{}"), "truncated"});
  cases.push_back({"LengthThatOverflows", LengthField(~uint64_t{0}, "{}"), "too large"});
  cases.push_back({"LengthThatIsNegative", LengthField(uint64_t{1} << 63, "{}"), "too large"});
  cases.push_back(
      {"LengthNearTheLargest", LengthField((uint64_t{1} << 63) - 1, "{}"), "too large"});
  cases.push_back({"LengthOneBeyondTheLimit", LengthField(100'000'001, "{}"), "too large"});
  cases.push_back({"LengthAtTheLimit", LengthField(100'000'000, "{}"), "truncated"});
  cases.push_back(
      {"GitLfsPointer", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"});
}

void AddJsonCases(std::vector<SafetensorsCase>& cases) {
  cases.push_back({"HeaderThatIsNotUtf", Header("{\"\xFF\xFE\":1}"), "not valid JSON in UTF-8"});
  cases.push_back({"MetadataThatIsNotUtf", Header("{\"__metadata__\":{\"a\":\"\xC3(\"}}"),
                   "not valid JSON in UTF-8"});
  cases.push_back({"OpenBrace", Header("{"), "not valid JSON"});
  cases.push_back({"OpenString", Header("{\"abc"), "not valid JSON"});
  cases.push_back({"HeaderThatIsAnArray", Header("[]"), "not a JSON object"});
  cases.push_back({"HeaderThatIsANumber", Header("1"), "not a JSON object"});
  cases.push_back({"ByteOrderMark", Header("\xEF\xBB\xBF{}"), "not a JSON object"});
  cases.push_back({"TwoObjects", Header("{}{}"), "not valid JSON"});
  cases.push_back({"NulAfterTheObject", Header(absl::string_view("{}\0\0", 4)), "NUL"});
  cases.push_back({"NulBeforeTheObject", Header(absl::string_view("\0{}", 3)), "NUL"});
  cases.push_back({"TrailingComma", Header("{\"__metadata__\":{},}"), "not valid JSON"});
  cases.push_back({"Comment", Header("{}/* */"), "not valid JSON"});
  cases.push_back({"DeepNesting", Header(absl::StrCat("{\"a\":", std::string(100'000, '['))),
                   "an array in an unexpected position"});
  cases.push_back({"DeepNestingOfObjects", Header([] {
                     std::string json;
                     for (int i = 0; i < 100'000; ++i) {
                       json += "{\"a\":";
                     }
                     return json;
                   }()),
                   "unknown property 'a'"});
  cases.push_back({"NameOfAMegabyte",
                   Header(absl::StrCat("{\"", std::string(1 << 20, 'n'), "\":1}")),
                   "more than 65536 bytes"});
  cases.push_back({"NumberOfAMegabyte", Tensor("U8", std::string(1 << 20, '1'), "0,1", 1),
                   "more than 65536 bytes"});
  cases.push_back({"NumbersDividedByABlank", Tensor("U8", "1 1", "0,11", 11), "not valid JSON"});
}

void AddEntryCases(std::vector<SafetensorsCase>& cases) {
  cases.push_back({"EntryThatIsANumber", Entry("1"), "a number in an unexpected position"});
  cases.push_back({"EntryThatIsNull", Entry("null"), "null in an unexpected position"});
  cases.push_back({"EntryThatIsEmpty", Entry("{}"), "dtype is missing"});
  cases.push_back({"NoShape", Entry(R"({"dtype":"U8","data_offsets":[0,0]})"), "shape is missing"});
  cases.push_back({"NoOffsets", Entry(R"({"dtype":"U8","shape":[]})"), "data_offsets is missing"});
  cases.push_back({"UnknownProperty",
                   Entry(R"({"dtype":"U8","shape":[0],"data_offsets":[0,0],"strides":[1]})"),
                   "unknown property 'strides'"});
  cases.push_back({"PropertyTwice",
                   Entry(R"({"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]})"),
                   "dtype occurs twice"});
  cases.push_back({"UnknownDtype", Tensor("F128", "0", "0,0"), "unknown dtype 'F128'"});
  cases.push_back({"DtypeInLowerCase", Tensor("bf16", "0", "0,0"), "unknown dtype 'bf16'"});
  cases.push_back({"DtypeThatIsANumber", Entry(R"({"dtype":8,"shape":[],"data_offsets":[0,1]})", 1),
                   "a number in an unexpected position"});
  cases.push_back({"ShapeThatIsANumber",
                   Entry(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})", 1),
                   "a number in an unexpected position"});
  cases.push_back({"ShapeInAShape",
                   Entry(R"({"dtype":"U8","shape":[[1]],"data_offsets":[0,1]})", 1),
                   "an array in an unexpected position"});
  cases.push_back({"NegativeDimension", Tensor("U8", "-1", "0,1", 1), "a negative number"});
  cases.push_back({"FractionalDimension", Tensor("U8", "1.0", "0,1", 1), "not an integer"});
  cases.push_back({"ExponentInADimension", Tensor("U8", "1e0", "0,1", 1), "not an integer"});
  cases.push_back(
      {"DimensionBeyondTheSchema", Tensor("U8", "281474976710656", "0,1", 1), "exceeds 2^48 - 1"});
  cases.push_back({"LargestDimension", Tensor("U8", "0,281474976710655", "0,0"), ""});
  cases.push_back({"HugeDimension", Tensor("U8", "99999999999999999999999999", "0,1", 1),
                   "not an integer below 2^64"});
  cases.push_back({"ProductThatOverflows", Tensor("U8", "4294967296,4294967296", "0,0"),
                   "more than 2^63 elements"});
  cases.push_back(
      {"BitsThatOverflow", Tensor("F64", "2147483648,1073741824", "0,0"), "more than 2^63 bits"});
  cases.push_back({"OverflowHiddenByAZero", Tensor("U8", "4294967296,4294967296,0", "0,0"),
                   "more than 2^63 elements"});
  cases.push_back({"ManyDimensions",
                   Tensor("U8",
                          absl::StrCat("1",
                                       [] {
                                         std::string more;
                                         for (int i = 0; i < 64; ++i) {
                                           more += ",1";
                                         }
                                         return more;
                                       }()),
                          "0,1", 1),
                   "more than 64 dimensions"});
  cases.push_back({"HalfAByte", Tensor("F4", "3", "0,1", 1), "do not fill whole bytes"});
  cases.push_back({"PartOfAByte", Tensor("F6_E2M3", "3", "0,3", 3), "do not fill whole bytes"});
}

void AddOffsetCases(std::vector<SafetensorsCase>& cases) {
  cases.push_back({"SpanShorterThanTheShape", Tensor("F32", "2", "0,4", 4), "its shape needs 8"});
  cases.push_back({"SpanLongerThanTheShape", Tensor("F32", "2", "0,12", 12), "its shape needs 8"});
  cases.push_back({"EndBeforeBegin", Tensor("U8", "1", "2,1", 2), "before they begin at 2"});
  cases.push_back({"NegativeOffset", Tensor("U8", "1", "-1,0", 1), "a negative number"});
  cases.push_back({"FractionalOffset", Tensor("U8", "1", "0,1.0", 1), "not an integer"});
  cases.push_back({"ExponentInAnOffset", Tensor("U8", "1000000000", "0,1e9", 1), "not an integer"});
  cases.push_back({"HugeOffset", Tensor("U8", "1", "0,18446744073709551616", 1), "not an integer"});
  cases.push_back({"OffsetBeyondTheSchema", Tensor("U8", "1", "0,18446744073709551615", 1),
                   "exceeds 2^48 - 1"});
  cases.push_back({"OneOffset", Tensor("U8", "0", "0", 0), "must have 2 numbers"});
  cases.push_back({"ThreeOffsets", Tensor("U8", "0", "0,0,0", 0), "more than 2 numbers"});
  cases.push_back(
      {"OffsetsBeyondTheFile", Tensor("U8", "1000000000", "0,1000000000", 1), "truncated"});
  cases.push_back({"FirstTensorNotAtZero", Tensor("U8", "1", "1,2", 2), "leave a hole"});
  cases.push_back({"Hole", TwoTensors("0,4", "5,9", 9), "leave a hole"});
  cases.push_back({"Overlap", TwoTensors("0,4", "3,7", 7), "overlap"});
  cases.push_back({"SameBytesTwice", TwoTensors("0,4", "0,4", 4), "overlap"});
  cases.push_back({"OneTrailingByte", Tensor("U8", "4", "0,4", 5), "continues for 1 bytes"});
  cases.push_back({"TwoMissingBytes", Tensor("U8", "4", "0,4", 2), "truncated"});
  cases.push_back({"BytesWithoutTensors", Header("{}", 1), "continues for 1 bytes"});
}

void AddNameCases(std::vector<SafetensorsCase>& cases) {
  constexpr absl::string_view kEntry = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  cases.push_back({"NameTwice", Header(absl::StrCat(R"({"a":)", kEntry, R"(,"a":)", kEntry, "}")),
                   "'a': the name occurs twice"});
  cases.push_back({"NameTwiceInDisguise",
                   Header(absl::StrCat(R"({"a":)", kEntry, R"(,"\u0061":)", kEntry, "}")),
                   "'a': the name occurs twice"});
  cases.push_back({"MetadataTwice", Header(R"({"__metadata__":{},"__metadata__":{}})"),
                   "the name occurs twice"});
  cases.push_back({"MetadataNameTwice", Header(R"({"__metadata__":{"k":"1","k":"2"}})"),
                   "the name 'k' occurs twice"});
  cases.push_back(
      {"MetadataWithANumber", Header(R"({"__metadata__":{"k":1}})"), "all must be strings"});
  cases.push_back(
      {"MetadataWithAnObject", Header(R"({"__metadata__":{"k":{}}})"), "all must be strings"});
  cases.push_back(
      {"MetadataThatIsNull", Header(R"({"__metadata__":null})"), "null in an unexpected position"});
  cases.push_back({"NameWithControlCharacters", Header("{\"a\\u0000\\n\\u001b[31m\":1}"),
                   R"('a\x00\n\x1b[31m')"});
  cases.push_back({"NameWithARawControlCharacter", Header("{\"a\n\":1}"), "not valid JSON"});
}

void AddValidCases(std::vector<SafetensorsCase>& cases) {
  cases.push_back({"NoTensors", Header("{}"), ""});
  cases.push_back({"MetadataOnly", Header(R"({"__metadata__":{"format":"pt","":""}})"), ""});
  cases.push_back({"BlanksAround",
                   SafetensorsBytesOf(" \n\t {\"t\": {\"dtype\" : \"U8\", \"shape\":[ 1 , 1 ],\r\n"
                                      "\"data_offsets\":[0,1]}}     ",
                                      "x"),
                   ""});
  cases.push_back({"ScalarTensor", Tensor("F32", "", "0,4", 4), ""});
  cases.push_back({"ZeroDimension", Tensor("F32", "2,0,3", "0,0"), ""});
  cases.push_back({"EmptyTensorBetweenOthers",
                   Header(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                          R"("e":{"dtype":"U8","shape":[0],"data_offsets":[4,4]},)"
                          R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                          8),
                   ""});
  cases.push_back({"AnyOrder", TwoTensors("4,8", "0,4", 8), ""});
  cases.push_back({"UnalignedData", Tensor("F64", "1", "0,8", 8), ""});
  cases.push_back({"EvenNumberOfHalfBytes", Tensor("F4", "2,2", "0,2", 2), ""});
  cases.push_back({"FourOfSixBits", Tensor("F6_E3M2", "4", "0,3", 3), ""});
  cases.push_back({"EightBitFloats", Tensor("F8_E8M0", "3", "0,3", 3), ""});
  cases.push_back({"OrderOfPropertiesIsFree",
                   Entry(R"({"data_offsets":[0,1],"shape":[1],"dtype":"BOOL"})", 1), ""});
  cases.push_back(
      {"NameWithEscapes",
       Header(R"({"a\u0000\"\\\u00e4":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"), ""});
  cases.push_back(
      {"EmptyName", Header(R"({"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"), ""});
}

}  // namespace

std::vector<SafetensorsCase> SafetensorsCases() {
  std::vector<SafetensorsCase> cases;
  AddLengthCases(cases);
  AddJsonCases(cases);
  AddEntryCases(cases);
  AddOffsetCases(cases);
  AddNameCases(cases);
  AddValidCases(cases);
  return cases;
}

}  // namespace logprobd::testing
