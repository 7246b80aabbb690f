#include "server/engine/cuda_library.h"

#include <cublasLt.h>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/cublas_lt_library.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CudaLibraryTest, AMissingLibraryIsAnErrorThatSaysWhatToInstall) {
  const absl::StatusOr<void*> library =
      OpenCudaLibrary("libmissing.so.1", "Missing", "libmissing1");

  EXPECT_EQ(library.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(library.status().message()),
              AllOf(HasSubstr("Missing cannot be loaded (libmissing.so.1: "),
                    HasSubstr("pip install 'logprobd-server[cuda]'"),
                    HasSubstr("install libmissing1"), HasSubstr("LD_LIBRARY_PATH")));
}

// The toolkit's library is in the run path of a build, and needs neither a GPU nor a driver to
// load.
TEST(CublasLtLibraryTest, FunctionsAreThoseOfTheLibrary) {
  ASSERT_EQ(LoadCublasLt(), absl::OkStatus());

  EXPECT_GE(cublasLtGetVersion(), size_t{130'000});
  EXPECT_STREQ(cublasLtGetStatusName(CUBLAS_STATUS_INVALID_VALUE), "CUBLAS_STATUS_INVALID_VALUE");
}

}  // namespace
}  // namespace logprobd
