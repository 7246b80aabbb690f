#include "client/cpp/copy_pool.h"

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

std::vector<std::byte> Pattern(size_t bytes, size_t seed) {
  std::vector<std::byte> values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>((i + seed) * 37 % 253);
  return values;
}

TEST(CopyPoolTest, CopiesEveryByteWhateverTheSizeAndTheThreads) {
  constexpr size_t kPart = size_t{512} << 10;
  for (const int threads : {0, 1, 3}) {
    CopyPool pool(threads);
    for (const size_t bytes : {size_t{0}, size_t{1}, kPart, 2 * kPart, 7 * kPart + 13}) {
      const std::vector<std::byte> from = Pattern(bytes, bytes);
      std::vector<std::byte> to(bytes);

      pool.Copy(from, absl::MakeSpan(to));

      ASSERT_EQ(to, from) << bytes << " bytes, " << threads << " threads";
    }
  }
}

TEST(CopyPoolTest, ServesManyThreadsAtOnce) {
  CopyPool pool(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 6; ++i) {
    threads.emplace_back([&pool, i] {
      const std::vector<std::byte> from = Pattern((size_t{2} << 20) + i, i);
      for (int turn = 0; turn < 20; ++turn) {
        std::vector<std::byte> to(from.size());
        pool.Copy(from, absl::MakeSpan(to));
        ASSERT_EQ(to, from);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace logprobd::client
