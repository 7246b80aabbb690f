#include "server/transport/revocation_lists.h"

#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/metrics/metrics.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_certificates.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

const absl::Time kBegin = absl::FromUnixSeconds(1'800'000'000);
const absl::Time kEnd = kBegin + absl::Hours(24 * 30);
constexpr int64_t kGood = 7;
constexpr int64_t kRevoked = 8;

class RevocationListsTest : public ::testing::Test {
 protected:
  RevocationListsTest()
      : ca_(Ca("ca", ca_key_)),
        good_(Issue("good", kGood)),
        revoked_(Issue("revoked", kRevoked)),
        now_(kBegin + absl::Hours(2)) {}

  static std::string Ca(const std::string& name, const TestKey& key) {
    return CertificatePem(name, key, name, key, kBegin, kEnd, 1, /*is_ca=*/true);
  }
  /// Returns a client's certificate.
  std::string Issue(const std::string& name, int64_t serial) const {
    return CertificatePem(name, NewKey(), "ca", ca_key_, kBegin, kEnd, serial);
  }
  std::string List(const std::vector<int64_t>& revoked, absl::Time begin = kBegin,
                   absl::Time end = kEnd) const {
    return RevocationListPem("ca", ca_key_, revoked, begin, end);
  }
  void Write(const std::string& name, const std::string& text) const {
    folder_.Write("lists/" + name, text);
  }

  /// Reads the folder. Returns the problems.
  std::vector<std::string> Read() {
    RevocationLists::Reading reading =
        RevocationLists::Read(folder_.path("lists"), ca_ + more_cas_, lists_.get());
    lists_ = std::move(reading.lists);
    check_.Set(lists_);
    return reading.problems;
  }
  /// Returns why the certificate is refused, or an empty text.
  std::string Refusal(const std::string& certificate, const std::string& chain = "") {
    return std::string(check_.Check(certificate, chain).message());
  }
  bool IsRefused(const std::string& certificate) { return !Refusal(certificate).empty(); }

  const TempFolder folder_;
  const TestKey ca_key_ = NewKey();
  const std::string ca_;
  std::string more_cas_;
  const std::string good_;
  const std::string revoked_;
  absl::Time now_;
  Metrics metrics_{Metrics::Options()};
  RevocationCheck check_{metrics_, [this] { return now_; }};
  std::shared_ptr<const RevocationLists> lists_;
};

TEST_F(RevocationListsTest, AListCountsUnderAnyNameAndThroughLinks) {
  for (const std::string name : {"crl.pem", "a list", "0123abcd.r0"}) {
    std::filesystem::remove_all(folder_.path("lists"));
    Write(name, "# a comment\n" + List({kRevoked}));
    EXPECT_THAT(Read(), IsEmpty());

    EXPECT_EQ(Refusal(revoked_), "certificate revoked") << name;
    EXPECT_FALSE(IsRefused(good_)) << name;
  }
  folder_.Write("elsewhere", List({kGood}, kBegin + absl::Seconds(1)));
  std::filesystem::create_symlink(folder_.path("elsewhere"), folder_.path("lists/0123abcd.r1"));

  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_TRUE(IsRefused(good_));
  EXPECT_FALSE(IsRefused(revoked_));  // only the newest list of a CA is in force
}

TEST_F(RevocationListsTest, OtherFilesAreNoListsAndTheirCertificatesAreNotTrusted) {
  const TestKey key = NewKey();
  Write("0123abcd.0", Ca("stranger", key));
  Write("crl.pem", List({kRevoked}));
  Write(".hidden", "-----BEGIN X509 CRL-----\n");
  std::filesystem::create_directory(folder_.path("lists/folder"));

  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_TRUE(IsRefused(CertificatePem("guest", key, "stranger", key, kBegin, kEnd, kGood)));
  EXPECT_FALSE(IsRefused(good_));
}

TEST_F(RevocationListsTest, ACaWithoutAListRevokesNothingAndIsNamed) {
  std::filesystem::create_directory(folder_.path("lists"));

  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_FALSE(IsRefused(revoked_));
  EXPECT_THAT(lists_->WithoutList(), ElementsAre("/CN=ca"));
  Write("crl.pem", List({kRevoked}));
  Read();
  EXPECT_THAT(lists_->WithoutList(), IsEmpty());
}

// A list that cannot be used must neither let in whom the last one refuses nor refuse others.
TEST_F(RevocationListsTest, TheLastGoodListStaysInForceAndTheProblemIsNamed) {
  const std::string list = List({kRevoked});
  Write("0123abcd.r0", list);
  ASSERT_THAT(Read(), IsEmpty());
  const TestKey other = NewKey();
  const auto with = [this](auto change) {
    return RevocationListPem("ca", ca_key_, {}, kBegin + absl::Hours(1), kEnd, change);
  };
  const auto add = [](int nid, void* value) {
    return [nid, value](X509_CRL* crl) { X509_CRL_add1_ext_i2d(crl, nid, value, 1, 0); };
  };
  const std::unique_ptr<ASN1_INTEGER, decltype(&ASN1_INTEGER_free)> number(ASN1_INTEGER_new(),
                                                                           ASN1_INTEGER_free);
  const std::unique_ptr<ISSUING_DIST_POINT, decltype(&ISSUING_DIST_POINT_free)> scope(
      ISSUING_DIST_POINT_new(), ISSUING_DIST_POINT_free);
  scope->indirectCRL = 0xFF;
  for (const auto& [text, problem] : std::vector<std::pair<std::string, std::string>>{
           {"", "contains no PEM revocation list"},
           {"garbage", "contains no PEM revocation list"},
           {list.substr(0, list.size() / 2), "contains no PEM revocation list"},
           {RevocationListPem("ca", other, {}, kBegin + absl::Hours(1), kEnd), "is not signed by"},
           {List({}, kBegin - absl::Seconds(1)), "is older than the list of /CN=ca in force"},
           {with(add(NID_delta_crl, number.get())), "is a delta"},
           {with(add(NID_issuing_distribution_point, scope.get())), "is an indirect list"}}) {
    Write("0123abcd.r0", text);

    const std::vector<std::string> problems = Read();

    ASSERT_THAT(problems, Not(IsEmpty()));
    EXPECT_THAT(problems.front(), HasSubstr(problem));
    EXPECT_THAT(problems.front(), HasSubstr("0123abcd.r0"));
    EXPECT_TRUE(IsRefused(revoked_)) << problem;
    EXPECT_FALSE(IsRefused(good_)) << problem;
  }
  std::filesystem::remove(folder_.path("lists/0123abcd.r0"));
  EXPECT_THAT(Read(), ElementsAre(HasSubstr("0123abcd.r0, the list of /CN=ca, has no successor")));
  EXPECT_TRUE(IsRefused(revoked_));
  std::filesystem::remove_all(folder_.path("lists"));
  EXPECT_THAT(Read(), SizeIs(2));
  EXPECT_TRUE(IsRefused(revoked_));
  Write("crl.pem", List({kGood}, kBegin + absl::Hours(1)));
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_TRUE(IsRefused(good_));
}

TEST_F(RevocationListsTest, AFileIsJudgedByItsName) {
  std::filesystem::create_directory(folder_.path("lists"));
  std::filesystem::create_symlink("gone", folder_.path("lists/0123abcd.r0"));
  EXPECT_THAT(Read(), ElementsAre(HasSubstr("0123abcd.r0 cannot be read: No such file")));

  for (const char* const name : {"0123abcd.rX", "0123abcd.r", "123abcd.r0", "0123abcg.r0"}) {
    std::filesystem::remove_all(folder_.path("lists"));
    Write(name, "text");
    EXPECT_THAT(Read(), IsEmpty()) << name;
  }
}

TEST_F(RevocationListsTest, AProblemOfOneCaKeepsBackNoListOfAnother) {
  const TestKey key = NewKey();
  more_cas_ = Ca("other", key);
  const std::string guest = CertificatePem("guest", key, "other", key, kBegin, kEnd, kGood);
  Write("0123abcd.r0", "garbage");
  Write("other", RevocationListPem("other", key, {kGood}, kBegin, kEnd));

  EXPECT_THAT(Read(), SizeIs(1));

  EXPECT_TRUE(IsRefused(guest));
  EXPECT_FALSE(IsRefused(good_));
}

TEST_F(RevocationListsTest, TheListOfACaThatIsRemovedGoesWithIt) {
  const TestKey key = NewKey();
  more_cas_ = Ca("other", key);
  Write("other", RevocationListPem("other", key, {kGood}, kBegin, kEnd));
  ASSERT_THAT(Read(), IsEmpty());
  const std::string guest = CertificatePem("guest", key, "other", key, kBegin, kEnd, kRevoked);
  ASSERT_FALSE(IsRefused(guest));
  std::filesystem::remove(folder_.path("lists/other"));
  more_cas_ = "";

  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_THAT(lists_->lists(), IsEmpty());
  EXPECT_TRUE(IsRefused(guest));
}

TEST_F(RevocationListsTest, AnExpiredListRefusesItsClientsAndCountsThem) {
  const absl::Time end = kBegin + absl::Hours(3);
  Write("crl.pem", List({kRevoked}, kBegin, end));
  ASSERT_THAT(Read(), IsEmpty());
  EXPECT_EQ(lists_->FirstExpiry(), end);
  now_ = end - absl::Seconds(1);
  EXPECT_FALSE(IsRefused(good_));

  now_ = end + absl::Seconds(1);

  EXPECT_EQ(Refusal(good_), "CRL has expired");
  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr("refused_certificates_total{reason=\"list_expired\"} 1\n"));
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_TRUE(IsRefused(good_));
}

