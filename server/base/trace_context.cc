#include "server/base/trace_context.h"

#include <algorithm>

namespace logprobd {
namespace {

constexpr size_t kTraceIdBegin = 3;
constexpr size_t kTraceIdBytes = 32;
constexpr size_t kSpanIdBegin = 36;
constexpr size_t kSpanIdBytes = 16;

bool IsHex(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

bool IsZero(absl::string_view id) { return id.find_first_not_of('0') == absl::string_view::npos; }

}  // namespace

TraceContext TraceContext::Parse(absl::string_view traceparent) {
  constexpr absl::string_view kForm = "xx-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-xxxxxxxxxxxxxxxx-xx";
  static_assert(kForm.size() == kTextBytes);
  const absl::string_view known = traceparent.substr(0, kTextBytes);
  const bool has_form =
      std::equal(known.begin(), known.end(), kForm.begin(), kForm.end(),
                 [](char c, char form) { return form == 'x' ? IsHex(c) : c == form; });
  if (!has_form || known.substr(0, 2) == "ff" ||
      IsZero(known.substr(kTraceIdBegin, kTraceIdBytes)) ||
      IsZero(known.substr(kSpanIdBegin, kSpanIdBytes))) {
    return {};
  }
  if (traceparent.size() > kTextBytes &&
      (known.substr(0, 2) == "00" || traceparent[kTextBytes] != '-')) {
    return {};
  }
  TraceContext context;
  std::copy(known.begin(), known.end(), context.text_.begin());
  return context;
}

absl::string_view TraceContext::traceparent() const {
  return {text_.data(), empty() ? 0 : kTextBytes};
}

absl::string_view TraceContext::trace_id() const {
  return empty() ? absl::string_view() : traceparent().substr(kTraceIdBegin, kTraceIdBytes);
}

}  // namespace logprobd
