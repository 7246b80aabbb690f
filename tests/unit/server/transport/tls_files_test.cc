#include "server/transport/tls_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/metrics.h"
#include "tests/support/fake_clock.h"
#include "tests/support/few_files.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_certificates.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const absl::Time kBegin = absl::FromUnixSeconds(1'800'000'000);
const absl::Time kEnd = kBegin + absl::Hours(24 * 30);

/// Returns a certificate for `subject`, valid from kBegin to kEnd, signed by `issuer_key`.
std::string ValidPem(const std::string& subject, const TestKey& key, const std::string& issuer,
                     const TestKey& issuer_key) {
  return CertificatePem(subject, key, issuer, issuer_key, kBegin, kEnd);
}

std::string ReadAll(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

class TlsFilesTest : public ::testing::Test {
 protected:
  TlsFilesTest() : now_(kBegin + absl::Hours(1)) { WritePair(); }

  std::string Path(const std::string& name) const { return folder_.path(name); }

  /// Replaces a file, as certificate managers do: by a new file of the same name.
  void Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name + ".new"), std::ios::binary) << content;
    std::filesystem::rename(Path(name + ".new"), Path(name));
  }

  /// Writes a new key and a self-signed certificate of it.
  void WritePair() const {
    const TestKey key = NewKey();
    Write("cert", ValidPem("server", key, "server", key));
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

  /// Lets the interval between two looks pass, and returns whether the copies are new.
  bool Look(TlsFiles& files) {
    clock_.Advance(TlsFiles::kLookInterval);
    return files.ReloadIfChanged();
  }
  bool IsCopied(const TlsFiles& files) const {
    return ReadAll(files.pair_path()) == ReadAll(Path("key")) + ReadAll(Path("cert"));
  }

  const TempFolder folder_;
  TlsFiles::Options options_{.cert = Path("cert"), .key = Path("key")};
  Metrics metrics_{Metrics::Options()};
  FakeClock clock_;
  absl::Time now_;
};

