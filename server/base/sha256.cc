#include "server/base/sha256.h"

#include <openssl/evp.h>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "server/base/errors.h"

namespace logprobd {

Sha256::Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  is_ok_ = context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1;
}

void Sha256::Add(absl::Span<const std::byte> bytes) {
  is_ok_ = is_ok_ && EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1;
}

absl::StatusOr<Sha256::Bytes> Sha256::Digest() {
  Bytes digest{};
  if (!is_ok_ || EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) != 1) {
    return absl::InternalError("libcrypto could not compute a sha256");
  }
  return digest;
}

absl::StatusOr<std::string> Sha256::Hex() {
  LOGPROBD_ASSIGN_OR_RETURN(const Bytes digest, Digest());
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

}  // namespace logprobd
