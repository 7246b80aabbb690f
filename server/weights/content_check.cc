#include "server/weights/content_check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/base/sha256.h"

namespace logprobd {
namespace {

/// Size of a block, which is small enough to stay in a core's cache while it is read, hashed and
/// checked.
constexpr int64_t kBlockBytes = int64_t{1} << 20;

/// Returns whether any element's exponent is all ones. The loop has no branch, so that the compiler
/// vectorizes it.
template <typename T, T kExponent>
bool HasNonfinite(absl::Span<const std::byte> bytes) {
  uint32_t found = 0;
  for (size_t i = 0; i + sizeof(T) <= bytes.size(); i += sizeof(T)) {
    T bits;
    std::memcpy(&bits, &bytes[i], sizeof(T));
    found |= static_cast<uint32_t>((bits & kExponent) == kExponent);
  }
  return found != 0;
}

bool HasNonfinite(absl::Span<const std::byte> bytes, Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return HasNonfinite<uint16_t, 0x7F80>(bytes);
    case Dtype::kF16:
      return HasNonfinite<uint16_t, 0x7C00>(bytes);
    case Dtype::kF32:
      break;
  }
  return HasNonfinite<uint32_t, 0x7F800000>(bytes);
}

/// Returns a text that names the first non-finite element of `rows`, which start at row `row_begin`
/// and contain at least one.
std::string NameElement(absl::Span<const std::byte> rows, int64_t row_begin, const HeadInfo& info) {
  const auto element_bytes = static_cast<size_t>(DtypeBytes(info.dtype));
  size_t index = 0;
  while (!HasNonfinite(rows.subspan(index * element_bytes, element_bytes), info.dtype)) ++index;
  const auto hidden = static_cast<size_t>(info.hidden_size);
  return absl::StrCat("row ", row_begin + static_cast<int64_t>(index / hidden), " column ",
                      index % hidden, " is NaN or Inf");
}

/// Returns a text that names the first NaN or Inf of `rows`, which start at row `row_begin` and lie
/// side by side, or an empty text.
std::string NonfiniteInRows(absl::Span<const std::byte> rows, int64_t row_begin,
                            const HeadInfo& info) {
  return HasNonfinite(rows, info.dtype) ? NameElement(rows, row_begin, info) : "";
}

/// The same for elements [begin, end) of the bias, which may be absent.
std::string NonfiniteInBias(const std::vector<float>& bias, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < std::min(end, static_cast<int64_t>(bias.size())); ++row) {
    if (!std::isfinite(bias[static_cast<size_t>(row)])) {
      return absl::StrCat("the bias of row ", row, " is NaN or Inf");
    }
  }
  return "";
}

}  // namespace

absl::StatusOr<ContentCheck> CheckContent(
    const HeadWeights& weights,
    const std::function<bool(int64_t done_bytes, int64_t total_bytes)>& progress) {
  const HeadInfo& info = weights.info();
  const int64_t row_bytes = info.hidden_size * DtypeBytes(info.dtype);
  const int64_t total_bytes = info.vocab_rows * row_bytes;
  const int64_t block_rows = std::clamp(kBlockBytes / row_bytes, int64_t{1}, info.vocab_rows);
  std::vector<std::byte> block(static_cast<size_t>(block_rows * row_bytes));
  ContentCheck result;
  Sha256 sha256;
  for (int64_t row = 0; row < info.vocab_rows; row += block_rows) {
    if (progress && !progress(row * row_bytes, total_bytes)) {
      return absl::CancelledError("stopped while checking the weights");
    }
    const int64_t end = std::min(row + block_rows, info.vocab_rows);
    LOGPROBD_RETURN_IF_ERROR(weights.ReadRows(row, end, block.data(), row_bytes));
    const auto bytes =
        absl::MakeConstSpan(block).first(static_cast<size_t>((end - row) * row_bytes));
    sha256.Add(bytes);
    const int64_t valid_rows = std::clamp(info.vocab_size - row, int64_t{0}, end - row);
    const auto valid = bytes.first(static_cast<size_t>(valid_rows * row_bytes));
    if (result.nonfinite.empty()) result.nonfinite = NonfiniteInRows(valid, row, info);
  }
  sha256.Add(weights.stored_bias());
  if (result.nonfinite.empty()) {
    result.nonfinite = NonfiniteInBias(weights.bias(), 0, info.vocab_size);
  }
  LOGPROBD_ASSIGN_OR_RETURN(result.sha256, sha256.Hex());
  if (progress) (void)progress(total_bytes, total_bytes);
  return result;
}

absl::Status NotFinite(absl::string_view source, absl::string_view nonfinite,
                       absl::string_view advice) {
  return absl::InvalidArgumentError(
      absl::StrCat("the head (source: ", source, ") is not finite: ", nonfinite, "; ", advice));
}

absl::Status FiniteWeights::ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                     int64_t row_pitch_bytes) const {
  LOGPROBD_RETURN_IF_ERROR(weights_.ReadRows(row_begin, row_end, out, row_pitch_bytes));
  const HeadInfo& info = weights_.info();
  const int64_t valid_end = std::min(row_end, info.vocab_size);
  const int64_t row_bytes = info.hidden_size * DtypeBytes(info.dtype);
  const int64_t step =
      row_pitch_bytes == row_bytes ? std::max<int64_t>(valid_end - row_begin, 1) : 1;
  std::string nonfinite;
  for (int64_t row = row_begin; row < valid_end && nonfinite.empty(); row += step) {
    nonfinite = NonfiniteInRows(
        {out + (row - row_begin) * row_pitch_bytes, static_cast<size_t>(step * row_bytes)}, row,
        info);
  }
  if (nonfinite.empty()) nonfinite = NonfiniteInBias(weights_.bias(), row_begin, valid_end);
  return nonfinite.empty() ? absl::OkStatus() : NotFinite(source_, nonfinite, advice_);
}

}  // namespace logprobd
