#pragma once

#include <atomic>
#include <cstdint>

namespace logprobd {

/// A point where a fixed number of threads meet, again and again. Thread-safe.
class Rendezvous {
 public:
  /// `size` >= 1.
  explicit Rendezvous(int32_t size) : size_(size) {}

  /// Blocks until all have come. False once it is broken.
  bool Meet();

  /// Nobody meets any more: releases those that wait, now and later.
  void Break();

 private:
  const int32_t size_;
  std::atomic<int32_t> arrived_ = 0;
  std::atomic<uint32_t> round_ = 0;
  std::atomic<bool> is_broken_ = false;
};

}  // namespace logprobd
