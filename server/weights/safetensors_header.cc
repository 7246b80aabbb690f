#include "server/weights/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/weights/guarded_json.h"
#include "server/weights/name_set.h"
#include "server/weights/printable_name.h"
#include "server/weights/tensor_layout.h"

namespace logprobd {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr size_t kRankMax = 64;
constexpr absl::string_view kMetadata = "__metadata__";

// Takes the parser's events; keeps nothing of an unwanted tensor but its span and its name's hash.
// Returning false stops the parser; status() then says why.
class HeaderHandler {
 public:
  HeaderHandler(int64_t data_begin, absl::FunctionRef<bool(absl::string_view)> wanted)
      : data_begin_(data_begin), wanted_(wanted) {}

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
    return Unexpected("a number that is no integer below 2^64");
  }
  bool binary(std::vector<uint8_t>&) { return Unexpected("binary data"); }

  bool number_unsigned(uint64_t value) {
    if (place_ != Place::kShape && place_ != Place::kOffsets) {
      return Unexpected("a number");
    }
    if (value > static_cast<uint64_t>(kSafetensorsSizeMax)) {
      return Fail(absl::StrCat("the number ", value, " is beyond 2^48 - 1"));
    }
    auto& list = place_ == Place::kShape ? entry_.shape : offsets_;
    if (list.size() == (place_ == Place::kShape ? kRankMax : 2)) {
      return Fail(place_ == Place::kShape ? absl::StrCat("more than ", kRankMax, " dimensions")
                                          : std::string("data_offsets has more than 2 numbers"));
    }
    list.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::kMetadata) {
      return true;
    }
    if (place_ != Place::kField || field_ != Field::kDtype) {
      return Unexpected("a string");
    }
    entry_.dtype = value;
    place_ = Place::kEntry;
    return true;
  }

  bool start_object(size_t) {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        place_ = entry_.name == kMetadata ? Place::kMetadata : Place::kEntry;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(std::string& value) {
    switch (place_) {
      case Place::kTop:
        return StartEntry(value);
      case Place::kMetadata:
        return AddMetadata(value);
      default:
        return StartField(value);
    }
  }

  bool end_object() {
    switch (place_) {
      case Place::kEntry:
        place_ = Place::kTop;
        return FinishEntry();
      case Place::kMetadata:
        place_ = Place::kTop;
        entry_ = {};
        return true;
      default:
        place_ = Place::kEnd;
        return true;
    }
  }

  bool start_array(size_t) {
    if (place_ != Place::kField || field_ == Field::kDtype) {
      return Unexpected("an array");
    }
    place_ = field_ == Field::kShape ? Place::kShape : Place::kOffsets;
    return true;
  }

  bool end_array() {
    place_ = Place::kEntry;
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

 private:
  enum class Place { kStart, kTop, kEntry, kField, kShape, kOffsets, kMetadata, kEnd };
  enum class Field { kDtype, kShape, kOffsets };

  bool Fail(absl::string_view what) {
    status_ = absl::InvalidArgumentError(
        entry_.name.empty() ? std::string(what)
                            : absl::StrCat(entry_.name == kMetadata ? "" : "tensor ",
                                           PrintableName(entry_.name), ": ", what));
    return false;
  }

  bool Unexpected(absl::string_view what) {
    switch (place_) {
      case Place::kStart:
        return Fail(absl::StrCat("the header is ", what, ", not an object"));
      case Place::kMetadata:
        return Fail(absl::StrCat("a value is ", what, "; all must be strings"));
      default:
        return Fail(absl::StrCat(what, " where it does not belong"));
    }
  }

  bool AddMetadata(const std::string& name) {
    if (!metadata_names_.Insert(name)) {
      return Fail(absl::StrCat("the name ", PrintableName(name), " occurs twice"));
    }
    if (static_cast<int64_t>(metadata_names_.size()) > kSafetensorsTensorsMax) {
      return Fail(absl::StrCat("more than ", kSafetensorsTensorsMax, " entries"));
    }
    return true;
  }

  bool StartEntry(const std::string& name) {
    entry_ = {};
    entry_.name = name;
    offsets_.clear();
    fields_seen_ = {};
    if (!names_.Insert(name)) {
      return Fail("the name occurs twice");
    }
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
    if (seen) {
      return Fail(absl::StrCat("the property ", name, " occurs twice"));
    }
    seen = true;
    place_ = Place::kField;
    return true;
  }

  bool FinishEntry() {
    constexpr std::array<absl::string_view, 3> kFieldNames = {"dtype", "shape", "data_offsets"};
    for (size_t field = 0; field < kFieldNames.size(); ++field) {
      if (!fields_seen_[field]) {
        return Fail(absl::StrCat("the property ", kFieldNames[field], " is missing"));
      }
    }
    if (offsets_.size() != 2) {
      return Fail("data_offsets must have 2 numbers");
    }
    if (offsets_[1] < offsets_[0]) {
      return Fail(absl::StrCat("data_offsets end at ", offsets_[1], ", before they begin at ",
                               offsets_[0]));
    }
    const absl::StatusOr<int64_t> bytes = TensorBytes(entry_.dtype, entry_.shape);
    if (!bytes.ok()) {
      return Fail(bytes.status().message());
    }
    if (*bytes != offsets_[1] - offsets_[0]) {
      return Fail(absl::StrCat("its shape needs ", *bytes, " bytes, its data_offsets span ",
                               offsets_[1] - offsets_[0]));
    }
    spans_.emplace_back(offsets_[0], offsets_[1]);
    if (wanted_(entry_.name)) {
      entry_.file_begin = data_begin_ + offsets_[0];
      entry_.file_end = data_begin_ + offsets_[1];
      header_.tensors.push_back(std::move(entry_));
    }
    entry_ = {};
    return true;
  }

  int64_t data_begin_;
  absl::FunctionRef<bool(absl::string_view)> wanted_;
  Place place_ = Place::kStart;
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
    return absl::InvalidArgumentError(
        absl::StrCat("not a safetensors file: it has ", file_bytes, " bytes, 8 are the least"));
  }
  std::array<std::byte, kLengthBytes> bytes{};
  LOGPROBD_RETURN_IF_ERROR(file.Read(0, absl::MakeSpan(bytes)));
  uint64_t length = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    length |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  }
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
                     " follow its length: the file is cut short or is no safetensors file"));
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
    const RandomAccessBytes& file, absl::FunctionRef<bool(absl::string_view)> wanted) {
  LOGPROBD_ASSIGN_OR_RETURN(const int64_t header_bytes, ReadHeaderLength(file));
  const int64_t data_begin = kLengthBytes + header_bytes;
  GuardedJson json(file, kLengthBytes, data_begin);
  // Also keeps out a byte order mark, which the parser would skip.
  if (json.status().ok() && json.current() != '{') {
    return absl::InvalidArgumentError("the header is not a JSON object");
  }
  HeaderHandler handler(data_begin, wanted);
  const bool parsed = nlohmann::json::sax_parse(json.begin(), GuardedJson::end(), &handler);
  if (!json.status().ok()) {
    return WithContext(json.status(), "header");
  }
  if (!handler.status().ok()) {
    return handler.status();
  }
  if (!parsed) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header is not valid JSON in UTF-8, near its byte ", json.position()));
  }
  LOGPROBD_RETURN_IF_ERROR(CheckSpans(handler.spans(), file.size_bytes() - data_begin));
  return handler.TakeHeader();
}

}  // namespace logprobd
