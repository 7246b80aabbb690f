#pragma once

#include <cstddef>
#include <cstdint>

namespace logprobd::kernels {

/// Alignment of arrays that share one allocation, in bytes: that of memory from cudaMalloc.
inline constexpr int64_t kArenaAlignment = 256;

/// Returns `bytes` rounded up to whole alignments.
constexpr int64_t AlignToArena(int64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

/// Places arrays one after another in one allocation. The same calls on an arena without memory
/// give the size of the allocation, so that each array is named once.
class Arena {
 public:
  /// `memory` is aligned like the arrays, and has at least size() bytes after the last call; null:
  /// only sizes are computed.
  explicit Arena(std::byte* memory = nullptr) : memory_(memory) {}

  /// Returns the next array, of `count` elements; null if it is not needed, or without memory.
  template <typename T>
  T* Take(int64_t count, bool is_needed = true) {
    if (!is_needed) return nullptr;
    auto* const array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + size_);
    size_ += AlignToArena(count * static_cast<int64_t>(sizeof(T)));
    return array;
  }

  /// Adds unused space up to `end` bytes from the beginning.
  void ExtendTo(int64_t end) {
    if (end > size_) size_ = AlignToArena(end);
  }

  /// Returns the bytes taken so far.
  int64_t size() const { return size_; }

 private:
  std::byte* memory_;
  int64_t size_ = 0;
};

}  // namespace logprobd::kernels