TEST_F(TlsFilesTest, CopiesAValidPairToAFileThatHasNoNameAndEndsWithTheObject) {
  auto files = MustCreate();
  const std::string copy = files->pair_path();

  EXPECT_TRUE(IsCopied(*files));
  EXPECT_EQ(files->pair().cert, ReadAll(Path("cert")));
  EXPECT_EQ(files->pair().key, ReadAll(Path("key")));
  struct stat info {};
  ASSERT_EQ(stat(copy.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  EXPECT_EQ(info.st_nlink, 0U);
  const int fd = std::stoi(copy.substr(copy.rfind('/') + 1));
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  files->Reload();
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  files.reset();
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

TEST_F(TlsFilesTest, CopiesOnlyTheKeyAndTheChain) {
  const TestKey key = NewKey();
  const TestKey other = NewKey();
  const std::string cert = ValidPem("server", key, "server", key);
  const std::string key_pem = KeyPem(key);
  const std::string other_cert = ValidPem("other", other, "other", other);
  Write("cert", KeyPem(other) + cert);
  Write("key", other_cert + key_pem);

  EXPECT_EQ(ReadAll(MustCreate()->pair_path()), key_pem + cert);
}

TEST_F(TlsFilesTest, ExportsWhenTheFirstCertificateExpires) {
  const auto files = MustCreate();

  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr(absl::StrCat("logprobd_tls_certificate_expiry_timestamp_seconds ",
                                     absl::ToUnixSeconds(kEnd))));
}

TEST_F(TlsFilesTest, TheFirstCertificateOfAChainToExpireCounts) {
  const TestKey ca_key = NewKey();
  const TestKey key = NewKey();
  Write("key", KeyPem(key));
  const absl::Time early = kEnd - absl::Hours(24);
  for (const auto& [leaf_end, ca_end] : {std::pair{early, kEnd}, std::pair{kEnd, early}}) {
    Write("cert", CertificatePem("server", key, "ca", ca_key, kBegin, leaf_end) +
                      CertificatePem("ca", ca_key, "ca", ca_key, kBegin, ca_end));
    now_ = kBegin;
    const auto files = MustCreate();

    EXPECT_THAT(metrics_.Serialize(),
                HasSubstr(absl::StrCat("logprobd_tls_certificate_expiry_timestamp_seconds ",
                                       absl::ToUnixSeconds(early), "\n")));
    now_ = early;
    EXPECT_THAT(Error(), HasSubstr("that expired at"));
  }
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

TEST_F(TlsFilesTest, ALackOfFileDescriptorsIsNoFaultOfTheFiles) {
  absl::Status created;
  {
    const FewFiles none(0);
    created = Create().status();
  }
  EXPECT_EQ(created.code(), absl::StatusCode::kResourceExhausted) << created;
  EXPECT_THAT(std::string(created.message()),
              HasSubstr(absl::StrCat("--tls-cert: ", Path("cert"),
                                     " cannot be read: Too many open files")));

  const auto files = MustCreate();
  WritePair();
  Look(*files);
  {
    const FewFiles none(0);
    EXPECT_FALSE(Look(*files));
  }
  EXPECT_TRUE(Look(*files));  // tries again, though the files are the same
  EXPECT_TRUE(IsCopied(*files));
}

TEST_F(TlsFilesTest, NamesTheLackOfAFileForTheCopies) {
  absl::Status created;
  {
    const FewFiles one(1);  // to read a file, but not to copy what it holds and read another
    const auto files = Create();
    created = files.status();
  }
  EXPECT_TRUE(created.ok()) << created;  // one file at a time is enough for a pair
}

TEST_F(TlsFilesTest, ReportsACopyThatCannotBeWritten) {
  const auto on_excess = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit few_bytes = {16, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few_bytes), 0);

  const absl::Status created = Create().status();

  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, on_excess);
  EXPECT_EQ(created.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(created.message()), HasSubstr("cannot copy the TLS files: File too"));
}

TEST_F(TlsFilesTest, TriesAgainIfOneOfSeveralLacksAFileDescriptor) {
  Write("client_ca", ReadAll(Path("cert")));
  options_.client_ca = Path("client_ca");
  const auto files = MustCreate();
  absl::Status answer = absl::ResourceExhaustedError("no file descriptor is left");
  files->SetTaker([&](const TlsFiles::Pair&) { return answer; });
  WritePair();
  Write("client_ca", "text");
  Look(*files);
  EXPECT_FALSE(Look(*files));

  answer = absl::OkStatus();
  EXPECT_FALSE(Look(*files));  // the CA is wrong still

  EXPECT_TRUE(IsCopied(*files));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"failed\"} 2"));
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

TEST_F(TlsFilesTest, ReadsRegularFilesOfAtMost4MiBOnly) {
  const std::string cert = ReadAll(Path("cert"));
  constexpr size_t kBytesMax = size_t{4} << 20;
  Write("cert", cert + std::string(kBytesMax - cert.size(), '\n'));
  EXPECT_EQ(Error(), "no error");
  Write("cert", cert + std::string(kBytesMax - cert.size() + 1, '\n'));
  EXPECT_THAT(Error(), HasSubstr("cert is not a regular file of at most 4 MiB"));
  Write("cert", cert);

  std::filesystem::remove(Path("key"));
  std::filesystem::create_directory(Path("key"));
  EXPECT_THAT(Error(), HasSubstr("key is not a regular file of at most 4 MiB"));
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
  const TestKey ca_key = NewKey();
  const TestKey key = NewKey();
  const std::string ca = ValidPem("ca", ca_key, "ca", ca_key);
  const std::string leaf = ValidPem("server", key, "ca", ca_key);
  const std::string stranger = ValidPem("stranger", NewKey(), "ca", ca_key);
  Write("key", KeyPem(key));

  Write("cert", leaf + ca);
  EXPECT_EQ(Error(), "no error");
  for (const std::string& broken : {leaf + stranger, leaf + stranger + ca, leaf + ca + stranger}) {
    Write("cert", broken);
    EXPECT_THAT(Error(), HasSubstr("is not a chain"));
  }
}

