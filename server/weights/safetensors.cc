#include "server/weights/safetensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {
namespace {

struct DtypeBits {
  absl::string_view name;
  int64_t bits;
};

constexpr std::array<DtypeBits, 22> kDtypes = {{
    {"BOOL", 8}, {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},   {"F8_E5M2", 8},     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"I16", 16}, {"F8_E5M2FNUZ", 8}, {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32}, {"U32", 32},        {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64}, {"U64", 64},
}};

}  // namespace

absl::StatusOr<int64_t> TensorBytes(absl::string_view dtype, const std::vector<int64_t>& shape) {
  const auto* known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                   [dtype](const DtypeBits& d) { return d.name == dtype; });
  if (known == kDtypes.end()) {
    return absl::InvalidArgumentError(absl::StrCat("unknown dtype ", PrintableName(dtype)));
  }
  int64_t bits = 1;
  for (const int64_t dimension : shape) {
    if (__builtin_mul_overflow(bits, dimension, &bits)) {
      return absl::InvalidArgumentError("its shape has more than 2^63 elements");
    }
  }
  if (__builtin_mul_overflow(bits, known->bits, &bits)) {
    return absl::InvalidArgumentError("its shape has more than 2^63 bits");
  }
  if (bits % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("its ", bits, " bits of ", dtype, " do not fill whole bytes"));
  }
  return bits / 8;
}

absl::Status CheckSpans(std::vector<std::pair<int64_t, int64_t>>& spans, int64_t data_bytes) {
  std::sort(spans.begin(), spans.end());
  int64_t expected = 0;
  for (const auto& [begin, end] : spans) {
    if (begin != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors ", begin < expected ? "overlap" : "leave a hole",
                       ": one begins at byte ", begin, " of the data instead of byte ", expected));
    }
    expected = end;
  }
  if (expected > data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the file is truncated: its tensors need ",
                                                   expected, " bytes after the header, but it has ",
                                                   data_bytes, "; download it again"));
  }
  if (expected < data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the file continues for ", data_bytes - expected,
                                                   " bytes after its last tensor"));
  }
  return absl::OkStatus();
}

namespace {

constexpr int64_t kLengthBytes = 8;
constexpr size_t kRankMax = 64;
constexpr absl::string_view kMetadata = "__metadata__";

// Receives the parser's events. For a tensor that is not selected, it keeps only the span and the
// hash of the name. A function that returns false stops the parser; status() then contains the
// reason.
class HeaderHandler {
 public:
  HeaderHandler(int64_t data_begin, absl::FunctionRef<bool(absl::string_view)> selects)
      : data_begin_(data_begin), selects_(selects) {}

  const absl::Status& status() const { return status_; }
  std::vector<std::pair<int64_t, int64_t>>& spans() { return spans_; }
  SafetensorsHeader TakeHeader() {
    header_.num_tensors = static_cast<int64_t>(spans_.size());
    return std::move(header_);
  }

  bool null() { return Unexpected("null"); }
  bool boolean(bool) { return Unexpected("a boolean"); }
  bool number_integer(int64_t) { return Unexpected("a negative number"); }
  bool number_float(double, const std::string&) {
    return Unexpected("a number that is not an integer below 2^64");
  }
  bool binary(std::vector<uint8_t>&) { return Unexpected("binary data"); }

