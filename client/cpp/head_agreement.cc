#include "client/cpp/head_agreement.h"

#include <algorithm>
#include <cstdint>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace logprobd::client {
namespace {

std::set<std::string> Names(const ServerInfo& info) {
  std::set<std::string> names;
  for (const Head& head : info.heads) names.insert(head.name);
  return names;
}

const Head* FindHead(const ServerInfo& info, const std::string& name) {
  const auto found = std::find_if(info.heads.begin(), info.heads.end(),
                                  [&name](const Head& head) { return head.name == name; });
  return found == info.heads.end() ? nullptr : &*found;
}

/// A limit of 0 means that it is not known.
void Tighten(int64_t other, int64_t* limit) {
  if (other > 0) *limit = *limit > 0 ? std::min(*limit, other) : other;
}

}  // namespace

std::string DescribeDifference(const ServerInfo& first, const ServerInfo& second) {
  if (Names(first) != Names(second)) {
    return absl::StrCat("their names are \"", absl::StrJoin(Names(first), ", "), "\" and \"",
                        absl::StrJoin(Names(second), ", "), "\"");
  }
  for (const Head& head : first.heads) {
    const Head& other = *FindHead(second, head.name);
    const auto differ = [&head](const char* fact, const auto& a, const auto& b) {
      return absl::StrCat(fact, " of \"", head.name, "\" is ", a, " and ", b);
    };
    if (head.model_type != other.model_type) {
      return differ("model_type", head.model_type, other.model_type);
    }
    if (head.vocab_size != other.vocab_size) {
      return differ("vocab_size", head.vocab_size, other.vocab_size);
    }
    if (head.hidden_size != other.hidden_size) {
      return differ("hidden_size", head.hidden_size, other.hidden_size);
    }
    if (head.dtype != other.dtype) {
      return differ("dtype", DtypeName(head.dtype), DtypeName(other.dtype));
    }
    if (head.scale != other.scale) return differ("scale", head.scale, other.scale);
    if (head.softcap != other.softcap) return differ("softcap", head.softcap, other.softcap);
    if (head.has_bias != other.has_bias) {
      return differ("has_bias", head.has_bias ? "true" : "false",
                    other.has_bias ? "true" : "false");
    }
  }
  return "";
}

ServerInfo TightestLimits(const std::vector<ServerInfo>& servers) {
  ServerInfo tightest = servers.front();
  for (Head& head : tightest.heads) {
    for (const ServerInfo& server : servers) {
      const Head* const other = FindHead(server, head.name);
      if (other == nullptr) continue;
      Tighten(other->limits.message_bytes_max, &head.limits.message_bytes_max);
      Tighten(other->limits.request_rows_max, &head.limits.request_rows_max);
      Tighten(other->limits.top_k_max, &head.limits.top_k_max);
      Tighten(other->limits.candidates_max, &head.limits.candidates_max);
      Tighten(other->limits.segments_max, &head.limits.segments_max);
      Tighten(other->limits.stream_window, &head.limits.stream_window);
    }
  }
  return tightest;
}

}  // namespace logprobd::client