TEST_F(RevocationListsTest, AListWithoutAnEndNeverExpires) {
  Write("crl.pem", List({kRevoked}, kBegin, absl::InfiniteFuture()));
  Read();
  EXPECT_EQ(lists_->FirstExpiry(), absl::InfiniteFuture());
  now_ = kEnd - absl::Seconds(1);

  EXPECT_TRUE(IsRefused(revoked_));
  EXPECT_FALSE(IsRefused(good_));
}

// The clock of a CA may be fast.
TEST_F(RevocationListsTest, AListFromTheFutureIsUsedAtOnce) {
  Write("crl.pem", List({kRevoked}, now_ + absl::Minutes(1)));
  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_EQ(Refusal(revoked_), "certificate revoked");
  EXPECT_FALSE(IsRefused(good_));
}

// gRPC resumes sessions of TLS, with the client's own certificate only.
TEST_F(RevocationListsTest, AResumedSessionIsJudgedWithTheIntermediateCaOfItsFirstHandshake) {
  const TestKey key = NewKey();
  const std::string intermediate =
      CertificatePem("intermediate", key, "ca", ca_key_, kBegin, kEnd, kGood, /*is_ca=*/true);
  const auto list = [&key](const std::vector<int64_t>& revoked) {
    return RevocationListPem("intermediate", key, revoked, kBegin, kEnd);
  };
  const std::string leaf =
      CertificatePem("leaf", NewKey(), "intermediate", key, kBegin, kEnd, kRevoked);
  Write("ca", List({}));
  Write("intermediate", list({}));
  Read();
  EXPECT_THAT(Refusal(leaf), HasSubstr("unable to get"));
  EXPECT_EQ(Refusal(leaf, intermediate), "");

  EXPECT_EQ(Refusal(leaf), "");

  Write("intermediate", list({kRevoked}));
  Read();
  EXPECT_EQ(Refusal(leaf), "certificate revoked");
  Write("intermediate", list({}));
  Write("ca", List({kGood}));
  Read();
  EXPECT_EQ(Refusal(leaf), "certificate revoked");  // the intermediate CA is
}

TEST_F(RevocationListsTest, CountsAndNamesWhomItRefuses) {
  Write("crl.pem", List({kRevoked}));
  Read();
  ::testing::internal::CaptureStderr();

  EXPECT_TRUE(IsRefused(revoked_));
  EXPECT_TRUE(IsRefused(""));
  EXPECT_TRUE(IsRefused("text"));

  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log,
              HasSubstr("warning a client's certificate was refused certificate=\"/CN=revoked\" "
                        "at_fault=\"/CN=revoked\" reason=\"certificate revoked\""));
  EXPECT_THAT(metrics_.Serialize(),
              HasSubstr("refused_certificates_total{reason=\"revoked\"} 1\n"));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("refused_certificates_total{reason=\"other\"} 2\n"));
}

}  // namespace
}  // namespace logprobd::testing
