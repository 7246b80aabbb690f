#include "tests/support/test_certificates.h"

#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

namespace logprobd::testing {
namespace {

/// Returns what `write` writes, as text.
template <typename Write>
std::string Pem(Write write) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new(BIO_s_mem()), BIO_free);
  write(bio.get());
  char* data = nullptr;
  const auto length = static_cast<size_t>(BIO_get_mem_data(bio.get(), &data));
  return {data, length};
}

void SetName(X509_NAME* name, const std::string& text) {
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(text.c_str()), -1, -1, 0);
}

}  // namespace

TestKey NewKey() { return {EVP_EC_gen("P-256"), EVP_PKEY_free}; }

std::string KeyPem(const TestKey& key) {
  return Pem([&](BIO* bio) {
    PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
}

std::string CertificatePem(const std::string& subject, const TestKey& key,
                           const std::string& issuer, const TestKey& issuer_key, absl::Time begin,
                           absl::Time end) {
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(X509_new(), X509_free);
  SetName(X509_get_subject_name(certificate.get()), subject);
  SetName(X509_get_issuer_name(certificate.get()), issuer);
  ASN1_TIME_set(X509_getm_notBefore(certificate.get()), absl::ToTimeT(begin));
  ASN1_TIME_set(X509_getm_notAfter(certificate.get()), absl::ToTimeT(end));
  X509_set_pubkey(certificate.get(), key.get());
  X509_sign(certificate.get(), issuer_key.get(), EVP_sha256());
  return Pem([&](BIO* bio) { PEM_write_bio_X509(bio, certificate.get()); });
}

}  // namespace logprobd::testing