  bool number_unsigned(uint64_t value) {
    if (position_ != Position::kShape && position_ != Position::kOffsets) {
      return Unexpected("a number");
    }
    if (value > static_cast<uint64_t>(kSafetensorsSizeMax)) {
      return Fail(absl::StrCat("the number ", value, " exceeds 2^48 - 1"));
    }
    auto& list = position_ == Position::kShape ? entry_.shape : offsets_;
    if (list.size() == (position_ == Position::kShape ? kRankMax : 2)) {
      return Fail(position_ == Position::kShape
                      ? absl::StrCat("it has more than ", kRankMax, " dimensions")
                      : std::string("data_offsets has more than 2 numbers"));
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) {
    if (position_ == Position::kMetadata) return true;
    if (position_ != Position::kField || field_ != Field::kDtype) return Unexpected("a string");
    entry_.dtype = value;
    position_ = Position::kEntry;
    return true;
  }

  bool start_object(size_t) {
    switch (position_) {
      case Position::kStart:
        position_ = Position::kTop;
        return true;
      case Position::kTop:
        position_ = entry_.name == kMetadata ? Position::kMetadata : Position::kEntry;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(std::string& value) {
    switch (position_) {
      case Position::kTop:
        return StartEntry(value);
      case Position::kMetadata:
        return AddMetadata(value);
      default:
        return StartField(value);
    }
  }

  bool end_object() {
    switch (position_) {
      case Position::kEntry:
        position_ = Position::kTop;
        return FinishEntry();
      case Position::kMetadata:
        position_ = Position::kTop;
        entry_ = {};
        return true;
      default:
        position_ = Position::kEnd;
        return true;
    }
  }

  bool start_array(size_t) {
    if (position_ != Position::kField || field_ == Field::kDtype) return Unexpected("an array");
    position_ = field_ == Field::kShape ? Position::kShape : Position::kOffsets;
    return true;
  }

  bool end_array() {
    position_ = Position::kEntry;
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

 private:
  enum class Position { kStart, kTop, kEntry, kField, kShape, kOffsets, kMetadata, kEnd };
  enum class Field { kDtype, kShape, kOffsets };

  bool Fail(absl::string_view what) {
    status_ = absl::InvalidArgumentError(
        entry_.name.empty() ? std::string(what)
                            : absl::StrCat(entry_.name == kMetadata ? "" : "tensor ",
                                           PrintableName(entry_.name), ": ", what));
    return false;
  }

  bool Unexpected(absl::string_view what) {
    switch (position_) {
      case Position::kStart:
        return Fail(absl::StrCat("the header is ", what, ", not an object"));
      case Position::kMetadata:
        return Fail(absl::StrCat("a value is ", what, "; all must be strings"));
      default:
        return Fail(absl::StrCat("there is ", what, " in an unexpected position"));
    }
  }

  bool AddMetadata(const std::string& name) {
    if (!metadata_names_.Insert(name)) {
      return Fail(absl::StrCat("the name ", PrintableName(name), " occurs twice"));
    }
    if (static_cast<int64_t>(metadata_names_.size()) > kSafetensorsTensorsMax) {
      return Fail(absl::StrCat("it has more than ", kSafetensorsTensorsMax, " entries"));
    }
    return true;
  }

  bool StartEntry(const std::string& name) {
    entry_ = {};
    entry_.name = name;
    offsets_.clear();
    fields_seen_ = {};
    if (!names_.Insert(name)) return Fail("the name occurs twice");
    if (static_cast<int64_t>(names_.size()) > kSafetensorsTensorsMax) {
      return Fail(absl::StrCat("the file has more than ", kSafetensorsTensorsMax, " tensors"));
    }
    return true;
  }

  bool StartField(const std::string& name) {
    if (name == "dtype") {
      field_ = Field::kDtype;
    } else if (name == "shape") {
      field_ = Field::kShape;
    } else if (name == "data_offsets") {
      field_ = Field::kOffsets;
    } else {
      return Fail(absl::StrCat("unknown property ", PrintableName(name)));
    }
    bool& seen = fields_seen_[static_cast<size_t>(field_)];
    if (seen) return Fail(absl::StrCat("the property ", name, " occurs twice"));
    seen = true;
    position_ = Position::kField;
    return true;
  }

  bool FinishEntry() {
    constexpr std::array<absl::string_view, 3> kFieldNames = {"dtype", "shape", "data_offsets"};
    for (size_t field = 0; field < kFieldNames.size(); ++field) {
      if (!fields_seen_[field]) {
        return Fail(absl::StrCat("the property ", kFieldNames[field], " is missing"));
      }
    }
    if (offsets_.size() != 2) return Fail("data_offsets must have 2 numbers");
    if (offsets_[1] < offsets_[0]) {
      return Fail(absl::StrCat("data_offsets end at ", offsets_[1], ", before they begin at ",
                               offsets_[0]));
    }
    const absl::StatusOr<int64_t> bytes = TensorBytes(entry_.dtype, entry_.shape);
    if (!bytes.ok()) return Fail(bytes.status().message());
    if (*bytes != offsets_[1] - offsets_[0]) {
      return Fail(absl::StrCat("its shape needs ", *bytes, " bytes, but its data_offsets span ",
                               offsets_[1] - offsets_[0]));
    }
    spans_.emplace_back(offsets_[0], offsets_[1]);
    if (selects_(entry_.name)) {
      entry_.file_begin = data_begin_ + offsets_[0];
      entry_.file_end = data_begin_ + offsets_[1];
      header_.tensors.push_back(std::move(entry_));
    }
    entry_ = {};
    return true;
  }

  int64_t data_begin_;
  absl::FunctionRef<bool(absl::string_view)> selects_;
  Position position_ = Position::kStart;
  Field field_ = Field::kDtype;
  TensorEntry entry_;
  std::vector<int64_t> offsets_;
  std::array<bool, 3> fields_seen_ = {};
  NameSet names_;
  NameSet metadata_names_;
  std::vector<std::pair<int64_t, int64_t>> spans_;
  SafetensorsHeader header_;
  absl::Status status_;
};

absl::StatusOr<int64_t> ReadHeaderLength(const RandomAccessBytes& file) {
  const int64_t file_bytes = file.size_bytes();
  if (file_bytes < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat("not a safetensors file: it has ", file_bytes,
                                                   " bytes, at least 8 are required"));
  }
  std::array<std::byte, kLengthBytes> bytes{};
  LOGPROBD_RETURN_IF_ERROR(file.Read(0, absl::MakeSpan(bytes)));
  uint64_t length = 0;
  for (size_t i = 0; i < bytes.size(); ++i) length |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  constexpr absl::string_view kLfsPointer = "version ";
  if (std::equal(bytes.begin(), bytes.end(), kLfsPointer.begin(),
                 [](std::byte a, char b) { return a == static_cast<std::byte>(b); })) {
    return absl::InvalidArgumentError(
        "not a safetensors file but a Git LFS pointer to one: run 'git lfs pull' in the folder");
  }
  if (length > static_cast<uint64_t>(kSafetensorsHeaderBytesMax)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the header is too large: ", length, " bytes, the limit is ", kSafetensorsHeaderBytesMax));
  }
  if (static_cast<int64_t>(length) > file_bytes - kLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header has ", length, " bytes, but only ", file_bytes - kLengthBytes,
                     " follow its length: the file is truncated or is not a safetensors file"));
  }
  return static_cast<int64_t>(length);
}

}  // namespace

const TensorEntry* SafetensorsHeader::Find(absl::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [name](const TensorEntry& entry) { return entry.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    const RandomAccessBytes& file, absl::FunctionRef<bool(absl::string_view)> selects) {
  LOGPROBD_ASSIGN_OR_RETURN(const int64_t header_bytes, ReadHeaderLength(file));
  const int64_t data_begin = kLengthBytes + header_bytes;
  GuardedJson json(file, kLengthBytes, data_begin);
  // Also refuses a byte order mark, which the parser would skip.
  if (json.status().ok() && json.current() != '{') {
    return absl::InvalidArgumentError("the header is not a JSON object");
  }
  HeaderHandler handler(data_begin, selects);
  const bool parsed = nlohmann::json::sax_parse(json.begin(), GuardedJson::end(), &handler);
  if (!json.status().ok()) return WithContext(json.status(), "header");
  if (!handler.status().ok()) return handler.status();
  if (!parsed) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header is not valid JSON in UTF-8, near its byte ", json.position()));
  }
  LOGPROBD_RETURN_IF_ERROR(CheckSpans(handler.spans(), file.size_bytes() - data_begin));
  return handler.TakeHeader();
}

namespace {

constexpr int64_t kIndexBytesMax = 100'000'000;
constexpr size_t kIndexTensorsMax = 1'000'000;

// Receives the parser's events for {"metadata": anything, "weight_map": {name: file}, ...}.
class IndexHandler {
 public:
  explicit IndexHandler(absl::FunctionRef<bool(absl::string_view)> selects) : selects_(selects) {}

