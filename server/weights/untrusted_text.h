#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/weights/regular_file.h"

// Helpers for text from model files, which may be malformed or hostile. They parse JSON in bounded
// memory, detect repeated names, and make names safe to print.

namespace logprobd {

/// Gives a parser the characters of a JSON text inside `bytes`, so that the parser needs little
/// memory for any text. Fetches the text in pieces and leaves out white space between tokens.
/// The text ends early, with an error in status(), at
///   - a NUL between tokens, where some parsers would stop silently;
///   - a token of more than 64 KiB;
///   - nesting deeper than 64 levels;
///   - bytes that cannot be read.
/// Not thread-safe.
class GuardedJson {
 public:
  /// The text is [begin, end) of `bytes`, which must outlive this object.
  GuardedJson(const RandomAccessBytes& bytes, int64_t begin, int64_t end);

  /// Returns why the text ended early, or OK.
  const absl::Status& status() const { return status_; }

  /// Number of bytes fetched from the text so far; after an error, the position of the error.
  int64_t position() const { return position_ - begin_; }

  /// Returns the current character, or -1 at the end of the text.
  int current() const { return current_; }
  void Advance();

  /// Iterator for parsers that take a pair of iterators. Copies share one position in the text.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = char;

    Iterator() = default;
    explicit Iterator(GuardedJson* json) : json_(json) {}

    char operator*() const { return static_cast<char>(json_->current()); }
    Iterator& operator++() {
      json_->Advance();
      return *this;
    }
    Iterator operator++(int) {
      Iterator before = *this;
      json_->Advance();
      return before;
    }
    friend bool operator==(const Iterator& a, const Iterator& b) { return a.AtEnd() == b.AtEnd(); }
    friend bool operator!=(const Iterator& a, const Iterator& b) { return !(a == b); }

   private:
    bool AtEnd() const { return json_ == nullptr || json_->current() < 0; }
    GuardedJson* json_ = nullptr;
  };

  Iterator begin() { return Iterator(this); }
  static Iterator end() { return {}; }

 private:
  int Fetch();
  void Track(char character);
  void Fail(absl::Status status);

  const RandomAccessBytes& bytes_;
  int64_t begin_;
  int64_t end_;
  int64_t position_;
  std::vector<std::byte> piece_;
  size_t piece_position_ = 0;
  int current_ = -1;
  bool in_string_ = false;
  bool after_backslash_ = false;
  int64_t token_bytes_ = 0;
  int depth_ = 0;
  absl::Status status_;
};

/// Finds names that occur twice, with 16 bytes of memory per name however long the names are. Never
/// misses a repetition. The probability that it reports one although all names differ is about
/// 2^-88 for the longest list that we read.
class NameSet {
 public:
  /// Adds `name`. Returns whether it is new.
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

/// Formats a name from a file for a message: in single quotes, with control characters and
/// invalid UTF-8 escaped, cut after 160 bytes.
std::string PrintableName(absl::string_view name);

}  // namespace logprobd
