// What a GPU fault does to the engine. Each test runs in a process of its own, since the fault
// breaks the process's CUDA context.

#include <cstdio>
#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/gpu/trap_kernel.h"
#include "tests/support/engine_case.h"
#include "tests/support/in_memory_head.h"

namespace logprobd::testing {
namespace {

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

[[noreturn]] void ScoreAfterAFault() {
  {
    const auto head = MakeRandomHead({});
    auto engine = CreateGpuEngine(*head, 64);
    Expect(engine.ok(), "the engine is made");
    const EngineCase inputs = MakeRandomCase(*head, 5);
    Expect(RunCase(**engine, inputs).status.ok(), "the first batch is scored");
    Expect((*engine)->healthy(), "the engine is healthy");

    Expect(BreakContext() != cudaSuccess, "the context is broken");
    const absl::Status at_fault = RunCase(**engine, inputs).status;
    const absl::Status later = RunCase(**engine, inputs).status;

    Expect(absl::IsInternal(at_fault), "the batch after the fault gets INTERNAL");
    Expect(at_fault.message().find("CUDA error") != std::string::npos, "the message says CUDA");
    Expect(absl::IsInternal(later), "later batches get INTERNAL");
    Expect(!(*engine)->healthy(), "the engine is not healthy");
  }  // destruction must not hang
  std::exit(0);
}

TEST(GpuFaultTest, AFaultMakesTheEngineUnhealthyAndEveryBatchInternal) {
  if (!NoGpuReason().empty()) GTEST_SKIP() << NoGpuReason();
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";

  EXPECT_EXIT(ScoreAfterAFault(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace logprobd::testing
