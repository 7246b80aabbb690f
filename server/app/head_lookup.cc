#include "server/app/head_lookup.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

/// A head takes seconds to load: a client that asks again each second adds little.
constexpr absl::Duration kLoadingRetry = absl::Seconds(1);
/// Names are the client's; what is repeated to it stays short.
constexpr size_t kNameBytesShown = 64;

}  // namespace

absl::StatusOr<size_t> FindHead(const std::vector<std::string>& names, absl::string_view name) {
  if (name.empty() && names.size() == 1) {
    return 0;
  }
  if (name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("head: must be named, since there are several: ", absl::StrJoin(names, ", ")));
  }
  const auto found = absl::c_find(names, name);
  if (found == names.end()) {
    return absl::NotFoundError(absl::StrCat("head: no \"", CutUtf8(name, kNameBytesShown),
                                            "\" here; there is: ", absl::StrJoin(names, ", ")));
  }
  return static_cast<size_t>(found - names.begin());
}

absl::Status HeadIsLoading(const std::vector<std::string>& names, size_t index) {
  const std::string whose = names.size() == 1 ? "" : absl::StrCat("head \"", names[index], "\": ");
  return WithRetryAfter(absl::UnavailableError(absl::StrCat(whose, "the weights are being loaded")),
                        kLoadingRetry);
}

}  // namespace logprobd
