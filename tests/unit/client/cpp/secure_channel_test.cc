#include "client/cpp/secure_channel.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_certificates.h"

namespace logprobd::client {
namespace {

using ::logprobd::testing::CertificatePem;
using ::logprobd::testing::KeyPem;
using ::logprobd::testing::NewKey;
using ::logprobd::testing::TestKey;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ReadTlsTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& text) {
    return folder_.Write(name, text);
  }
  static std::string SelfSigned(const TestKey& key) {
    const absl::Time now = absl::FromUnixSeconds(1'800'000'000);
    return CertificatePem("client", key, "client", key, now, now + absl::Hours(24));
  }
  /// Expects that the files are refused with this message.
  static void ExpectRefused(const Tls& tls, const std::string& message) {
    const absl::Status status = ReadTls(tls).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith(message));
  }

  const TestKey key_ = NewKey();
  const TestKey other_key_ = NewKey();
  testing::TempFolder folder_;
  const std::string cert_ = Write("cert.pem", SelfSigned(key_));
  const std::string key_file_ = Write("key.pem", KeyPem(key_));
  const std::string none_ = folder_.path("none.pem");
  const std::string text_ = Write("text.pem", "no PEM");
};

TEST_F(ReadTlsTest, WithoutTlsAConnectionIsPlaintext) {
  const absl::StatusOr<ChannelSecurity> security = ReadTls(std::nullopt);

  ASSERT_TRUE(security.ok());
  EXPECT_EQ(security->credentials, nullptr);
}

TEST_F(ReadTlsTest, TakesAPairAndRoots) {
  for (const Tls& tls : {Tls{}, Tls{.ca = cert_}, Tls{.cert = cert_, .key = key_file_},
                         Tls{.ca = cert_, .cert = cert_, .key = key_file_, .server_name = "a"}}) {
    const absl::StatusOr<ChannelSecurity> security = ReadTls(tls);

    ASSERT_TRUE(security.ok()) << security.status();
    EXPECT_NE(security->credentials, nullptr);
    EXPECT_EQ(security->server_name, tls.server_name);
  }
}

TEST_F(ReadTlsTest, ACertificateNeedsItsKeyAndAKeyItsCertificate) {
  ExpectRefused({.cert = cert_}, "tls.cert needs tls.key, too");
  ExpectRefused({.key = key_file_}, "tls.key needs tls.cert, too");
}

TEST_F(ReadTlsTest, NamesTheFileThatCannotBeRead) {
  const std::string reason = absl::StrCat(none_, " cannot be read: No such file or directory");

  ExpectRefused({.ca = none_}, "tls.ca: " + reason);
  ExpectRefused({.cert = none_, .key = key_file_}, "tls.cert: " + reason);
  ExpectRefused({.cert = cert_, .key = none_}, "tls.key: " + reason);
}

TEST_F(ReadTlsTest, NamesTheFileThatIsSomethingElse) {
  const std::string no_certificate = absl::StrCat(text_, " contains no PEM certificate");
  const std::string no_key = absl::StrCat(text_, " contains no PEM private key");
  // OpenSSL must not ask for the passphrase on the terminal.
  const std::string encrypted =
      Write("encrypted.pem",
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n");

  ExpectRefused({.ca = text_}, "tls.ca: " + no_certificate);
  ExpectRefused({.cert = text_, .key = key_file_}, "tls.cert: " + no_certificate);
  ExpectRefused({.cert = cert_, .key = text_}, "tls.key: " + no_key);
  ExpectRefused({.cert = cert_, .key = encrypted}, absl::StrCat("tls.key: ", encrypted));
}

TEST_F(ReadTlsTest, RefusesTheKeyOfAnotherCertificate) {
  const std::string other = Write("other.pem", KeyPem(other_key_));

  ExpectRefused({.cert = cert_, .key = other},
                absl::StrCat("tls.key: ", other, " is not the key of the certificate in ", cert_));
}

TEST(TlsHintTest, SaysWhatToChangeForEachKindOfFailedHandshake) {
  const auto hint = [](const std::string& reason) {
    return TlsHint("failed to connect to all addresses; last error: " + reason);
  };

  EXPECT_THAT(hint("certificate verify failed"), HasSubstr("is not trusted"));
  EXPECT_THAT(hint("a.b is not in peer certificate"), HasSubstr("set tls.server_name"));
  EXPECT_THAT(hint("wrong version number"), HasSubstr("the peer speaks no TLS"));
  EXPECT_THAT(hint("Socket closed"), HasSubstr("needs a client with TLS"));
  EXPECT_THAT(hint("Connection reset by peer"), HasSubstr("needs a client with TLS"));
  EXPECT_EQ(hint("Connection refused"), "");
  EXPECT_EQ(TlsHint("Socket closed"), "");  // in a call that had a connection
}

}  // namespace
}  // namespace logprobd::client
