#include "client/cli/score_output.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "client/cli/tensor_files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cli/temp_folder.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Two rows with every kind of output.
struct Case {
  Case() {
    args.rows = 2;
    args.targets = targets;
    args.candidate_ids = candidate_ids;
    args.candidate_offsets = candidate_offsets;
    result.rows = 2;
    result.top_k = 2;
    result.logprob = {-0.1F, std::numeric_limits<float>::quiet_NaN()};
    result.greedy = {1, 0};
    result.top_k_ids = {5, 6, 7, 8};
    result.top_k_logprobs = {-0.1F, -2, -3, -4};
    result.candidate_logprobs = {-9};
    result.segment_logprob = {-0.5};
    result.segment_rows = {2};
    result.segment_greedy = {0};
  }

  std::vector<int32_t> targets = {5, 9};
  std::vector<int32_t> candidate_ids = {4};
  std::vector<int64_t> candidate_offsets = {0, 1, 1};
  ScoreArgs args;
  ScoreResult result;
};

TEST(ScoreOutputTest, WritesALineARowThenALineASegment) {
  const Case c;
  std::ostringstream out;

  WriteJsonLines(c.args, c.result, out);

  EXPECT_EQ(out.str(),
            R"({"row":0,"target":5,"logprob":-0.1,"greedy":true,"top_k_ids":[5,6],)"
            R"("top_k_logprobs":[-0.1,-2],"candidate_ids":[4],"candidate_logprobs":[-9]})"
            "\n"
            R"({"row":1,"target":9,"logprob":null,"greedy":false,"top_k_ids":[7,8],)"
            R"("top_k_logprobs":[-3,-4],"candidate_ids":[],"candidate_logprobs":[]})"
            "\n"
            R"({"segment":0,"logprob":-0.5,"rows":2,"greedy":false})"
            "\n");
}

TEST(ScoreOutputTest, WritesAnNpyFileForEachOutputAskedFor) {
  const TempFolder folder;
  const Case c;

  ASSERT_TRUE(WriteNpyFiles(c.args, c.result, folder.path("out/deep")).ok());

  const auto top_k = ReadNpy(folder.path("out/deep/top_k_ids.npy"));
  ASSERT_TRUE(top_k.ok()) << top_k.status();
  EXPECT_THAT(top_k->shape, ElementsAre(2, 2));
  const auto logprob = ReadNpy(folder.path("out/deep/logprob.npy"));
  ASSERT_TRUE(logprob.ok()) << logprob.status();
  EXPECT_EQ((*ToFloats(*logprob))[0], -0.1F);
  EXPECT_THAT(folder.Read("out/deep/greedy.npy"), HasSubstr("'|b1'"));
  EXPECT_FALSE(ReadNpy(folder.path("out/deep/entropy.npy")).ok());
}

TEST(ScoreOutputTest, NamesTheFolderThatCannotBeWritten) {
  const TempFolder folder;
  const Case c;
  const std::string file = folder.Write("file", "x");

  const absl::Status status = WriteNpyFiles(c.args, c.result, file + "/out");

  EXPECT_THAT(std::string(status.message()), HasSubstr(file));
}

}  // namespace
}  // namespace logprobd::client
