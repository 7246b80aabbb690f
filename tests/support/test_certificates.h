#pragma once

#include <openssl/evp.h>

#include <memory>
#include <string>

#include "absl/time/time.h"

namespace logprobd::testing {

using TestKey = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

/// Makes a private key for a test.
TestKey NewKey();

std::string KeyPem(const TestKey& key);

/// Returns a certificate for `subject`, valid from `begin` to `end`, signed by `issuer_key`.
std::string CertificatePem(const std::string& subject, const TestKey& key,
                           const std::string& issuer, const TestKey& issuer_key, absl::Time begin,
                           absl::Time end);

}  // namespace logprobd::testing