  const absl::Status& status() const { return status_; }
  bool has_weight_map() const { return has_weight_map_; }
  WeightMap TakeWeightMap() { return std::move(weight_map_); }

  bool null() { return Value(); }
  bool boolean(bool) { return Value(); }
  bool number_integer(int64_t) { return Value(); }
  bool number_unsigned(uint64_t) { return Value(); }
  bool number_float(double, const std::string&) { return Value(); }
  bool binary(std::vector<uint8_t>&) { return Value(); }

  bool string(std::string& value) {
    if (!InWeightMap()) return Value();
    if (absl::Status status = CheckShardName(value); !status.ok()) {
      status_ = WithContext(status, PrintableName(name_));
      return false;
    }
    if (selects_(name_)) weight_map_[name_] = value;
    return true;
  }

  bool start_object(size_t) {
    if (depth_ == 1 && section_is_weight_map_) {
      has_weight_map_ = true;
    } else if (!Value()) {
      return false;
    }
    ++depth_;
    return true;
  }

  bool key(std::string& value) {
    if (depth_ == 1) {
      section_is_weight_map_ = value == "weight_map";
      return !(section_is_weight_map_ && has_weight_map_) || Fail("weight_map occurs twice");
    }
    if (!InWeightMap()) return true;
    name_ = value;
    if (!names_.Insert(value)) {
      return Fail(absl::StrCat("the name ", PrintableName(value), " occurs twice"));
    }
    return names_.size() <= kIndexTensorsMax ||
           Fail(absl::StrCat("the index has more than ", kIndexTensorsMax, " tensors"));
  }

