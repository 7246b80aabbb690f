#include "client/cpp/addresses.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

std::vector<std::string> Parsed(absl::string_view text) {
  absl::StatusOr<std::vector<std::string>> addresses = ParseAddresses(text);
  EXPECT_TRUE(addresses.ok()) << addresses.status();
  return addresses.value_or(std::vector<std::string>{});
}

TEST(ParseAddressesTest, NormalisesAddresses) {
  EXPECT_THAT(Parsed("scorer"), ElementsAre("scorer:8470"));
  EXPECT_THAT(Parsed(" a:1 , b,a:1"), ElementsAre("a:1", "b:8470"));
  EXPECT_THAT(Parsed("[::1]:2,[fe80::1]"), ElementsAre("[::1]:2", "[fe80::1]:8470"));
  EXPECT_THAT(Parsed("unix:///run/l.sock"), ElementsAre("unix:///run/l.sock"));
  EXPECT_THAT(Parsed("dns:///scorer,x:1"), ElementsAre("dns:///scorer:8470", "x:1"));
}

TEST(ParseAddressesTest, SaysWhatToWriteInstead) {
  const auto message = [](absl::string_view text) {
    const absl::Status status = ParseAddresses(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };

  EXPECT_THAT(message("a:1,"), HasSubstr("address is empty"));
  EXPECT_THAT(message("::1:8470"), HasSubstr("brackets, as [::1]:8470"));
  EXPECT_THAT(message("dns:///::1:3"), HasSubstr("brackets"));
  EXPECT_THAT(message("http://a:1"), HasSubstr("use host:port"));
  EXPECT_THAT(message("dns:///"), HasSubstr("dns:///name:port"));
  EXPECT_THAT(message("a:http"), HasSubstr("the port is not a number"));
}

TEST(ParseDnsNameTest, SplitsHostAndPort) {
  EXPECT_EQ(ParseDnsName("dns:///scorer.ns:3")->host, "scorer.ns");
  EXPECT_EQ(ParseDnsName("dns:///scorer.ns:3")->port, "3");
  EXPECT_EQ(ParseDnsName("dns:///[::1]:3")->host, "::1");
  EXPECT_FALSE(ParseDnsName("scorer:3").has_value());
}

TEST(ResolveNameTest, WritesRecordsOfBothFamilies) {
  EXPECT_THAT(*ResolveName({.host = "127.0.0.2", .port = "3"}), ElementsAre("127.0.0.2:3"));
  EXPECT_THAT(*ResolveName({.host = "::1", .port = "3"}), ElementsAre("[::1]:3"));
  EXPECT_EQ(ResolveName({.host = "no.such.name.invalid", .port = "3"}).status().code(),
            absl::StatusCode::kUnavailable);
}

class AddressBookTest : public ::testing::Test {
 protected:
  static absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }
  static constexpr char kName[] = "dns:///scorer:3";
};

TEST_F(AddressBookTest, LooksUpEvery30SecondsAndSoonAfterAFailure) {
  AddressBook book({kName});
  EXPECT_TRUE(book.TakeDue(At(100), absl::InfinitePast()));
  book.Update(kName, std::vector<std::string>{"10.0.0.1:3"});

  EXPECT_FALSE(book.TakeDue(At(129), absl::InfinitePast()));
  EXPECT_TRUE(book.TakeDue(At(130), absl::InfinitePast()));
  EXPECT_FALSE(book.TakeDue(At(130.9), At(130.5)));
  EXPECT_TRUE(book.TakeDue(At(131), At(130.5)));
  EXPECT_FALSE(book.TakeDue(At(133), At(130.5)));
}

TEST_F(AddressBookTest, LooksUpANameWithoutRecordsAgainAfterASecond) {
  AddressBook book({kName});
  EXPECT_TRUE(book.TakeDue(At(100), absl::InfinitePast()));
  book.Update(kName, absl::UnavailableError("unknown name"));

  EXPECT_THAT(book.servers(), IsEmpty());
  EXPECT_THAT(book.errors(), Contains(Pair(kName, "unknown name")));
  EXPECT_FALSE(book.TakeDue(At(100.9), absl::InfinitePast()));
  EXPECT_TRUE(book.TakeDue(At(101), absl::InfinitePast()));
}

TEST_F(AddressBookTest, KeepsTheLastRecordsOfANameThatFails) {
  AddressBook book({"a:1", kName});
  book.Update(kName, std::vector<std::string>{"10.0.0.1:3", "a:1"});

  book.Update(kName, absl::UnavailableError("timed out"));

  EXPECT_THAT(book.servers(), ElementsAre("a:1", "10.0.0.1:3"));
}

TEST_F(AddressBookTest, IsPlainOnlyWithOneAddressThatIsNotAName) {
  EXPECT_TRUE(AddressBook({"a:1"}).is_plain());
  EXPECT_FALSE(AddressBook({"a:1", "b:1"}).is_plain());
  EXPECT_FALSE(AddressBook({kName}).is_plain());
  EXPECT_FALSE(AddressBook({"a:1"}).TakeDue(absl::InfiniteFuture(), absl::InfinitePast()));
}

}  // namespace
}  // namespace logprobd::client
