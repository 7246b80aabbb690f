#include "server/weights/safetensors_index.h"

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/base/errors.h"
#include "server/weights/guarded_json.h"
#include "server/weights/name_set.h"
#include "server/weights/printable_name.h"

namespace logprobd {
namespace {

constexpr int64_t kIndexBytesMax = 100'000'000;
constexpr size_t kIndexTensorsMax = 1'000'000;

// Takes the parser's events: {"metadata": anything, "weight_map": {name: file}, ...}.
class IndexHandler {
 public:
  explicit IndexHandler(absl::FunctionRef<bool(absl::string_view)> wanted) : wanted_(wanted) {}

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
    if (!InWeightMap()) {
      return Value();
    }
    if (absl::Status status = CheckShardName(value); !status.ok()) {
      status_ = WithContext(status, PrintableName(name_));
      return false;
    }
    if (wanted_(name_)) {
      weight_map_[name_] = value;
    }
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
    if (!InWeightMap()) {
      return true;
    }
    name_ = value;
    if (!names_.Insert(value)) {
      return Fail(absl::StrCat("the name ", PrintableName(value), " occurs twice"));
    }
    return names_.size() <= kIndexTensorsMax ||
           Fail(absl::StrCat("more than ", kIndexTensorsMax, " tensors"));
  }

  bool end_object() {
    --depth_;
    return true;
  }
  bool start_array(size_t) {
    if (!Value()) {
      return false;
    }
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

  // Anything but a string in the weight map, or anything anywhere else.
  bool Value() {
    if (InWeightMap()) {
      return Fail(absl::StrCat(PrintableName(name_), " is mapped to something else than a file"));
    }
    return !(depth_ == 1 && section_is_weight_map_) || Fail("weight_map is not an object");
  }

  bool Fail(absl::string_view what) {
    status_ = absl::InvalidArgumentError(what);
    return false;
  }

  absl::FunctionRef<bool(absl::string_view)> wanted_;
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
        absl::StrCat(PrintableName(file_name), " is no name of a .safetensors file"));
  }
  return absl::OkStatus();
}

absl::StatusOr<WeightMap> ReadSafetensorsIndex(const RandomAccessBytes& file,
                                               absl::FunctionRef<bool(absl::string_view)> wanted) {
  if (file.size_bytes() > kIndexBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("the index is too large: ", file.size_bytes(),
                                                   " bytes, the limit is ", kIndexBytesMax));
  }
  GuardedJson json(file, 0, file.size_bytes());
  if (json.status().ok() && json.current() != '{') {
    return absl::InvalidArgumentError("the index is not a JSON object");
  }
  IndexHandler handler(wanted);
  const bool parsed = nlohmann::json::sax_parse(json.begin(), GuardedJson::end(), &handler);
  LOGPROBD_RETURN_IF_ERROR(json.status());
  LOGPROBD_RETURN_IF_ERROR(handler.status());
  if (!parsed) {
    return absl::InvalidArgumentError(
        absl::StrCat("the index is not valid JSON in UTF-8, near its byte ", json.position()));
  }
  if (!handler.has_weight_map()) {
    return absl::InvalidArgumentError("the index has no weight_map");
  }
  return handler.TakeWeightMap();
}

}  // namespace logprobd
