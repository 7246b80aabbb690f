#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

struct evp_md_ctx_st;  // of OpenSSL

namespace logprobd {

/// Computes a sha256 of bytes that arrive in pieces. Not thread-safe.
class Sha256 {
 public:
  using Bytes = std::array<uint8_t, 32>;

  Sha256();

  void Add(absl::Span<const std::byte> bytes);

  /// Returns the digest. Nothing may be added afterwards. Returns INTERNAL if libcrypto has failed.
  absl::StatusOr<Bytes> Digest();
  /// Returns the digest in lower-case hex, with the errors of Digest.
  absl::StatusOr<std::string> Hex();

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
  bool is_ok_ = false;
};

}  // namespace logprobd
