#include "server/base/start_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace logprobd {
namespace {

TEST(StartThreadTest, RunsItsBodyUnderItsName) {
  std::string name;

  auto thread = StartThread("a-name-of-twenty-by", [&name] {
    char buffer[16];
    pthread_getname_np(pthread_self(), buffer, sizeof(buffer));
    name = buffer;
  });

  ASSERT_TRUE(thread.ok()) << thread.status();
  thread->join();
  EXPECT_EQ(name, "a-name-of-twent");
}

void Throw() {
  auto thread = StartThread("thrower", [] { throw std::runtime_error("lost the plot"); });
  thread->join();
}

// Such a process ended without a word about where.
TEST(StartThreadDeathTest, AnExceptionEndsTheProcessAndIsLogged) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(Throw(), ::testing::KilledBySignal(SIGABRT), "thread=thrower what=\"lost the plot\"");
}

[[noreturn]] void StartWithoutMemory() {
  const rlimit none{1, 1};  // no room for a stack
  setrlimit(RLIMIT_AS, &none);
  std::exit(absl::IsResourceExhausted(StartThread("x", [] {}).status()) ? 0 : 1);
}

TEST(StartThreadDeathTest, SaysWhenThereIsNoThread) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer ends a process that has no memory";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(StartWithoutMemory(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace logprobd
