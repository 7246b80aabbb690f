#include "server/transport/tls_files.h"

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/metrics.h"
#include "tests/support/fake_clock.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Key NewKey() { return {EVP_EC_gen("P-256"), EVP_PKEY_free}; }

/// Returns what `write` writes, as text.
template <typename Write>
std::string Pem(Write write) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new(BIO_s_mem()), BIO_free);
  write(bio.get());
  char* data = nullptr;
  const auto length = static_cast<size_t>(BIO_get_mem_data(bio.get(), &data));
  return {data, length};
}

std::string KeyPem(const Key& key) {
  return Pem([&](BIO* bio) {
    PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
}

void SetName(X509_NAME* name, const std::string& text) {
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(text.c_str()), -1, -1, 0);
}

const absl::Time kBegin = absl::FromUnixSeconds(1'800'000'000);
const absl::Time kEnd = kBegin + absl::Hours(24 * 30);

/// Returns a certificate for `subject`, valid from kBegin to kEnd, signed by `issuer_key`.
std::string CertificatePem(const std::string& subject, const Key& key, const std::string& issuer,
                           const Key& issuer_key) {
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(X509_new(), X509_free);
  SetName(X509_get_subject_name(certificate.get()), subject);
  SetName(X509_get_issuer_name(certificate.get()), issuer);
  ASN1_TIME_set(X509_getm_notBefore(certificate.get()), absl::ToTimeT(kBegin));
  ASN1_TIME_set(X509_getm_notAfter(certificate.get()), absl::ToTimeT(kEnd));
  X509_set_pubkey(certificate.get(), key.get());
  X509_sign(certificate.get(), issuer_key.get(), EVP_sha256());
  return Pem([&](BIO* bio) { PEM_write_bio_X509(bio, certificate.get()); });
}

std::string ReadAll(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

class TlsFilesTest : public ::testing::Test {
 protected:
  TlsFilesTest() : now_(kBegin + absl::Hours(1)) {
    std::filesystem::create_directories(folder_);
    WritePair();
  }
  ~TlsFilesTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  /// Replaces a file, as certificate managers do: by a new file of the same name.
  void Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name + ".new"), std::ios::binary) << content;
    std::filesystem::rename(Path(name + ".new"), Path(name));
  }

  /// Writes a new key and a self-signed certificate of it.
  void WritePair() const {
    const Key key = NewKey();
    Write("cert", CertificatePem("server", key, "server", key));
    Write("key", KeyPem(key));
  }

  absl::StatusOr<std::unique_ptr<TlsFiles>> Create() {
    return TlsFiles::Create(options_, metrics_, clock_, [this] { return now_; });
  }
  std::unique_ptr<TlsFiles> MustCreate() {
    auto files = Create();
    EXPECT_TRUE(files.ok()) << files.status();
    return *std::move(files);
  }
  std::string Error() {
    const auto files = Create();
    return files.ok() ? "no error" : std::string(files.status().message());
  }

  /// Lets the interval between two looks pass.
  void Look(TlsFiles& files) {
    clock_.Advance(TlsFiles::kLookInterval);
    files.ReloadIfChanged();
  }
  bool IsCopied(const TlsFiles& files) const {
    return ReadAll(files.cert_copy()) == ReadAll(Path("cert")) &&
           ReadAll(files.key_copy()) == ReadAll(Path("key"));
  }

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) /
      ::testing::UnitTest::GetInstance()->current_test_info()->name();
  TlsFiles::Options options_{.cert = Path("cert"), .key = Path("key")};
  Metrics metrics_{Metrics::Options()};
  FakeClock clock_;
  absl::Time now_;
};

