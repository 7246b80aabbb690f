#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "absl/status/status.h"
#include "server/weights/random_access_bytes.h"

namespace logprobd {

/// The characters of a JSON text inside `bytes`, fetched in pieces and made harmless for a parser:
/// white space between tokens is left out, and the text ends early, with an error in status(), at a
/// NUL between tokens (some parsers stop there in silence), at a token of more than 64 KiB, at
/// nesting deeper than 64, or where the bytes cannot be read. So a parser over it needs little
/// memory, whatever the text. One thread.
class GuardedJson {
 public:
  /// The text is [begin, end) of `bytes`, which must outlive this.
  GuardedJson(const RandomAccessBytes& bytes, int64_t begin, int64_t end);

  /// Why the text ended early, or OK.
  const absl::Status& status() const { return status_; }

  /// Bytes fetched from the text so far: where a parser that failed stood.
  int64_t position() const { return position_ - begin_; }

  /// The current character, or -1 at the end.
  int current() const { return current_; }
  void Advance();

  /// What a parser that takes a pair of iterators gets. Copies share one place in the text.
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

}  // namespace logprobd
