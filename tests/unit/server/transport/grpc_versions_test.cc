#include "server/transport/grpc_versions.h"

#include <string>

#include "gmock/gmock.h"
#include "grpcpp/version_info.h"
#include "gtest/gtest.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(GrpcVersionsTest, TheVersionIsThatOfTheLibrary) {
  // Debian's updates of the library keep the first two numbers.
  EXPECT_THAT(GrpcVersion(), ::testing::StartsWith(std::to_string(GRPC_CPP_VERSION_MAJOR) + "." +
                                                   std::to_string(GRPC_CPP_VERSION_MINOR)));
}

TEST(GrpcVersionsTest, OldAndUnknownVersionsHaveHolesWithNames) {
  for (const char* const version :
       {"1.51.1", "1.82.9", "1.82", "0.99.0", "1", "", "new", "9.new", "1.new.0"}) {
    EXPECT_THAT(GrpcVulnerabilities(version),
                AllOf(HasSubstr("CVE-2023-33953"), HasSubstr("CVE-2023-44487")))
        << version;
  }
}

TEST(GrpcVersionsTest, VersionsFrom183OnHaveNone) {
  for (const char* const version : {"1.83.0", "1.83", "1.84.0-dev", "2.0", "2.0.0"}) {
    EXPECT_EQ(GrpcVulnerabilities(version), "") << version;
  }
}

}  // namespace
}  // namespace logprobd
