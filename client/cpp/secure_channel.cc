#include "client/cpp/secure_channel.h"

#include <grpcpp/create_channel.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace logprobd::client {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

absl::Status Wrong(absl::string_view option, const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("tls.", option, ": ", path, " ", what));
}

absl::StatusOr<std::string> ReadPem(absl::string_view option, const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  if (!stream) {
    return Wrong(option, path,
                 absl::StrCat("cannot be read: ", std::generic_category().message(errno)));
  }
  return text;
}

/// Refuses a passphrase, for which OpenSSL would otherwise ask on the terminal.
int NoPassphrase(char* /*buffer*/, int /*size*/, int /*writes*/, void* /*context*/) { return -1; }

Certificate FirstCertificate(const std::string& pem) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
  Certificate certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassphrase, nullptr), X509_free);
  ERR_clear_error();
  return certificate;
}

absl::StatusOr<std::string> ReadCertificates(absl::string_view option, const std::string& path) {
  absl::StatusOr<std::string> pem = ReadPem(option, path);
  if (pem.ok() && FirstCertificate(*pem) == nullptr) {
    return Wrong(option, path, "contains no PEM certificate (-----BEGIN CERTIFICATE-----)");
  }
  return pem;
}

/// Returns the private key.
Key ParseKey(const std::string& pem) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, nullptr), EVP_PKEY_free);
  ERR_clear_error();
  return key;
}

absl::Status ReadPair(const Tls& tls, grpc::SslCredentialsOptions& pem) {
  absl::StatusOr<std::string> cert = ReadCertificates("cert", tls.cert);
  if (!cert.ok()) return cert.status();
  absl::StatusOr<std::string> key = ReadPem("key", tls.key);
  if (!key.ok()) return key.status();
  const Key parsed = ParseKey(*key);
  if (parsed == nullptr) {
    return Wrong("key", tls.key, "contains no PEM private key without a passphrase");
  }
  const bool fits = X509_check_private_key(FirstCertificate(*cert).get(), parsed.get()) == 1;
  ERR_clear_error();
  if (!fits) {
    return Wrong("key", tls.key, absl::StrCat("is not the key of the certificate in ", tls.cert));
  }
  pem.pem_cert_chain = *std::move(cert);
  pem.pem_private_key = *std::move(key);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChannelSecurity> ReadTls(const std::optional<Tls>& tls) {
  if (!tls.has_value()) return ChannelSecurity();
  if (tls->cert.empty() != tls->key.empty()) {
    return absl::InvalidArgumentError(tls->key.empty() ? "tls.cert needs tls.key, too"
                                                       : "tls.key needs tls.cert, too");
  }
  grpc::SslCredentialsOptions pem;
  if (!tls->ca.empty()) {
    absl::StatusOr<std::string> ca = ReadCertificates("ca", tls->ca);
    if (!ca.ok()) return ca.status();
    pem.pem_root_certs = *std::move(ca);
  }
  if (!tls->cert.empty()) {
    const absl::Status status = ReadPair(*tls, pem);
    if (!status.ok()) return status;
  }
  return ChannelSecurity{.credentials = grpc::SslCredentials(pem), .server_name = tls->server_name};
}

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& address,
                                           const ChannelSecurity& security,
                                           grpc::ChannelArguments arguments) {
  if (security.credentials == nullptr || absl::StartsWith(address, "unix:")) {
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  if (!security.server_name.empty()) arguments.SetSslTargetNameOverride(security.server_name);
  return grpc::CreateCustomChannel(address, security.credentials, arguments);
}

void AddToken(const std::string& token, grpc::ClientContext& context) {
  if (!token.empty()) context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
}

std::string TlsHint(absl::string_view message) {
  struct Hint {
    absl::string_view words;  ///< Part of gRPC's message.
    absl::string_view advice;
  };
  constexpr absl::string_view kClosed =
      "; the peer closed the connection at once: a server with --tls-cert needs a client with TLS "
      "(tls, --tls-ca), and one with --tls-client-ca also a certificate and key of a CA that it "
      "trusts";
  static constexpr Hint kHints[] = {
      {"certificate verify failed",
       "; the server's certificate is not trusted: check that tls.ca (--tls-ca) contains the CA "
       "that issued it, and that it has not expired"},
      {"is not in peer certificate",
       "; the server's certificate does not contain the host of the address: use another address, "
       "or set tls.server_name (--tls-server-name)"},
      {"wrong version number",
       "; the peer speaks no TLS: check the port, that the server runs with --tls-cert, or leave "
       "out tls (--tls-*)"},
      {"Socket closed", kClosed},
      {"Connection reset", kClosed}};
  if (!absl::StrContains(message, "failed to connect")) return "";
  for (const Hint& hint : kHints) {
    if (absl::StrContains(message, hint.words)) return std::string(hint.advice);
  }
  return "";
}

}  // namespace logprobd::client