TEST_F(TlsFilesTest, ChecksTheClientCa) {
  options_.client_ca = Path("client_ca");
  Write("client_ca", ReadAll(Path("cert")));
  EXPECT_THAT(ReadAll(MustCreate()->client_ca_path()), HasSubstr(ReadAll(Path("cert"))));

  Write("client_ca", ReadAll(Path("key")));
  EXPECT_THAT(Error(), HasSubstr("--tls-client-ca: "));
}

TEST_F(TlsFilesTest, NamesAFolderOfRevocationListsThatIsAbsent) {
  options_.client_ca = Path("cert");
  options_.crl_dir = Path("crl");
  EXPECT_THAT(Error(), HasSubstr(absl::StrCat("--tls-crl-dir: ", Path("crl"), " cannot be read")));

  std::filesystem::create_directory(Path("crl"));
  EXPECT_EQ(Error(), "no error");
}

TEST_F(TlsFilesTest, TakesANewClientCa) {
  Write("client_ca", ReadAll(Path("cert")));
  options_.client_ca = Path("client_ca");
  const auto files = MustCreate();
  const TestKey key = NewKey();
  Write("client_ca", ValidPem("other", key, "other", key));
  Look(*files);

  EXPECT_TRUE(Look(*files));
  EXPECT_EQ(ReadAll(files->client_ca_path()), ReadAll(Path("client_ca")));
}

TEST_F(TlsFilesTest, NamesAClientCaThatHasExpired) {
  const TestKey key = NewKey();
  Write("client_ca", CertificatePem("old", key, "old", key, kBegin - absl::Hours(2), kBegin));
  options_.client_ca = Path("client_ca");
  ::testing::internal::CaptureStderr();

  MustCreate();

  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("a CA of --tls-client-ca has expired, so its clients are refused ca=\"/CN=old\""));
  for (const auto& [now, has_expired] :
       {std::pair{kBegin, true}, std::pair{kBegin - absl::Seconds(1), false}}) {
    Write("cert", CertificatePem("server", key, "server", key, now, kEnd));
    Write("key", KeyPem(key));
    now_ = now;
    ::testing::internal::CaptureStderr();
    MustCreate();
    EXPECT_EQ(absl::StrContains(::testing::internal::GetCapturedStderr(), "has expired"),
              has_expired);
  }
}

/// Files with a CA of clients that has issued a certificate and a list, which revokes nothing.
class RevocationFilesTest : public TlsFilesTest {
 protected:
  RevocationFilesTest()
      : client_(CertificatePem("client", NewKey(), "ca", ca_key_, kBegin, kEnd, kSerial)) {
    Write("client_ca", CertificatePem("ca", ca_key_, "ca", ca_key_, kBegin, kEnd, 1, true));
    std::filesystem::create_directory(Path("crl"));
    folder_.Write("list", List({}));
    std::filesystem::create_symlink(Path("list"), Path("crl/0123abcd.r0"));
    options_.client_ca = Path("client_ca");
    options_.crl_dir = Path("crl");
  }

  std::string List(const std::vector<int64_t>& revoked, absl::Time end = kEnd,
                   absl::Time begin = kBegin) const {
    return RevocationListPem("ca", ca_key_, revoked, begin, end);
  }
  bool IsRefused(const TlsFiles& files) const {
    return !files.revocation()->Check(client_, "").ok();
  }
  std::string LogOfLook(TlsFiles& files) {
    ::testing::internal::CaptureStderr();
    Look(files);
    return ::testing::internal::GetCapturedStderr();
  }

  static constexpr int64_t kSerial = 5;
  const TestKey ca_key_ = NewKey();
  const std::string client_;
};

