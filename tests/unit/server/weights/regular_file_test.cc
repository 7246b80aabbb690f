#include "server/weights/regular_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using testing::ModelFolder;

constexpr auto kDataLoss = absl::StatusCode::kDataLoss;

// A file in memory that returns at most `bytes_max` bytes per call and is interrupted before each
// call.
class ReluctantFile {
 public:
  ReluctantFile(std::string content, size_t bytes_max)
      : content_(std::move(content)), bytes_max_(bytes_max) {}

  ssize_t Read(const iovec* pieces, int num_pieces, off_t offset) {
    interrupted_ = !interrupted_;
    if (interrupted_) {
      errno = EINTR;
      return -1;
    }
    size_t done = 0;
    auto at = static_cast<size_t>(offset);
    for (int i = 0; i < num_pieces && done < bytes_max_; ++i) {
      const size_t length = std::min({pieces[i].iov_len, bytes_max_ - done, content_.size() - at});
      std::memcpy(pieces[i].iov_base, content_.data() + at, length);
      done += length;
      at += length;
    }
    return static_cast<ssize_t>(done);
  }

 private:
  std::string content_;
  size_t bytes_max_;
  bool interrupted_ = false;
};

TEST(ReadFullyTest, ContinuesAfterInterruptionsAndShortReads) {
  std::string content(1'000, '\0');
  for (size_t i = 0; i < content.size(); ++i) {
    content[i] = static_cast<char>(i * 7);
  }
  for (const size_t bytes_max : {size_t{1}, size_t{3}, size_t{10}, size_t{1'000}}) {
    for (const int64_t pitch : {10, 13}) {
      ReluctantFile file(content, bytes_max);
      std::string out(static_cast<size_t>(99 * pitch), '\xEE');

      const absl::Status status = internal::ReadFully(
          [&file](const iovec* pieces, int num_pieces, off_t offset) {
            return file.Read(pieces, num_pieces, offset);
          },
          5,
          {.num_rows = 99,
           .row_bytes = 10,
           .out = reinterpret_cast<std::byte*>(out.data()),
           .row_pitch_bytes = pitch});

      ASSERT_THAT(status, Succeeds());
      for (size_t row = 0; row < 99; ++row) {
        ASSERT_EQ(out.substr(row * static_cast<size_t>(pitch), 10),
                  content.substr(5 + row * 10, 10));
        if (pitch > 10) {
          ASSERT_EQ(out.substr(row * static_cast<size_t>(pitch) + 10, 3), "\xEE\xEE\xEE");
        }
      }
    }
  }
}

TEST(ReadFullyTest, AnEarlyEndIsDataLoss) {
  std::string out(10, '\0');
  EXPECT_THAT(internal::ReadFully([](const iovec*, int, off_t) { return ssize_t{0}; }, 7,
                                  {.num_rows = 1,
                                   .row_bytes = 10,
                                   .out = reinterpret_cast<std::byte*>(out.data()),
                                   .row_pitch_bytes = 10}),
              Fails(kDataLoss, "ends at byte 7"));
}

TEST(ReadFullyTest, ADiskErrorIsDataLoss) {
  std::string out(10, '\0');
  EXPECT_THAT(internal::ReadFully(
                  [](const iovec*, int, off_t) {
                    errno = EIO;
                    return ssize_t{-1};
                  },
                  0,
                  {.num_rows = 1,
                   .row_bytes = 10,
                   .out = reinterpret_cast<std::byte*>(out.data()),
                   .row_pitch_bytes = 10}),
              Fails(kDataLoss, "Input/output error"));
}

TEST(RegularFileTest, RefusesToReadBeyondItsEnd) {
  const ModelFolder folder;
  folder.WriteFile("f", "0123456789");
  const auto file = RegularFile::Open(folder.PathOf("f"));
  ASSERT_THAT(file, Succeeds());
  std::vector<std::byte> out(5);

  EXPECT_THAT((*file)->Read(5, absl::MakeSpan(out)), Succeeds());
  EXPECT_THAT((*file)->Read(6, absl::MakeSpan(out)), Fails(absl::StatusCode::kOutOfRange, "6"));
  EXPECT_THAT((*file)->Read(-1, absl::MakeSpan(out)), Fails(absl::StatusCode::kOutOfRange, "-1"));
}

}  // namespace
}  // namespace logprobd
