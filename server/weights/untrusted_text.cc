#include "server/weights/untrusted_text.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace logprobd {
namespace {

constexpr int64_t kPieceBytes = int64_t{64} << 10;
constexpr int64_t kTokenBytesMax = int64_t{64} << 10;
constexpr int kDepthMax = 64;

bool IsWhiteSpace(int character) {
  return character == ' ' || character == '\t' || character == '\n' || character == '\r';
}

}  // namespace

GuardedJson::GuardedJson(const RandomAccessBytes& bytes, int64_t begin, int64_t end)
    : bytes_(bytes), begin_(begin), end_(end), position_(begin) {
  Advance();
}

void GuardedJson::Fail(absl::Status status) {
  status_ = std::move(status);
  current_ = -1;
}

// Returns the next character of the text, or -1 at its end or after an error.
int GuardedJson::Fetch() {
  if (piece_position_ == piece_.size()) {
    const int64_t length = std::min(kPieceBytes, end_ - position_);
    if (length <= 0) return -1;
    piece_.resize(static_cast<size_t>(length));
    piece_position_ = 0;
    const absl::Status status = bytes_.Read(position_, absl::MakeSpan(piece_));
    if (!status.ok()) {
      status_ = status;
      return -1;
    }
  }
  ++position_;
  return static_cast<int>(piece_[piece_position_++]);
}

void GuardedJson::Advance() {
  if (!status_.ok()) return;
  const bool token_may_go_on = token_bytes_ > 0;
  current_ = Fetch();
  if (!in_string_ && IsWhiteSpace(current_)) {
    if (token_may_go_on) {
      // Keeps one space, so that "1 2" does not become "12".
      token_bytes_ = 0;
      current_ = ' ';
      return;
    }
    do {
      current_ = Fetch();
    } while (IsWhiteSpace(current_));
  }
  if (current_ >= 0) Track(static_cast<char>(current_));
}

// Keeps track of strings, token length and nesting.
void GuardedJson::Track(char character) {
  if (in_string_) {
    if (after_backslash_) {
      after_backslash_ = false;
    } else if (character == '\\') {
      after_backslash_ = true;
    } else if (character == '"') {
      in_string_ = false;
      token_bytes_ = 0;
      return;
    }
  } else {
    switch (character) {
      case '\0':
        Fail(absl::InvalidArgumentError(absl::StrCat("there is a NUL at byte ", position() - 1)));
        return;
      case '{':
      case '[':
        token_bytes_ = 0;
        if (++depth_ > kDepthMax) {
          Fail(absl::InvalidArgumentError(absl::StrCat("the text is nested deeper than ", kDepthMax,
                                                       " levels at byte ", position() - 1)));
        }
        return;
      case '}':
      case ']':
        --depth_;
        token_bytes_ = 0;
        return;
      case ',':
      case ':':
        token_bytes_ = 0;
        return;
      case '"':
        in_string_ = true;
        token_bytes_ = 0;
        break;
      default:
        break;
    }
  }
  if (++token_bytes_ > kTokenBytesMax) {
    Fail(absl::InvalidArgumentError(absl::StrCat("a name, string or number has more than ",
                                                 kTokenBytesMax, " bytes before byte ",
                                                 position())));
  }
}

namespace {

constexpr size_t kNameBytesMax = 160;

bool IsContinuationByte(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

}  // namespace

std::string PrintableName(absl::string_view name) {
  if (name.size() <= kNameBytesMax) return absl::StrCat("'", absl::Utf8SafeCHexEscape(name), "'");
  size_t end = kNameBytesMax;
  while (end > 0 && IsContinuationByte(name[end])) --end;
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(name.substr(0, end)), "...' (", name.size(),
                      " bytes)");
}

}  // namespace logprobd
