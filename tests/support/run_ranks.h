#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace logprobd::testing {

/// Runs `body(rank)` for each rank on its own thread, and waits for all threads.
template <typename Body>
void RunRanks(int32_t num_ranks, const Body& body) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace logprobd::testing
