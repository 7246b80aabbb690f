#include "client/cli/score_files.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/cli/file_bytes.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ScoreInputTest : public ::testing::Test {
 protected:
  /// Writes hidden states [2, 2] in uint16 and two int64 targets.
  ScoreFiles TwoRows() {
    ScoreFiles files;
    files.hidden =
        folder_.Write("h.npy", Npy(NpyHeader("<u2", "(2, 2)"), BytesOf<uint16_t>({1, 2, 3, 4})));
    files.targets =
        folder_.Write("t.npy", Npy(NpyHeader("<i8", "(2,)"), BytesOf<int64_t>({8, -100})));
    files.dtype = "bf16";
    return files;
  }

  std::string ErrorOf(const ScoreFiles& files) {
    return std::string(ScoreInput::Load(files).status().message());
  }

  testing::TempFolder folder_;
};

TEST_F(ScoreInputTest, ReadsNpyFiles) {
  const auto input = ScoreInput::Load(TwoRows());

  ASSERT_TRUE(input.ok()) << input.status();
  const ScoreArgs& args = (*input)->args();
  EXPECT_EQ(args.rows, 2);
  EXPECT_EQ(args.hidden_size, 2);
  EXPECT_EQ(args.dtype, Dtype::kBf16);
  EXPECT_THAT(args.targets, ElementsAre(8, -100));
  EXPECT_EQ(args.hidden.size(), 8U);
  EXPECT_THAT(args.candidate_offsets, IsEmpty());
}

TEST_F(ScoreInputTest, ReadsBothFromOneSafetensorsFile) {
  ScoreFiles files;
  files.input = folder_.Write(
      "a.safetensors",
      Safetensors(R"({"states":{"dtype":"F16","shape":[1,3,2],"data_offsets":[0,12]},)"
                  R"("targets":{"dtype":"I32","shape":[1,3],"data_offsets":[12,24]}})",
                  std::string(12, 'h') + BytesOf<int32_t>({1, 2, 3})));
  files.hidden_name = "states";

  const auto input = ScoreInput::Load(files);

  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_EQ((*input)->args().rows, 3);
  EXPECT_EQ((*input)->args().dtype, Dtype::kF16);
  EXPECT_THAT((*input)->args().targets, ElementsAre(1, 2, 3));
}

TEST_F(ScoreInputTest, TakesATensorNameAfterThePath) {
  ScoreFiles files = TwoRows();
  files.targets = folder_.Write(
      "b.safetensors", Safetensors(R"({"ids":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})",
                                   BytesOf<int32_t>({5, 6})));
  files.targets += ":ids";

  const auto input = ScoreInput::Load(files);

  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_THAT((*input)->args().targets, ElementsAre(5, 6));
}

TEST_F(ScoreInputTest, RepeatsCandidatesForEveryRow) {
  ScoreFiles files = TwoRows();
  files.candidates = {3, 4};

  const auto input = ScoreInput::Load(files);

  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_THAT((*input)->args().candidate_ids, ElementsAre(3, 4, 3, 4));
  EXPECT_THAT((*input)->args().candidate_offsets, ElementsAre(0, 2, 4));
}

TEST_F(ScoreInputTest, ReadsCandidatesAsMatrixOrWithOffsets) {
  ScoreFiles files = TwoRows();
  files.candidate_ids =
      folder_.Write("c.npy", Npy(NpyHeader("<i4", "(2, 1)"), BytesOf<int32_t>({3, 4})));

  const auto square = ScoreInput::Load(files);
  files.candidate_offsets = folder_.Write("o.txt", "0 2\n2\n");
  const auto ragged = ScoreInput::Load(files);

  ASSERT_TRUE(square.ok()) << square.status();
  ASSERT_TRUE(ragged.ok()) << ragged.status();
  EXPECT_THAT((*square)->args().candidate_offsets, ElementsAre(0, 1, 2));
  EXPECT_THAT((*ragged)->args().candidate_offsets, ElementsAre(0, 2, 2));
}

TEST_F(ScoreInputTest, ReadsSegmentsAndTemperaturesFromText) {
  ScoreFiles files = TwoRows();
  files.segments = folder_.Write("s.txt", "0, 1, 2");
  files.row_temperatures = folder_.Write("t.txt", "0.5\n1e0\n");

  const auto input = ScoreInput::Load(files);

  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_THAT((*input)->args().segment_offsets, ElementsAre(0, 1, 2));
  EXPECT_THAT((*input)->args().row_temperatures, ElementsAre(0.5F, 1.0F));
}

TEST_F(ScoreInputTest, RequiresTheDtypeOfUint16) {
  ScoreFiles files = TwoRows();
  files.dtype = "";

  EXPECT_THAT(ErrorOf(files), HasSubstr("holds uint16: give its type with --dtype"));
}

TEST_F(ScoreInputTest, RefusesATypeOtherThanTheStatedOne) {
  ScoreFiles files = TwoRows();
  files.hidden = folder_.Write("h.npy", Npy(NpyHeader("<f4", "(2, 1)"), BytesOf<float>({1, 2})));

  EXPECT_THAT(ErrorOf(files), HasSubstr("holds f32, but --dtype says bf16"));
}

