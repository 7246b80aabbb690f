#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Finds names that occur twice, in 16 bytes a name however long they are. Two different names
/// count as one with a probability of about 2^-88 for the longest list that we read; a repetition
/// is never missed.
class NameSet {
 public:
  /// Whether `name` is new.
  bool Insert(absl::string_view name) {
    return hashes_.insert({HashWith(1, name), HashWith(2, name)}).second;
  }

  size_t size() const { return hashes_.size(); }

 private:
  static uint64_t HashWith(uint64_t salt, absl::string_view name) {
    return absl::Hash<std::pair<uint64_t, absl::string_view>>{}({salt, name});
  }

  absl::flat_hash_set<std::pair<uint64_t, uint64_t>> hashes_;
};

}  // namespace logprobd
