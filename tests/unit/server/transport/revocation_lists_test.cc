#include "server/transport/revocation_lists.h"

#include <openssl/pem.h>
#include <openssl/ui.h>
#include <openssl/x509v3.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
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

using Change = std::function<void(X509_CRL*)>;
using Integer = std::unique_ptr<ASN1_INTEGER, decltype(&ASN1_INTEGER_free)>;

Integer IntegerOf(int64_t value) {
  Integer integer(ASN1_INTEGER_new(), ASN1_INTEGER_free);
  ASN1_INTEGER_set_int64(integer.get(), value);
  return integer;
}

/// Adds the number of a list.
Change WithNumber(int64_t number) {
  return [number](X509_CRL* crl) {
    X509_CRL_add1_ext_i2d(crl, NID_crl_number, IntegerOf(number).get(), 0, 0);
  };
}

/// Adds a distribution point that `set` fills.
Change WithScope(const std::function<void(ISSUING_DIST_POINT&)>& set) {
  return [set](X509_CRL* crl) {
    const std::unique_ptr<ISSUING_DIST_POINT, decltype(&ISSUING_DIST_POINT_free)> scope(
        ISSUING_DIST_POINT_new(), ISSUING_DIST_POINT_free);
    set(*scope);
    X509_CRL_add1_ext_i2d(crl, NID_issuing_distribution_point, scope.get(), 1, 0);
  };
}

/// Adds an identifier of the key of the issuer, a serial number.
Change WithIssuerSerial(int64_t serial) {
  return [serial](X509_CRL* crl) {
    const std::unique_ptr<AUTHORITY_KEYID, decltype(&AUTHORITY_KEYID_free)> id(
        AUTHORITY_KEYID_new(), AUTHORITY_KEYID_free);
    id->serial = IntegerOf(serial).release();
    X509_CRL_add1_ext_i2d(crl, NID_authority_key_identifier, id.get(), 0, 0);
  };
}

/// Adds identifiers of the keys to a certificate, by which OpenSSL finds its CA among those of a
/// name.
std::function<void(X509*)> WithKeyIds(const std::string& own, const std::string& issuer) {
  return [own, issuer](X509* certificate) {
    const auto string = [](const std::string& text) {
      ASN1_OCTET_STRING* const result = ASN1_OCTET_STRING_new();
      ASN1_STRING_set(result, text.data(), static_cast<int>(text.size()));
      return result;
    };
    X509_set_version(certificate, X509_VERSION_3);
    const std::unique_ptr<ASN1_OCTET_STRING, decltype(&ASN1_OCTET_STRING_free)> own_id(
        string(own), ASN1_OCTET_STRING_free);
    X509_add1_ext_i2d(certificate, NID_subject_key_identifier, own_id.get(), 0, 0);
    const std::unique_ptr<AUTHORITY_KEYID, decltype(&AUTHORITY_KEYID_free)> id(
        AUTHORITY_KEYID_new(), AUTHORITY_KEYID_free);
    id->keyid = string(issuer);
    X509_add1_ext_i2d(certificate, NID_authority_key_identifier, id.get(), 0, 0);
  };
}

/// Returns the DER of a PEM text.
std::string DerOf(const std::string& pem) {
  const std::vector<std::string> parts = absl::StrSplit(pem, "-----");
  std::string der;
  absl::Base64Unescape(parts.at(2), &der);
  return der;
}

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
  std::string List(
      const std::vector<int64_t>& revoked, absl::Time begin = kBegin, absl::Time end = kEnd,
      const Change& change = [](X509_CRL*) {}) const {
    return RevocationListPem("ca", ca_key_, revoked, begin, end, change);
  }
  void Write(const std::string& name, const std::string& text) const {
    folder_.Write("lists/" + name, text);
  }

  /// Reads the folder. Returns the problems.
  std::vector<std::string> Read() {
    RevocationLists::ReadResult reading =
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
  std::string ca_;
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
  EXPECT_THAT(lists_->WithoutList(), ElementsAre("/CN=ca (serial 01)"));
  Write("crl.pem", List({kRevoked}));
  Read();
  EXPECT_THAT(lists_->WithoutList(), IsEmpty());
}