// Regression: only a change of the folder was noticed.
TEST_F(RevocationFilesTest, AListTakesEffectHoweverItIsReplaced) {
  const auto take = [this](const auto& replace) {
    folder_.Write("list", List({}));
    const auto files = MustCreate();
    EXPECT_FALSE(IsRefused(*files));
    replace();
    EXPECT_FALSE(Look(*files));
    EXPECT_TRUE(Look(*files));
    EXPECT_TRUE(IsRefused(*files));
  };
  take([this] { folder_.Write("list", List({kSerial})); });  // in place, behind a link
  take([this] { Write("list", List({kSerial})); });
  take([this] { folder_.Write("crl/new", List({kSerial}, kEnd, kBegin + absl::Seconds(1))); });
  std::filesystem::remove(Path("crl/0123abcd.r0"));
  folder_.Write("crl/new", List({}));
  take([this] { folder_.Write("crl/new", List({kSerial})); });
}

// Regression: the files were read once they had been the same in two looks.
TEST_F(RevocationFilesTest, AFolderThatChangesAllTheTimeKeepsOutNoRevocation) {
  const auto files = MustCreate();
  folder_.Write("list", List({kSerial}));

  for (int look = 0; look < 3 && !IsRefused(*files); ++look) {
    folder_.Write("crl/log", std::string(static_cast<size_t>(look + 1), 'x'));
    Look(*files);
  }

  EXPECT_TRUE(IsRefused(*files));
}

TEST_F(RevocationFilesTest, ADamagedListKeepsTheLastInForceUntilItIsMended) {
  folder_.Write("list", List({kSerial}));
  const auto files = MustCreate();
  folder_.Write("list", "garbage");
  Look(*files);

  const std::string log = LogOfLook(*files);

  EXPECT_TRUE(IsRefused(*files));
  EXPECT_THAT(log, HasSubstr("crl/0123abcd.r0 contains no revocation list"));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"failed\"} 1\n"));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_revocation_problems 2\n"));
  folder_.Write("list", List({}));
  Look(*files);
  EXPECT_TRUE(Look(*files));
  EXPECT_FALSE(IsRefused(*files));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_revocation_problems 0\n"));
}

TEST_F(RevocationFilesTest, DoesNotStartWithADamagedList) {
  folder_.Write("list", "garbage");

  EXPECT_THAT(Error(), HasSubstr("crl/0123abcd.r0 contains no revocation list"));
}

TEST_F(TlsFilesTest, AWrongPairKeepsBackNoClientCa) {
  Write("client_ca", ReadAll(Path("cert")));
  options_.client_ca = Path("client_ca");
  const auto files = MustCreate();
  const TestKey key = NewKey();
  Write("client_ca", ValidPem("other", key, "other", key));
  Write("key", KeyPem(key));

  EXPECT_FALSE(files->Reload());

  EXPECT_EQ(ReadAll(files->client_ca_path()), ReadAll(Path("client_ca")));
  EXPECT_FALSE(IsCopied(*files));
}

TEST_F(RevocationFilesTest, AWrongPairKeepsBackNoList) {
  const auto files = MustCreate();
  Write("key", KeyPem(NewKey()));
  folder_.Write("list", List({kSerial}));
  Look(*files);

  EXPECT_THAT(LogOfLook(*files), HasSubstr("is not the key of the certificate"));

  EXPECT_TRUE(IsRefused(*files));
}

TEST_F(RevocationFilesTest, SaysOnceThatAListHasExpiredAndExportsWhenTheFirstDoes) {
  const absl::Time end = now_ + absl::Hours(1);
  folder_.Write("list", List({}, end));
  const auto files = MustCreate();
  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr(absl::StrCat("logprobd_tls_revocation_expiry_timestamp_seconds ",
                                     absl::ToUnixSeconds(end), "\n")));
  EXPECT_THAT(LogOfLook(*files), Not(HasSubstr("expired")));

  now_ = end;
  EXPECT_THAT(
      LogOfLook(*files),
      HasSubstr("error a revocation list has expired, so all clients of its CA are refused"));
  EXPECT_THAT(LogOfLook(*files), Not(HasSubstr("expired")));
  EXPECT_TRUE(Create().ok());
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(files->Reload());  // says it again, as an operator may look now
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("has expired"));
}

