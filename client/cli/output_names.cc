#include "client/cli/output_names.h"

#include <algorithm>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace logprobd::client {

const std::vector<std::string>& OutputNames() {
  // Bit i of the wire's set is name i.
  static const std::vector<std::string> names = {
      "logprob", "entropy", "lse", "argmax", "greedy", "sum_p_squared", "max_logit", "min_logit"};
  return names;
}

absl::StatusOr<uint32_t> ParseOutputs(const std::vector<std::string>& names) {
  const std::vector<std::string>& known = OutputNames();
  uint32_t bits = 0;
  for (const std::string& name : names) {
    if (name == "all") {
      bits |= (1U << known.size()) - 1;
      continue;
    }
    const auto found = std::find(known.begin(), known.end(), name);
    if (found == known.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "output \"", name, "\" is not known: choose of ", absl::StrJoin(known, ", "), ", all"));
    }
    bits |= 1U << static_cast<size_t>(found - known.begin());
  }
  return bits;
}

}  // namespace logprobd::client
