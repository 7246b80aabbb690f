#include "tests/support/test_certificates.h"

#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

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
                           absl::Time end, int64_t serial, bool is_ca,
                           const std::function<void(X509*)>& change) {
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(X509_new(), X509_free);
  ASN1_INTEGER_set_int64(X509_get_serialNumber(certificate.get()), serial);
  if (is_ca) {
    const std::unique_ptr<X509_EXTENSION, decltype(&X509_EXTENSION_free)> extension(
        X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints, "critical,CA:TRUE"),
        X509_EXTENSION_free);
    X509_set_version(certificate.get(), X509_VERSION_3);
    X509_add_ext(certificate.get(), extension.get(), -1);
  }
  SetName(X509_get_subject_name(certificate.get()), subject);
  SetName(X509_get_issuer_name(certificate.get()), issuer);
  ASN1_TIME_set(X509_getm_notBefore(certificate.get()), absl::ToTimeT(begin));
  ASN1_TIME_set(X509_getm_notAfter(certificate.get()), absl::ToTimeT(end));
  X509_set_pubkey(certificate.get(), key.get());
  change(certificate.get());
  X509_sign(certificate.get(), issuer_key.get(), EVP_sha256());
  return Pem([&](BIO* bio) { PEM_write_bio_X509(bio, certificate.get()); });
}

std::string RevocationListPem(const std::string& issuer, const TestKey& issuer_key,
                              const std::vector<int64_t>& revoked, absl::Time begin, absl::Time end,
                              const std::function<void(X509_CRL*)>& change) {
  using Time = std::unique_ptr<ASN1_TIME, decltype(&ASN1_TIME_free)>;
  const std::unique_ptr<X509_CRL, decltype(&X509_CRL_free)> list(X509_CRL_new(), X509_CRL_free);
  const std::unique_ptr<X509_NAME, decltype(&X509_NAME_free)> name(X509_NAME_new(), X509_NAME_free);
  SetName(name.get(), issuer);
  X509_CRL_set_version(list.get(), X509_CRL_VERSION_2);
  X509_CRL_set_issuer_name(list.get(), name.get());
  const Time issued_at(ASN1_TIME_set(nullptr, absl::ToTimeT(begin)), ASN1_TIME_free);
  X509_CRL_set1_lastUpdate(list.get(), issued_at.get());
  if (end != absl::InfiniteFuture()) {
    const Time expires_at(ASN1_TIME_set(nullptr, absl::ToTimeT(end)), ASN1_TIME_free);
    X509_CRL_set1_nextUpdate(list.get(), expires_at.get());
  }
  for (const int64_t serial : revoked) {
    const std::unique_ptr<ASN1_INTEGER, decltype(&ASN1_INTEGER_free)> number(ASN1_INTEGER_new(),
                                                                             ASN1_INTEGER_free);
    ASN1_INTEGER_set_int64(number.get(), serial);
    X509_REVOKED* const entry = X509_REVOKED_new();
    X509_REVOKED_set_serialNumber(entry, number.get());
    X509_REVOKED_set_revocationDate(entry, issued_at.get());
    X509_CRL_add0_revoked(list.get(), entry);
  }
  change(list.get());
  X509_CRL_sort(list.get());
  X509_CRL_sign(list.get(), issuer_key.get(), EVP_sha256());
  return Pem([&](BIO* bio) { PEM_write_bio_X509_CRL(bio, list.get()); });
}

}  // namespace logprobd::testing