TEST_F(RevocationFilesTest, NamesACaOfClientsWithoutAList) {
  std::filesystem::remove(Path("crl/0123abcd.r0"));
  ::testing::internal::CaptureStderr();

  MustCreate();

  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("a CA of clients has no revocation list, so it revokes nothing "
                        "ca=\"/CN=ca (serial 01)\""));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_revocation_problems 0\n"));
}

TEST_F(TlsFilesTest, TakesANewPairOnceItHasSettled) {
  const auto files = MustCreate();
  WritePair();

  EXPECT_FALSE(files->ReloadIfChanged());  // too early for a look
  EXPECT_FALSE(IsCopied(*files));
  EXPECT_FALSE(Look(*files));  // sees a change, which may not be complete
  EXPECT_FALSE(files->ReloadIfChanged());
  EXPECT_FALSE(IsCopied(*files));
  EXPECT_TRUE(Look(*files));
  EXPECT_TRUE(IsCopied(*files));
  EXPECT_EQ(files->pair().cert, ReadAll(Path("cert")));

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
  const std::string pair = ReadAll(files->pair_path());
  Write("key", KeyPem(NewKey()));

  for (int look = 0; look < 4; ++look) {
    EXPECT_FALSE(Look(*files));
  }

  EXPECT_EQ(ReadAll(files->pair_path()), pair);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"failed\"} 1"));
  WritePair();
  Look(*files);
  Look(*files);
  EXPECT_TRUE(IsCopied(*files));
}

// Regression: a pair that HTTPS could not use counted as read, and gRPC had another one.
TEST_F(TlsFilesTest, APairThatAnotherListenerRefusesIsRefusedForAll) {
  const auto files = MustCreate();
  const std::string copy = ReadAll(files->pair_path());
  const std::string key = files->pair().key;
  std::vector<std::string> taken;
  absl::Status answer = absl::InvalidArgumentError("--http: TLS cannot use it");
  files->SetTaker([&](const TlsFiles::Pair& pair) {
    taken.push_back(pair.key);
    return answer;
  });
  WritePair();

  EXPECT_FALSE(files->Reload());

  EXPECT_EQ(ReadAll(files->pair_path()), copy);
  EXPECT_EQ(files->pair().key, key);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"failed\"} 1"));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"ok\"} 0"));
  EXPECT_FALSE(Look(*files));  // the files are the same
  answer = absl::OkStatus();
  EXPECT_TRUE(files->Reload());
  EXPECT_TRUE(IsCopied(*files));
  EXPECT_THAT(taken, ElementsAre(ReadAll(Path("key")), ReadAll(Path("key"))));
}

TEST_F(TlsFilesTest, TriesAgainAtEachLookWhileNoDescriptorIsLeft) {
  const auto files = MustCreate();
  absl::Status answer = absl::ResourceExhaustedError("no file descriptor is left");
  files->SetTaker([&](const TlsFiles::Pair&) { return answer; });
  WritePair();
  Look(*files);

  for (int look = 0; look < 3; ++look) {
    EXPECT_FALSE(Look(*files));
  }
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"failed\"} 1"));
  answer = absl::OkStatus();
  EXPECT_TRUE(Look(*files));

  EXPECT_TRUE(IsCopied(*files));
  EXPECT_FALSE(Look(*files));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("logprobd_tls_reloads_total{result=\"ok\"} 1"));
}

TEST_F(TlsFilesTest, ReloadReadsTheFilesAtOnceAndGivesEachCopyATimeOfItsOwn) {
  const auto files = MustCreate();
  struct stat before {};
  struct stat after {};
  ASSERT_EQ(stat(files->pair_path().c_str(), &before), 0);
  WritePair();

  EXPECT_TRUE(files->Reload());

  EXPECT_TRUE(IsCopied(*files));
  ASSERT_EQ(stat(files->pair_path().c_str(), &after), 0);
  EXPECT_NE(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
}

TEST_F(TlsFilesTest, WithoutTlsThereIsNoExpiry) {
  EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr("logprobd_tls_certificate_expiry")));
}

}  // namespace
}  // namespace logprobd::testing
