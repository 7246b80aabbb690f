#include "server/weights/steady_weights.h"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

absl::Status CryptoFailed() {
  return absl::InternalError("libcrypto could not authenticate the rows of a weight");
}

/// Computes tags of rows: the first 8 bytes of AES-128-GMAC, whose nonce is the number of the row.
/// Tags never leave the process, so that a nonce may be used for several values of its row.
class RowTags {
 public:
  explicit RowTags(absl::Span<const unsigned char> key)
      : mac_(EVP_MAC_fetch(nullptr, OSSL_MAC_NAME_GMAC, nullptr), EVP_MAC_free),
        context_(mac_ == nullptr ? nullptr : EVP_MAC_CTX_new(mac_.get()), EVP_MAC_CTX_free) {
    char cipher[] = "AES-128-GCM";
    const OSSL_PARAM parameters[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_CIPHER, cipher, 0),
        OSSL_PARAM_construct_end()};
    is_ok_ = context_ != nullptr &&
             EVP_MAC_init(context_.get(), key.data(), key.size(), parameters) == 1;
  }

  /// Returns the tag, which is never 0, or 0 if libcrypto fails.
  uint64_t Of(int64_t row, absl::Span<const std::byte> bytes) {
    std::array<unsigned char, 12> nonce{};
    std::memcpy(nonce.data(), &row, sizeof(row));
    const OSSL_PARAM parameters[] = {
        OSSL_PARAM_construct_octet_string(OSSL_MAC_PARAM_IV, nonce.data(), nonce.size()),
        OSSL_PARAM_construct_end()};
    std::array<unsigned char, 16> code{};
    size_t size = 0;
    is_ok_ = is_ok_ && EVP_MAC_init(context_.get(), nullptr, 0, parameters) == 1 &&
             EVP_MAC_update(context_.get(), reinterpret_cast<const unsigned char*>(bytes.data()),
                            bytes.size()) == 1 &&
             EVP_MAC_final(context_.get(), code.data(), &size, code.size()) == 1;
    if (!is_ok_) return 0;
    uint64_t tag = 0;
    std::memcpy(&tag, code.data(), sizeof(tag));
    return tag == 0 ? 1 : tag;
  }

 private:
  std::unique_ptr<EVP_MAC, void (*)(EVP_MAC*)> mac_;
  std::unique_ptr<EVP_MAC_CTX, void (*)(EVP_MAC_CTX*)> context_;
  bool is_ok_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SteadyWeights>> SteadyWeights::Create(
    std::unique_ptr<const HeadWeights> weights) {
  Key key;
  if (RAND_bytes(key.data(), static_cast<int>(key.size())) != 1) return CryptoFailed();
  return std::unique_ptr<SteadyWeights>(new SteadyWeights(std::move(weights), key));
}

SteadyWeights::SteadyWeights(std::unique_ptr<const HeadWeights> weights, const Key& key)
    : weights_(std::move(weights)),
      key_(key),
      tags_(static_cast<size_t>(weights_->info().vocab_rows)) {}

absl::Status SteadyWeights::ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                     int64_t row_pitch_bytes) const {
  LOGPROBD_RETURN_IF_ERROR(weights_->ReadRows(row_begin, row_end, out, row_pitch_bytes));
  const HeadInfo& head = weights_->info();
  const auto row_bytes = static_cast<size_t>(head.hidden_size * DtypeBytes(head.dtype));
  RowTags tags(key_);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const uint64_t tag = tags.Of(row, {out + (row - row_begin) * row_pitch_bytes, row_bytes});
    if (tag == 0) return CryptoFailed();
    uint64_t first = 0;
    if (!tags_[static_cast<size_t>(row)].compare_exchange_strong(first, tag) && first != tag) {
      return absl::DataLossError(absl::StrCat("row ", row, " of ", head.tensor,
                                              " changed between two reads: the file was "
                                              "overwritten; load it again"));
    }
  }
  return absl::OkStatus();
}

}  // namespace logprobd
