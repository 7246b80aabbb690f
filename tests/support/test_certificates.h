#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace logprobd::testing {

using TestKey = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

/// Makes a private key for a test.
TestKey NewKey();

std::string KeyPem(const TestKey& key);

/// Returns a certificate for `subject`, valid from `begin` to `end`, signed by `issuer_key`. With
/// `is_ca` it may sign others, also if it is signed by another. `change` is called before it is
/// signed.
std::string CertificatePem(
    const std::string& subject, const TestKey& key, const std::string& issuer,
    const TestKey& issuer_key, absl::Time begin, absl::Time end, int64_t serial = 0,
    bool is_ca = false, const std::function<void(X509*)>& change = [](X509*) {});

/// Returns a list of `issuer`, issued at `begin`, that revokes certificates by their serial
/// numbers. It expires at `end`, unless that is infinite. `change` is called before it is signed.
std::string RevocationListPem(
    const std::string& issuer, const TestKey& issuer_key, const std::vector<int64_t>& revoked,
    absl::Time begin, absl::Time end,
    const std::function<void(X509_CRL*)>& change = [](X509_CRL*) {});

}  // namespace logprobd::testing