  bool end_object() {
    --depth_;
    return true;
  }
  bool start_array(size_t) {
    if (!Value()) return false;
    ++depth_;
    return true;
  }
  bool end_array() {
    --depth_;
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

 private:
  bool InWeightMap() const { return depth_ == 2 && section_is_weight_map_; }

  // Handles any value except a string in the weight map.
  bool Value() {
    if (InWeightMap()) {
      return Fail(absl::StrCat(PrintableName(name_), " is mapped to something other than a file"));
    }
    return !(depth_ == 1 && section_is_weight_map_) || Fail("weight_map is not an object");
  }

  bool Fail(absl::string_view what) {
    status_ = absl::InvalidArgumentError(what);
    return false;
  }

  absl::FunctionRef<bool(absl::string_view)> selects_;
  int depth_ = 0;
  bool section_is_weight_map_ = false;
  bool has_weight_map_ = false;
  std::string name_;
  NameSet names_;
  WeightMap weight_map_;
  absl::Status status_;
};

}  // namespace

absl::Status CheckShardName(absl::string_view file_name) {
  if (absl::StartsWith(file_name, "/")) {
    return absl::PermissionDeniedError(
        absl::StrCat("the path ", PrintableName(file_name), " is absolute"));
  }
  for (const absl::string_view part : absl::StrSplit(file_name, '/')) {
    if (part == "..") {
      return absl::PermissionDeniedError(
          absl::StrCat("the path ", PrintableName(file_name), " leaves the model folder"));
    }
  }
  if (!absl::EndsWith(file_name, ".safetensors") || file_name.find('\0') != file_name.npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(PrintableName(file_name), " is not the name of a .safetensors file"));
  }
  return absl::OkStatus();
}

absl::StatusOr<WeightMap> ReadSafetensorsIndex(const RandomAccessBytes& file,
                                               absl::FunctionRef<bool(absl::string_view)> selects) {
  if (file.size_bytes() > kIndexBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("the index is too large: ", file.size_bytes(),
                                                   " bytes, the limit is ", kIndexBytesMax));
  }
  GuardedJson json(file, 0, file.size_bytes());
  if (json.status().ok() && json.current() != '{') {
    return absl::InvalidArgumentError("the index is not a JSON object");
  }
  IndexHandler handler(selects);
  const bool parsed = nlohmann::json::sax_parse(json.begin(), GuardedJson::end(), &handler);
  LOGPROBD_RETURN_IF_ERROR(json.status());
  LOGPROBD_RETURN_IF_ERROR(handler.status());
  if (!parsed) {
    return absl::InvalidArgumentError(
        absl::StrCat("the index is not valid JSON in UTF-8, near its byte ", json.position()));
  }
  if (!handler.has_weight_map()) return absl::InvalidArgumentError("the index has no weight_map");
  return handler.TakeWeightMap();
}

}  // namespace logprobd
