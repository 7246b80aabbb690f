#include "server/weights/sha256.h"

#include <openssl/evp.h>

#include <array>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"

namespace logprobd {

Sha256::Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  is_ok_ = context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1;
}

void Sha256::Add(absl::Span<const std::byte> bytes) {
  is_ok_ = is_ok_ && EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1;
}

absl::StatusOr<std::string> Sha256::Hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int length = 0;
  if (!is_ok_ || EVP_DigestFinal_ex(context_.get(), digest.data(), &length) != 1) {
    return absl::InternalError("libcrypto could not compute a sha256");
  }
  return absl::BytesToHexString(
      {reinterpret_cast<const char*>(digest.data()), static_cast<size_t>(length)});
}

}  // namespace logprobd
