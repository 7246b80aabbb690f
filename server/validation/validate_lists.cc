#include "server/validation/validate_lists.h"

#include <cstddef>

#include "absl/strings/str_cat.h"

namespace logprobd::internal {
namespace {

constexpr float kTemperatureMin = 1e-4F;
constexpr float kTemperatureMax = 1e4F;

bool IsTemperature(float value) { return value >= kTemperatureMin && value <= kTemperatureMax; }

absl::Status BadTemperature(absl::string_view what, float value) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": ", value, ", must be finite and in [1e-4, 1e4]"));
}

}  // namespace

absl::Status CheckTargets(absl::Span<const int32_t> targets, int64_t vocab, int32_t ignore_index) {
  const auto limit = static_cast<uint32_t>(vocab);
  const auto is_bad = [limit, ignore_index](int32_t target) {
    // A negative id is a large unsigned one; & instead of && keeps the loop without branches.
    return static_cast<uint32_t>(static_cast<uint32_t>(target) >= limit) &
           static_cast<uint32_t>(target != ignore_index);
  };
  uint32_t any_bad = 0;
  for (const int32_t target : targets) {
    any_bad |= is_bad(target);
  }
  if (any_bad == 0) {
    return absl::OkStatus();
  }
  size_t row = 0;
  while (is_bad(targets[row]) == 0) {
    ++row;
  }
  return absl::InvalidArgumentError(absl::StrCat("targets[", row, "]: ", targets[row],
                                                 ", must be in [0, ", vocab,
                                                 ") or the ignore_index ", ignore_index));
}

absl::Status CheckIds(absl::string_view field, absl::Span<const int32_t> ids, int64_t vocab) {
  const auto limit = static_cast<uint32_t>(vocab);
  uint32_t any_bad = 0;
  for (const int32_t id : ids) {
    any_bad |= static_cast<uint32_t>(static_cast<uint32_t>(id) >= limit);
  }
  if (any_bad == 0) {
    return absl::OkStatus();
  }
  size_t index = 0;
  while (static_cast<uint32_t>(ids[index]) < limit) {
    ++index;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(field, "[", index, "]: ", ids[index], ", must be in [0, ", vocab, ")"));
}

absl::Status CheckOffsets(absl::string_view field, absl::Span<const uint32_t> offsets,
                          int64_t total, absl::string_view total_name) {
  if (offsets.empty() || offsets.front() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, "[0]: ", offsets.empty() ? "missing" : absl::StrCat(offsets.front()),
                     ", must be 0"));
  }
  uint32_t any_fall = 0;
  for (size_t i = 1; i < offsets.size(); ++i) {
    any_fall |= static_cast<uint32_t>(offsets[i] < offsets[i - 1]);
  }
  if (any_fall != 0) {
    size_t index = 1;
    while (offsets[index] >= offsets[index - 1]) {
      ++index;
    }
    return absl::InvalidArgumentError(absl::StrCat(field, "[", index, "]: ", offsets[index],
                                                   ", must not be below the offset before it, ",
                                                   offsets[index - 1]));
  }
  if (static_cast<int64_t>(offsets.back()) != total) {
    return absl::InvalidArgumentError(absl::StrCat(field, "[", offsets.size() - 1,
                                                   "]: ", offsets.back(), ", must end at ",
                                                   total_name, ", ", total));
  }
  return absl::OkStatus();
}

absl::Status CheckTemperature(absl::string_view field, float value) {
  return IsTemperature(value) ? absl::OkStatus() : BadTemperature(field, value);
}

absl::Status CheckTemperatures(absl::string_view field, absl::Span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!IsTemperature(values[i])) {
      return BadTemperature(absl::StrCat(field, "[", i, "]"), values[i]);
    }
  }
  return absl::OkStatus();
}

}  // namespace logprobd::internal