// A list that cannot be used must neither let in whom the last one refuses nor refuse others.
TEST_F(RevocationListsTest, TheLastGoodListStaysInForceAndTheProblemIsNamed) {
  const std::string list = List({kRevoked}, kBegin, kEnd, WithNumber(7));
  Write("0123abcd.r0", list);
  ASSERT_THAT(Read(), IsEmpty());
  const TestKey other = NewKey();
  const auto with = [this](const Change& change) {
    return List({}, kBegin + absl::Hours(1), kEnd, change);
  };
  for (const auto& [text, problem] : std::vector<std::pair<std::string, std::string>>{
           {"", "contains no revocation list"},
           {"garbage", "contains no revocation list"},
           {list.substr(0, list.size() / 2), "contains no revocation list"},
           {list.substr(1), "contains no revocation list"},
           {list.substr(1) + list, "is damaged: only 1 of its lists can be read"},
           {list + list.substr(1), "is damaged: only 1 of its lists can be read"},
           {RevocationListPem("ca", other, {}, kBegin + absl::Hours(1), kEnd), "is not signed by"},
           {List({}, kBegin - absl::Seconds(1)), "is older than the list of /CN=ca in force"},
           {List({}, kBegin, kEnd, WithNumber(6)), "is older than the list of /CN=ca in force"},
           {with([](X509_CRL* crl) {
              X509_CRL_add1_ext_i2d(crl, NID_delta_crl, IntegerOf(1).get(), 1, 0);
            }),
            "is a delta"}}) {
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

// Regression: OpenSSL took some of these for no list, and refused everybody because of others.
TEST_F(RevocationListsTest, AListThatMayNotTellAllOfItsCaIsAProblem) {
  const auto with_extension = [](X509_CRL* crl) {
    const std::unique_ptr<X509_EXTENSION, decltype(&X509_EXTENSION_free)> extension(
        X509V3_EXT_conf(nullptr, nullptr, "1.2.3.4.5", "critical,DER:0500"), X509_EXTENSION_free);
    X509_CRL_add_ext(crl, extension.get(), -1);
  };
  const auto with_entry_of_another_ca = [](X509_CRL* crl) {
    const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> names(GENERAL_NAMES_new(),
                                                                              GENERAL_NAMES_free);
    X509_REVOKED* const entry = sk_X509_REVOKED_value(X509_CRL_get_REVOKED(crl), 0);
    X509_REVOKED_add1_ext_i2d(entry, NID_certificate_issuer, names.get(), 1, 0);
  };
  for (const auto& [change, problem] : std::vector<std::pair<Change, std::string>>{
           {WithScope([](ISSUING_DIST_POINT&) {}), "distribution point"},
           {WithScope([](ISSUING_DIST_POINT& scope) { scope.indirectCRL = 0xFF; }),
            "distribution point"},
           {WithScope([](ISSUING_DIST_POINT& scope) { scope.onlyuser = 0xFF; }),
            "distribution point"},
           {WithScope([](ISSUING_DIST_POINT& scope) { scope.onlyuser = scope.onlyCA = 0xFF; }),
            "distribution point"},
           {with_extension, "a critical extension that is unknown"},
           {with_entry_of_another_ca, "an entry with a critical extension"}}) {
    Write("crl.pem", List({kRevoked}, kBegin, kEnd, change));

    EXPECT_THAT(Read(), ElementsAre(HasSubstr(problem)));

    EXPECT_FALSE(IsRefused(good_)) << problem;
  }
}

// Regression: a file of DER, or one whose first line is damaged, was taken for no list.
TEST_F(RevocationListsTest, AFileThatShouldContainAListIsAProblemWithoutOne) {
  std::filesystem::create_directory(folder_.path("lists"));
  std::filesystem::create_symlink("gone", folder_.path("lists/0123abcd.r0"));
  EXPECT_THAT(Read(), ElementsAre(HasSubstr("0123abcd.r0 cannot be read: No such file")));

  for (const char* const name : {"0123abcd.rX", "0123abcd.r", "123abcd.r0", "0123abcg.r0",
                                 "ca.crl.txt", "crl", "ca.pem", "0123abcd.0"}) {
    std::filesystem::remove_all(folder_.path("lists"));
    Write(name, "text");
    EXPECT_THAT(Read(), IsEmpty()) << name;
    Write(name, "");
    EXPECT_THAT(Read(), ElementsAre(HasSubstr("contains no revocation list"))) << name;
    Write(name, List({}).substr(1));
    EXPECT_THAT(Read(), ElementsAre(HasSubstr("contains no revocation list"))) << name;
    std::filesystem::resize_file(folder_.path("lists/" + std::string(name)), 65 << 20);
    EXPECT_THAT(Read(), ElementsAre(HasSubstr("is not a regular file of at most 64 MiB"))) << name;
  }
  for (const char* const name : {"ca.crl", "CA.CRL", "crl.pem", "ca-crl-1.pem", "0123abcd.r12"}) {
    std::filesystem::remove_all(folder_.path("lists"));
    Write(name, "text");
    EXPECT_THAT(Read(), ElementsAre(HasSubstr("contains no revocation list"))) << name;
  }
}

TEST_F(RevocationListsTest, TakesAListOfDerUnderAnyName) {
  for (const char* const name : {"ca.crl", "a list"}) {
    std::filesystem::remove_all(folder_.path("lists"));
    Write(name, DerOf(List({kRevoked})));

    EXPECT_THAT(Read(), IsEmpty());

    EXPECT_EQ(Refusal(revoked_), "certificate revoked");
    EXPECT_FALSE(IsRefused(good_));
  }
  Write("ca.crl", DerOf(List({})).substr(0, 100));
  EXPECT_THAT(Read(), ElementsAre(HasSubstr("ca.crl contains no revocation list")));
}

// Regression: OpenSSL asked on the terminal, and the server waited for an answer.
TEST_F(RevocationListsTest, AsksNobodyForThePassphraseOfAnEncryptedListOrCertificate) {
  static int num_questions;
  num_questions = 0;
  const std::unique_ptr<UI_METHOD, decltype(&UI_destroy_method)> method(UI_create_method("test"),
                                                                        UI_destroy_method);
  UI_method_set_opener(method.get(), [](UI*) {
    ++num_questions;
    return 0;
  });
  UI_set_default_method(method.get());
  const auto encrypted = [](std::string pem) {
    return pem.insert(pem.find('\n') + 1,
                      "Proc-Type: 4,ENCRYPTED\nDEK-Info: DES-EDE3-CBC,0011223344556677\n\n");
  };
  Write("crl.pem", encrypted(List({})));

  const std::vector<std::string> problems = Read();
  const bool is_refused = IsRefused(encrypted(good_));

  UI_set_default_method(UI_OpenSSL());
  EXPECT_THAT(problems, ElementsAre(HasSubstr("crl.pem contains no revocation list")));
  EXPECT_TRUE(is_refused);
  EXPECT_EQ(num_questions, 0);
}

// Regression: OpenSSL takes a list for none whose issuer has another serial number.
TEST_F(RevocationListsTest, TheListOfACaCountsAfterItsCertificateWasIssuedAgain) {
  constexpr int64_t kEarlierSerial = 99;
  Write("crl.pem", List({kRevoked}, kBegin, kEnd, WithIssuerSerial(kEarlierSerial)));

  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_EQ(Refusal(revoked_), "certificate revoked");
  EXPECT_FALSE(IsRefused(good_));
  EXPECT_THAT(lists_->WithoutList(), IsEmpty());
}

// Regression: the clients of the CA with the older list, or with none, were refused.
TEST_F(RevocationListsTest, EachOfTwoCasOfOneNameHasAListOfItsOwn) {
  const TestKey keys[] = {NewKey(), NewKey()};
  const auto issue = [&](int ca, int64_t serial) {
    return CertificatePem("client", NewKey(), "two", keys[ca], kBegin, kEnd, serial, false,
                          WithKeyIds("client", absl::StrCat("key", ca)));
  };
  for (const int ca : {0, 1}) {
    const std::string id = absl::StrCat("key", ca);
    more_cas_ += CertificatePem("two", keys[ca], "two", keys[ca], kBegin, kEnd, 16 + ca, true,
                                WithKeyIds(id, id));
  }
  const auto list = [&](int ca) {
    return RevocationListPem("two", keys[ca], {kRevoked}, kBegin + absl::Minutes(ca), kEnd);
  };
  Write("crl.pem", List({}));
  Write("0", list(0));

  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_THAT(lists_->WithoutList(), ElementsAre("/CN=two (serial 11)"));
  EXPECT_EQ(Refusal(issue(0, kGood)), "");
  EXPECT_EQ(Refusal(issue(0, kRevoked)), "certificate revoked");
  EXPECT_EQ(Refusal(issue(1, kRevoked)), "");
  Write("1", list(1));
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_THAT(lists_->WithoutList(), IsEmpty());
  for (const int ca : {0, 1}) {
    EXPECT_EQ(Refusal(issue(ca, kGood)), "");
    EXPECT_EQ(Refusal(issue(ca, kRevoked)), "certificate revoked");
  }
}

// Regression: the first by the name of its file was used.
TEST_F(RevocationListsTest, OfListsOfOneSecondTheHighestNumberCountsOrAllDo) {
  Write("1", List({kRevoked}, kBegin, kEnd, WithNumber(255)));
  Write("2", List({kGood}, kBegin, kEnd, WithNumber(256)));
  Write("3", List({kRevoked}, kBegin, kEnd, WithNumber(1)));
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_TRUE(IsRefused(good_));
  EXPECT_FALSE(IsRefused(revoked_));

  std::filesystem::remove_all(folder_.path("lists"));
  lists_ = nullptr;
  Write("1", List({}));
  Write("2", List({kRevoked}));
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_TRUE(IsRefused(revoked_));
  EXPECT_FALSE(IsRefused(good_));
}

TEST_F(RevocationListsTest, ATrustedCertificateIsRevokedByTheListOfItsIssuer) {
  const TestKey key = NewKey();
  const auto intermediate = [&](int64_t serial) {
    return CertificatePem("intermediate", key, "ca", ca_key_, kBegin, kEnd, serial, true);
  };
  const std::string leaf = CertificatePem("leaf", NewKey(), "intermediate", key, kBegin, kEnd, 1);
  Write("crl.pem", List({kRevoked}));
  more_cas_ = intermediate(kGood);
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_EQ(Refusal(leaf), "");

  more_cas_ = intermediate(kRevoked);
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_EQ(Refusal(leaf), "certificate revoked");

  ca_ = "";  // so that nothing proves whose list it is
  lists_ = nullptr;
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_EQ(Refusal(leaf), "certificate revoked");
  more_cas_ = intermediate(kGood);
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_EQ(Refusal(leaf), "");
}

TEST_F(RevocationListsTest, AnIntermediateCaWithAListOfAnotherKeyIsRefused) {
  const TestKey keys[] = {NewKey(), NewKey()};
  const std::string intermediate =
      CertificatePem("intermediate", keys[1], "ca", ca_key_, kBegin, kEnd, kGood, true);
  const std::string leaf =
      CertificatePem("leaf", NewKey(), "intermediate", keys[1], kBegin, kEnd, kRevoked);
  const auto list = [&](int key, const std::vector<int64_t>& revoked) {
    return RevocationListPem("intermediate", keys[key], revoked, kBegin + absl::Minutes(key), kEnd);
  };
  Write("0", list(0, {}));
  Read();
  EXPECT_EQ(Refusal(leaf, intermediate), "CRL signature failure");

  Write("1", list(1, {kRevoked}));
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_EQ(Refusal(leaf, intermediate), "certificate revoked");

  Write("1", list(1, {}));
  EXPECT_THAT(Read(), IsEmpty());
  EXPECT_EQ(Refusal(leaf, intermediate), "");
}

// Regression: its list had no successor, for ever.
TEST_F(RevocationListsTest, AnIntermediateCaThatIsTrustedLaterKeepsItsList) {
  const TestKey key = NewKey();
  Write("intermediate", RevocationListPem("intermediate", key, {kRevoked}, kBegin, kEnd));
  ASSERT_THAT(Read(), IsEmpty());
  more_cas_ = CertificatePem("intermediate", key, "ca", ca_key_, kBegin, kEnd, kGood, true);

  EXPECT_THAT(Read(), IsEmpty());

  EXPECT_THAT(lists_->lists(), SizeIs(1));
  EXPECT_EQ(Refusal(CertificatePem("leaf", key, "intermediate", key, kBegin, kEnd, kRevoked)),
            "certificate revoked");
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
