#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "tests/support/safetensors_cases.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace logprobd {
namespace {

void RunOnce(const std::string& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

// Size of the largest file that is mutated, in bytes. The few larger ones only test limits.
constexpr size_t kMutatedBytesMax = 4'096;

std::vector<std::string> Corpus() {
  std::vector<std::string> corpus;
  for (const auto& one : testing::SafetensorsCases()) {
    if (one.bytes.size() <= kMutatedBytesMax) {
      corpus.push_back(one.bytes);
    }
  }
  return corpus;
}

TEST(SafetensorsMutationsTest, KeepsThePromisesOfTheReaderForTheCorpus) {
  for (const auto& one : testing::SafetensorsCases()) {
    SCOPED_TRACE(one.name);
    RunOnce(one.bytes);
  }
}

TEST(SafetensorsMutationsTest, KeepsThePromisesOfTheReaderForTwentyThousandMutations) {
  const std::vector<std::string> corpus = Corpus();
  std::mt19937 random(20'260'101);
  const auto below = [&random](size_t bound) { return random() % bound; };
  constexpr absl::string_view kPieces[] = {"0",
                                           "1",
                                           "-",
                                           "{",
                                           "}",
                                           "[",
                                           "]",
                                           "\"",
                                           ",",
                                           ":",
                                           "\\u",
                                           "e9",
                                           ".",
                                           "null",
                                           "true",
                                           " ",
                                           "\0",
                                           "\xFF",
                                           "9007199254740993"};

  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = corpus[below(corpus.size())];
    const size_t num_changes = 1 + below(4);
    for (size_t change = 0; change < num_changes; ++change) {
      const size_t at = bytes.empty() ? 0 : below(bytes.size() + 1);
      switch (below(5)) {
        case 0:
          if (at < bytes.size()) {
            bytes[at] = static_cast<char>(random());
          }
          break;
        case 1:
          bytes.insert(at, std::string(kPieces[below(std::size(kPieces))]));
          break;
        case 2:
          bytes.erase(at, 1 + below(8));
          break;
        case 3: {  // Inserts a piece of another file.
          const std::string& other = corpus[below(corpus.size())];
          const size_t from = other.empty() ? 0 : below(other.size());
          bytes.insert(at, other.substr(from, below(64)));
          break;
        }
        default:  // Corrects the length field, so that the parser reaches the JSON.
          if (bytes.size() >= 8) {
            const uint64_t length = bytes.size() - 8 - below(2) * below(bytes.size() - 7);
            for (size_t k = 0; k < 8; ++k) {
              bytes[k] = static_cast<char>((length >> (8 * k)) & 0xFFU);
            }
          }
          break;
      }
    }
    RunOnce(bytes);
  }
}

}  // namespace
}  // namespace logprobd
