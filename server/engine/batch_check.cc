#include "server/engine/batch_check.h"

#include "absl/strings/str_cat.h"

namespace logprobd {

absl::Status CheckBatchFits(const ScoreBatch& batch, int64_t batch_rows_max, int32_t top_k_max) {
  if (batch.num_rows >= 1 && batch.num_rows <= batch_rows_max && batch.top_k >= 0 &&
      batch.top_k <= top_k_max) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("batch of ", batch.num_rows, " rows with top-k ",
                                                 batch.top_k, ", the engine takes 1 to ",
                                                 batch_rows_max, " rows and top-k to ", top_k_max));
}

}  // namespace logprobd
