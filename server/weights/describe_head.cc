#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/base/head_info.h"
#include "server/weights/head_weights.h"

namespace logprobd {

std::string DescribeHead(const HeadInfo& head) {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  const std::string cap =
      head.softcap > 0 ? absl::StrCat("cap ", head.softcap) : std::string("no cap");
  return absl::StrFormat("%s: hidden %d, vocab %d of %d rows, %s%s, %s, scale %g, %s, %s, %.1f MiB",
                         head.model_type, head.hidden_size, head.vocab_size, head.vocab_rows,
                         head.tensor, head.tied ? " (tied)" : "", DtypeName(head.dtype), head.scale,
                         cap, head.has_bias ? "bias" : "no bias",
                         static_cast<double>(head.weight_bytes) / kMebibyte);
}

}  // namespace logprobd