TEST_F(TlsFilesTest, CopiesAValidPairToAPrivateFolderUntilItIsDestroyed) {
  auto files = MustCreate();
  const std::string copy = files->key_copy();

  EXPECT_TRUE(IsCopied(*files));
  struct stat info {};
  ASSERT_EQ(stat(copy.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  const std::string folder = std::filesystem::path(copy).parent_path().parent_path();
  ASSERT_EQ(stat(folder.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);
  files.reset();
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST_F(TlsFilesTest, ExportsWhenTheFirstCertificateExpires) {
  const auto files = MustCreate();

  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr(absl::StrCat("logprobd_tls_certificate_expiry_timestamp_seconds ",
                                     absl::ToUnixSeconds(kEnd))));
}

TEST_F(TlsFilesTest, RefusesPathsThatBelongTogetherButAreNotAllGiven) {
  EXPECT_TRUE(TlsFiles::CheckPaths({}).ok());
  EXPECT_TRUE(TlsFiles::CheckPaths({"c", "k", "a", "d"}).ok());
  EXPECT_THAT(std::string(TlsFiles::CheckPaths({.cert = "c"}).message()),
              HasSubstr("--tls-cert needs --tls-key"));
  EXPECT_THAT(std::string(TlsFiles::CheckPaths({.key = "k"}).message()),
              HasSubstr("--tls-key needs --tls-cert"));
  EXPECT_THAT(std::string(TlsFiles::CheckPaths({.client_ca = "a"}).message()),
              HasSubstr("--tls-client-ca needs --tls-cert"));
  EXPECT_THAT(
      std::string(TlsFiles::CheckPaths({.cert = "c", .key = "k", .crl_dir = "d"}).message()),
      HasSubstr("--tls-crl-dir needs --tls-client-ca"));
}

TEST_F(TlsFilesTest, NamesTheFileThatCannotBeRead) {
  options_.key = Path("nothing");

  EXPECT_THAT(Error(), HasSubstr(absl::StrCat("--tls-key: ", Path("nothing"),
                                              " cannot be read: No such file or directory")));
}

TEST_F(TlsFilesTest, RefusesFilesThatAreNotPem) {
  const std::string key = ReadAll(Path("key"));
  Write("key", "text");
  EXPECT_THAT(Error(), HasSubstr("key contains no PEM private key"));
  Write("key", key);
  const std::string cert = ReadAll(Path("cert"));
  Write("cert", "text");
  EXPECT_THAT(Error(), HasSubstr("cert contains no PEM certificate"));
  Write("cert", cert + cert.substr(0, cert.size() / 2));
  EXPECT_THAT(Error(), HasSubstr("cert is damaged after certificate 1"));
}

TEST_F(TlsFilesTest, RefusesAKeyThatDoesNotFit) {
  Write("key", KeyPem(NewKey()));

  EXPECT_THAT(Error(), HasSubstr("is not the key of the certificate"));
}

TEST_F(TlsFilesTest, AcceptsACertificateExactlyWithinItsTimes) {
  now_ = kBegin;
  EXPECT_EQ(Error(), "no error");
  now_ = kBegin - absl::Seconds(1);
  EXPECT_THAT(Error(), HasSubstr("that is valid only from"));
  now_ = kEnd - absl::Seconds(1);
  EXPECT_EQ(Error(), "no error");
  now_ = kEnd;
  EXPECT_THAT(Error(), HasSubstr("that expired at"));
}

TEST_F(TlsFilesTest, AcceptsAChainOnlyInOrder) {
  const Key ca_key = NewKey();
  const Key key = NewKey();
  const std::string ca = CertificatePem("ca", ca_key, "ca", ca_key);
  const std::string leaf = CertificatePem("server", key, "ca", ca_key);
  const std::string stranger = CertificatePem("stranger", NewKey(), "ca", ca_key);
  Write("key", KeyPem(key));

  Write("cert", leaf + ca);
  EXPECT_EQ(Error(), "no error");
  Write("cert", leaf + stranger + ca);
  EXPECT_THAT(Error(), HasSubstr("is not a chain"));
}

TEST_F(TlsFilesTest, ChecksTheClientCa) {
  options_.client_ca = Path("client_ca");
  Write("client_ca", ReadAll(Path("cert")));
  EXPECT_THAT(ReadAll(MustCreate()->client_ca_copy()), HasSubstr(ReadAll(Path("cert"))));

  Write("client_ca", ReadAll(Path("key")));
  EXPECT_THAT(Error(), HasSubstr("--tls-client-ca: "));
}

TEST_F(TlsFilesTest, TakesANewPairOnceItHasSettled) {
  const auto files = MustCreate();
  WritePair();

  files->ReloadIfChanged();  // too early for a look
  EXPECT_FALSE(IsCopied(*files));
  Look(*files);  // sees a change, which may not be complete
  EXPECT_FALSE(IsCopied(*files));
  Look(*files);
  EXPECT_TRUE(IsCopied(*files));

  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"ok\"} 1"));
}

TEST_F(TlsFilesTest, DoesNotReadFilesThatStayTheSame) {
  const auto files = MustCreate();

  Look(*files);
  Look(*files);

  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"ok\"} 0"));
}

TEST_F(TlsFilesTest, KeepsTheOldPairAndCountsABadOneOnce) {
  const auto files = MustCreate();
  const std::string cert = ReadAll(files->cert_copy());
  const std::string key = ReadAll(files->key_copy());
  Write("key", KeyPem(NewKey()));

  for (int look = 0; look < 4; ++look) {
    Look(*files);
  }

  EXPECT_EQ(ReadAll(files->cert_copy()), cert);
  EXPECT_EQ(ReadAll(files->key_copy()), key);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"failed\"} 1"));
  WritePair();
  Look(*files);
  Look(*files);
  EXPECT_TRUE(IsCopied(*files));
}

TEST_F(TlsFilesTest, ReloadReadsTheFilesAtOnceAndGivesEachCopyATimeOfItsOwn) {
  const auto files = MustCreate();
  struct stat before {};
  struct stat after {};
  ASSERT_EQ(stat(files->cert_copy().c_str(), &before), 0);
  WritePair();

  files->Reload();

  EXPECT_TRUE(IsCopied(*files));
  ASSERT_EQ(stat(files->cert_copy().c_str(), &after), 0);
  EXPECT_NE(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
}

TEST_F(TlsFilesTest, WithoutTlsThereIsNoExpiry) {
  EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr("logprobd_tls_certificate_expiry")));
}

}  // namespace
}  // namespace logprobd::testing