TEST_F(ScoreInputTest, RefusesDoublesAsHiddenStatesAndFloatsAsIds) {
  ScoreFiles doubles = TwoRows();
  doubles.hidden = folder_.Write("d.npy", Npy(NpyHeader("<f8", "(2, 1)"), BytesOf<double>({1, 2})));
  ScoreFiles floats = TwoRows();
  floats.targets = folder_.Write("f.npy", Npy(NpyHeader("<f4", "(2,)"), BytesOf<float>({1, 2})));

  EXPECT_THAT(ErrorOf(doubles), HasSubstr("holds f64, must hold bf16, f16 or f32"));
  EXPECT_THAT(ErrorOf(floats), HasSubstr("holds f32, must hold int32 or int64"));
}

TEST_F(ScoreInputTest, RefusesTargetsThatDoNotMatchOrFit) {
  ScoreFiles few = TwoRows();
  few.targets = folder_.Write("few.npy", Npy(NpyHeader("<i4", "(1,)"), BytesOf<int32_t>({1})));
  ScoreFiles large = TwoRows();
  large.targets = folder_.Write(
      "large.npy", Npy(NpyHeader("<i8", "(2,)"), BytesOf<int64_t>({1, int64_t{1} << 40})));

  EXPECT_THAT(ErrorOf(few), HasSubstr("must have one id for each of the 2 rows"));
  EXPECT_THAT(ErrorOf(large), HasSubstr("[1] is 1099511627776, must fit in int32"));
}

TEST_F(ScoreInputTest, RefusesHiddenStatesOfOneDimension) {
  ScoreFiles files = TwoRows();
  files.hidden =
      folder_.Write("h.npy", Npy(NpyHeader("<u2", "(4,)"), BytesOf<uint16_t>({1, 2, 3, 4})));

  EXPECT_THAT(ErrorOf(files), HasSubstr("has shape [4], must be [rows, hidden_size]"));
}

TEST_F(ScoreInputTest, RefusesOtherFilesAndWords) {
  ScoreFiles text = TwoRows();
  text.segments = folder_.Write("s.txt", "0 one");
  ScoreFiles pickle = TwoRows();
  pickle.hidden = folder_.Write("h.pt", "x");

  ScoreFiles zip = TwoRows();
  zip.row_temperatures = folder_.Write("t.npz", "PK\x03\x04");
  ScoreFiles one_array;
  one_array.input = folder_.Write("one.npy", "x");

  EXPECT_THAT(ErrorOf(zip), HasSubstr("must be .npy, .safetensors or text with numbers"));
  EXPECT_THAT(ErrorOf(one_array), HasSubstr("give two .npy files with --hidden and --targets"));
  EXPECT_THAT(ErrorOf(text), HasSubstr("\"one\" is not a number"));
  EXPECT_THAT(ErrorOf(pickle), HasSubstr("only .safetensors and .npy files can hold this array"));
}

/// A result of two rows with every output.
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
    result.segment_logprob = {-0.5, -0.25};
    result.segment_rows = {2, 0};
    result.segment_greedy = {0, 1};
  }

  std::vector<int32_t> targets = {5, 9};
  std::vector<int32_t> candidate_ids = {4};
  std::vector<int64_t> candidate_offsets = {0, 1, 1};
  ScoreArgs args;
  ScoreResult result;
};

TEST(ScoreOutputTest, WritesOneLinePerRowThenOnePerSegment) {
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
            "\n"
            R"({"segment":1,"logprob":-0.25,"rows":0,"greedy":true})"
            "\n");
}

TEST(ScoreOutputTest, WritesALinePerTrace) {
  const auto stage = [](int64_t begin, int64_t end) {
    return StageTrace{.begin = absl::Nanoseconds(begin), .end = absl::Nanoseconds(end)};
  };
  ScoreResult result;
  result.traces = {{.received = absl::FromUnixNanos(1'800'000'000'123'456'789),
                    .receive = stage(0, 1),
                    .queue = stage(1, 2),
                    .copy = stage(2, 3),
                    .engine = stage(3, 9),
                    .kernel = absl::Nanoseconds(4),
                    .reply = stage(9, 10)},
                   {.received = absl::FromUnixNanos(5), .reply = stage(6, 7)}};
  std::ostringstream out;

  WriteJsonLines(ScoreArgs(), result, out);

  EXPECT_EQ(out.str(),
            R"({"request":0,"received_unix_ns":1800000000123456789,"receive_ns":[0,1],)"
            R"("queue_ns":[1,2],"copy_ns":[2,3],"engine_ns":[3,9],"kernel_ns":4,"reply_ns":[9,10]})"
            "\n"
            R"({"request":1,"received_unix_ns":5,"receive_ns":[0,0],"queue_ns":[0,0],)"
            R"("kernel_ns":0,"reply_ns":[6,7]})"
            "\n");
}

TEST(ScoreOutputTest, WritesAnNpyFileForEachRequestedOutput) {
  const testing::TempFolder folder;
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
  const testing::TempFolder folder;
  const Case c;
  const std::string file = folder.Write("file", "x");

  const absl::Status status = WriteNpyFiles(c.args, c.result, file + "/out");

  EXPECT_THAT(std::string(status.message()), HasSubstr(file));
}

}  // namespace
}  // namespace logprobd::client
