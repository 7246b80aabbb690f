// Measures the fused kernel with its combine step, the cuBLASLt GEMM that writes bf16 logits (the
// fastest of eight algorithms), and a kernel that only reads the weight. All run in one process,
// and each round runs them in random order. Figures are medians.
//
//   gpu_fused_bench [--out FILE] [--commit ID] [--rounds 5] [--part PART] [--settle-ms MS]
//                   [--heads HxV,...]
//
// --help lists the parts. The part `large` also reports the energy of a call and the name of
// cuBLASLt's kernel; the part `rows` replays CUDA graphs at many numbers of rows; `choices` prints
// the time of each block tile and order, from which choice.cc is derived, and records
// nothing. A settled time is measured after untimed runs of the same work (--settle-ms), so that
// the power limit is in force. A burst is two milliseconds of work after 25 ms of rest. With five
// rounds a head of `large` takes about 70 s.

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"
#include "tests/bench/bench_kernels.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/cuda_graph.h"
#include "tests/bench/fused_fixture.h"
#include "tests/bench/gpu_bench.h"
#include "tests/bench/rows_bench.h"
#include "tests/bench/stopwatch.h"
#include "tests/bench/storing_gemm.h"

namespace logprobd::testing {
namespace {

/// Time of the same work before a settled time. At the power limit the clock still falls after
/// tenths of a second, so `large` waits longer than the parts that measure many cases.
constexpr double kSettleMillisecondsOfLarge = 1'000;
constexpr double kSettleMillisecondsOfOthers = 60;
constexpr char kGemm[] = "cuBLASLt GEMM that writes bf16 logits";

struct Flags {
  BenchFlags common;
  std::string part = "large";
  std::optional<double> settle_milliseconds = {};  ///< Default: depends on the part.
  std::vector<std::string> heads = {};             ///< Of `large`. Empty: every head.
};

BenchRecord Record(const std::string& what, const std::vector<double>& ours,
                   const std::string& baseline_what, double baseline, const std::string& note) {
  BenchRecord record = RecordOf(what, "ms", ours);
  record.baseline_what = baseline_what;
  record.baseline_figure = baseline;
  record.note = note;
  return record;
}

using Head = std::pair<int64_t, int64_t>;  ///< Hidden size and vocabulary size.

/// Returns heads that are written as HxV, or every head of `large` for an empty list.
absl::StatusOr<std::vector<Head>> HeadsOf(const std::vector<std::string>& texts) {
  if (texts.empty()) {
    return std::vector<Head>{{896, 151'936},   {1'024, 151'936}, {1'536, 151'936}, {2'048, 151'936},
                             {2'048, 248'320}, {2'304, 256'000}, {3'584, 152'064}, {4'096, 128'256},
                             {4'096, 151'936}, {7'168, 129'280}};
  }
  std::vector<Head> heads;
  for (const std::string& text : texts) {
    const std::vector<std::string> sizes = absl::StrSplit(text, 'x');
    Head head;
    if (sizes.size() != 2 || !absl::SimpleAtoi(sizes[0], &head.first) ||
        !absl::SimpleAtoi(sizes[1], &head.second) || head.first < 1 || head.second < 1) {
      return absl::InvalidArgumentError(absl::StrCat("--heads: ", text, " is not HxV"));
    }
    heads.push_back(head);
  }
  return heads;
}

/// Returns energy and power of both contenders for a note, or an empty string without a counter.
std::string EnergyNote(const Times& ours, const Times& gemm) {
  if (ours.joules.empty() || gemm.joules.empty()) return "";
  return absl::StrFormat("; energy %.3g J at %.0f W, GEMM's %.3g J at %.0f W", Median(ours.joules),
                         Median(ours.watts), Median(gemm.joules), Median(gemm.watts));
}

absl::Status MeasureLarge(const Flags& flags, Stopwatch& watch, std::vector<BenchRecord>& records) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Head> heads, HeadsOf(flags.heads));
  for (const auto& [hidden_size, vocab_size] : heads) {
    LOGPROBD_ASSIGN_OR_RETURN(const auto fixture, FusedFixture::Create({.hidden_size = hidden_size,
                                                                        .vocab_size = vocab_size,
                                                                        .rows_max = 16'384}));
    for (const int64_t rows : {1'024, 4'096, 8'192, 16'384}) {
      LOGPROBD_ASSIGN_OR_RETURN(
          const auto gemm,
          StoringGemm::Create({.rows = rows, .columns = vocab_size, .depth = hidden_size},
                              fixture->NextWeight(), fixture->Rows(kernels::Dtype::kBf16),
                              watch.timer()));
      const Work run_gemm = [&gemm](cudaStream_t s) { return gemm->Run(s); };
      const auto kernel = KernelNames(run_gemm, watch.timer().stream());
      // The next launch must not report an error of the line above.
      if (!kernel.ok()) (void)cudaGetLastError();
      LOGPROBD_ASSIGN_OR_RETURN(
          const auto times,
          watch.Measure({{"fused", [&](cudaStream_t s) { return fixture->Score(rows, {}, s); }},
                         {"gemm", run_gemm}},
                        flags.common.rounds));
      const Times& ours = times.at("fused");
      const Times& theirs = times.at("gemm");
      const std::string shape = absl::StrCat("H=", hidden_size, ", V=", vocab_size, ", T=", rows);
      const std::string note = absl::StrCat(
          absl::StrFormat("burst %.3g ms, %.2f of the GEMM's; SM clock %.0f MHz, GEMM %.0f",
                          Median(ours.burst), Median(ours.burst) / Median(theirs.burst),
                          Median(ours.megahertz), Median(theirs.megahertz)),
          EnergyNote(ours, theirs), "; GEMM's kernel ",
          kernel.ok() ? *kernel : absl::StrCat("unknown: ", kernel.status().message()));
      std::printf("%-28s %8.3f ms, %.3f times the GEMM; %s\n", shape.c_str(), Median(ours.settled),
                  Median(ours.settled) / Median(theirs.settled), note.c_str());
      std::fflush(stdout);
      records.push_back(Record(absl::StrCat("GPU fused, ", shape), ours.settled, kGemm,
                               Median(theirs.settled), note));
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureSmall(const Flags& flags, Stopwatch& watch, std::vector<BenchRecord>& records) {
  constexpr std::pair<int64_t, int64_t> kHeads[] = {
      {896, 151'936}, {2'048, 151'936}, {3'584, 152'064}, {4'096, 151'936}};
  constexpr int64_t kHeadCount = 3;
  for (const auto& [hidden_size, vocab_size] : kHeads) {
    LOGPROBD_ASSIGN_OR_RETURN(const auto fixture, FusedFixture::Create({.hidden_size = hidden_size,
                                                                        .vocab_size = vocab_size,
                                                                        .rows_max = 512,
                                                                        .num_heads = kHeadCount}));
    for (const int64_t rows : {1, 16, 64, 128, 256, 512}) {
      std::vector<std::unique_ptr<StoringGemm>> gemms;
      for (int64_t i = 0; i < kHeadCount; ++i) {
        LOGPROBD_ASSIGN_OR_RETURN(
            auto gemm,
            StoringGemm::Create({.rows = rows, .columns = vocab_size, .depth = hidden_size},
                                fixture->NextWeight(), fixture->Rows(kernels::Dtype::kBf16),
                                watch.timer()));
        gemms.push_back(std::move(gemm));
      }
      size_t turn = 0;
      LOGPROBD_ASSIGN_OR_RETURN(
          const auto times,
          watch.Measure(
              {{"fused", [&](cudaStream_t s) { return fixture->Score(rows, {}, s); }},
               {"read",
                [&](cudaStream_t s) -> absl::Status {
                  LOGPROBD_RETURN_IF_CUDA_ERROR(
                      LaunchReadAll(fixture->NextWeight(), fixture->weight_bytes(), s));
                  return absl::OkStatus();
                }},
               {"gemm", [&](cudaStream_t s) { return gemms[turn++ % gemms.size()]->Run(s); }}},
              flags.common.rounds));
      const std::vector<double>& ours = times.at("fused").settled;
      const double read = Median(times.at("read").settled);
      const double gemm = Median(times.at("gemm").settled);
      const std::string shape = absl::StrCat("H=", hidden_size, ", V=", vocab_size, ", T=", rows);
      const std::string note =
          absl::StrFormat("weight read at %.2f TB/s; three heads in turn",
                          static_cast<double>(fixture->weight_bytes()) / read / 1e9);
      std::printf("%-28s %.4f ms, %.3f times reading the weight, %.3f times the GEMM\n",
                  shape.c_str(), Median(ours), Median(ours) / read, Median(ours) / gemm);
      std::fflush(stdout);
      records.push_back(
          Record(absl::StrCat("GPU fused, few rows, ", shape), ours, kGemm, gemm, note));
      records.push_back(Record(absl::StrCat("GPU fused, few rows, ", shape), ours,
                               "reading the weight once", read, note));
    }
  }
  return absl::OkStatus();
}

constexpr std::pair<int64_t, int64_t> kRowsShapes[] = {
    {896, 151'936}, {2'048, 151'936}, {4'096, 151'936}, {5'376, 262'208}};

/// Multiples of 8, numbers next to one, and primes.
constexpr int64_t kRowCounts[] = {
    1,   2,   8,   16,  31,  40,    64,    65,    72,    80,    88,    96,    97,    104,   112,
    113, 120, 128, 129, 136, 144,   160,   161,   176,   192,   193,   208,   224,   240,   251,
    256, 257, 272, 288, 320, 336,   352,   384,   416,   448,   480,   512,   520,   577,   640,
    700, 768, 800, 900, 997, 1'024, 1'040, 1'300, 1'550, 2'056, 2'100, 2'503, 3'000, 3'700, 4'200};

absl::Status MeasureRows(const Flags& flags, Stopwatch& watch, std::vector<BenchRecord>& records) {
  for (const auto& [hidden_size, vocab_size] : kRowsShapes) {
    LOGPROBD_ASSIGN_OR_RETURN(const auto bench, RowsBench::Create(hidden_size, vocab_size, 4'200));
    std::vector<double> ratios;
    for (const int64_t rows : kRowCounts) {
      LOGPROBD_ASSIGN_OR_RETURN(
          const auto times,
          bench->Measure(rows, {{"fused", {}}}, flags.common.rounds, watch.timer()));
      const double gemm = Median(times.at("gemm"));
      ratios.push_back(Median(times.at("fused")) / gemm);
      std::printf("H=%ld T=%ld %.4f ms, %.3f times the GEMM\n", static_cast<long>(hidden_size),
                  static_cast<long>(rows), Median(times.at("fused")), ratios.back());
      std::fflush(stdout);
      records.push_back(Record(
          absl::StrCat("GPU fused, in a graph, H=", hidden_size, ", V=", vocab_size, ", T=", rows),
          times.at("fused"), kGemm, gemm, "target at most 1.10; three heads in turn"));
    }
    std::printf("H=%ld: median %.3f, highest %.3f times the GEMM\n", static_cast<long>(hidden_size),
                Median(ratios), *std::max_element(ratios.begin(), ratios.end()));
  }
  return absl::OkStatus();
}

absl::Status MeasureChoicesForManyRows(const Flags& flags, Stopwatch& watch) {
  using kernels::FusedRaster;
  using kernels::FusedTile;
  struct Shape {
    int64_t hidden_size;
    int64_t vocab_size;
    int64_t rows;
    int32_t num_splits;  // of fp32 rows; 1: bf16 rows
  };
  constexpr Shape kShapes[] = {
      {1'024, 151'936, 8'192, 1}, {2'048, 151'936, 8'192, 1}, {4'096, 151'936, 8'192, 1},
      {5'120, 151'936, 8'192, 1}, {7'168, 129'280, 8'192, 1}, {5'376, 262'208, 6'144, 1},
      {2'048, 151'936, 8'192, 2}, {4'096, 151'936, 4'096, 2}, {4'096, 151'936, 8'192, 2}};
  constexpr FusedRaster kRows = FusedRaster::kAlongRows;
  constexpr FusedRaster kVocab = FusedRaster::kAlongVocab;
  const std::map<std::string, kernels::FusedChoice> choices = {
      {"128 rows 4", {FusedTile::k128PingPong, kRows, 4}},
      {"128 rows 8", {FusedTile::k128PingPong, kRows, 8}},
      {"128 columns vocabulary 16", {FusedTile::k128Columns, kVocab, 16}},
      {"128 vocabulary 2", {FusedTile::k128PingPong, kVocab, 2}},
      {"128 vocabulary 4", {FusedTile::k128PingPong, kVocab, 4}},
      {"128 vocabulary 8", {FusedTile::k128PingPong, kVocab, 8}},
      {"256 vocabulary 1", {FusedTile::k256Cooperative, kVocab, 1}},
      {"256 vocabulary 2", {FusedTile::k256Cooperative, kVocab, 2}},
      {"256 vocabulary 4", {FusedTile::k256Cooperative, kVocab, 4}},
      {"s112 rows 1", {FusedTile::kSwapped112, kRows, 1}},
      {"s112 vocabulary 2", {FusedTile::kSwapped112, kVocab, 2}},
      {"s112 vocabulary 4", {FusedTile::kSwapped112, kVocab, 4}},
      {"mma 128", {FusedTile::kMma128, kRows, 1}}};
  for (const Shape& shape : kShapes) {
    LOGPROBD_ASSIGN_OR_RETURN(const auto fixture,
                              FusedFixture::Create({.hidden_size = shape.hidden_size,
                                                    .vocab_size = shape.vocab_size,
                                                    .rows_max = shape.rows}));
    LOGPROBD_ASSIGN_OR_RETURN(
        const auto gemm,
        StoringGemm::Create(
            {.rows = shape.rows, .columns = shape.vocab_size, .depth = shape.hidden_size},
            fixture->NextWeight(), fixture->Rows(kernels::Dtype::kBf16), watch.timer()));
    std::map<std::string, Work> works = {{"gemm", [&](cudaStream_t s) { return gemm->Run(s); }}};
    for (const auto& [name, choice] : choices) {
      FusedFixture::Ask ask;
      ask.choice = choice;
      if (shape.num_splits > 1) ask.dtype = kernels::Dtype::kF32;
      ask.num_splits = shape.num_splits;
      works[name] = [&fixture, &shape, ask](cudaStream_t s) {
        return fixture->Score(shape.rows, ask, s);
      };
    }
    LOGPROBD_ASSIGN_OR_RETURN(const auto times, watch.Measure(works, flags.common.rounds));
    const Times& baseline = times.at("gemm");
    std::printf("H=%ld T=%ld, %d splits, gemm %.3f / %.3f ms;",
                static_cast<long>(shape.hidden_size), static_cast<long>(shape.rows),
                static_cast<int>(shape.num_splits), Median(baseline.settled),
                Median(baseline.burst));
    for (const auto& [name, choice] : choices) {
      std::printf(" %s %.3f / %.3f;", name.c_str(),
                  Median(times.at(name).settled) / Median(baseline.settled),
                  Median(times.at(name).burst) / Median(baseline.burst));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status MeasureChoices(const Flags& flags, Stopwatch& watch, std::vector<BenchRecord>&) {
  LOGPROBD_RETURN_IF_ERROR(MeasureChoicesForManyRows(flags, watch));
  using kernels::FusedRaster;
  using kernels::FusedTile;
  const std::map<std::string, kernels::FusedChoice> choices = {
      {"64", {FusedTile::k64PingPong, FusedRaster::kAlongRows, 1}},
      {"64x2", {FusedTile::k64Pair, FusedRaster::kAlongRows, 1}},
      {"128", {FusedTile::k128PingPong, FusedRaster::kAlongRows, 1}},
      {"128c", {FusedTile::k128Columns, FusedRaster::kAlongRows, 2}},
      {"s80", {FusedTile::kSwapped80, FusedRaster::kAlongRows, 1}},
      {"s96", {FusedTile::kSwapped96, FusedRaster::kAlongRows, 1}},
      {"s112", {FusedTile::kSwapped112, FusedRaster::kAlongRows, 1}},
      {"s96/4", {FusedTile::kSwapped96, FusedRaster::kAlongRows, 4}},
      {"s112/4", {FusedTile::kSwapped112, FusedRaster::kAlongRows, 4}},
      {"m64", {FusedTile::kMma64, FusedRaster::kAlongRows, 1}},
      {"m128", {FusedTile::kMma128, FusedRaster::kAlongRows, 1}}};
  std::map<std::string, FusedFixture::Ask> asks = {{"chosen", {}}};
  for (const auto& [name, choice] : choices) asks[name].choice = choice;
  constexpr int64_t kRows[] = {1,   32,  64,  96,  128, 160, 192,   224,   256,   320,  384,
                               448, 512, 520, 640, 768, 900, 1'040, 1'300, 2'100, 4'200};
  for (const auto& [hidden_size, vocab_size] : kRowsShapes) {
    LOGPROBD_ASSIGN_OR_RETURN(const auto bench, RowsBench::Create(hidden_size, vocab_size, 4'200));
    for (const int64_t rows : kRows) {
      LOGPROBD_ASSIGN_OR_RETURN(const auto times,
                                bench->Measure(rows, asks, flags.common.rounds, watch.timer()));
      const double gemm = Median(times.at("gemm"));
      std::printf("H=%ld T=%ld gemm %.4f ms;", static_cast<long>(hidden_size),
                  static_cast<long>(rows), gemm);
      for (const auto& [name, ask] : asks) {
        std::printf(" %s %.3f", name.c_str(), Median(times.at(name)) / gemm);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureExtras(const Flags& flags, Stopwatch& watch,
                           std::vector<BenchRecord>& records) {
  constexpr int64_t kVocabSize = 151'936;
  using Ask = FusedFixture::Ask;
  const std::map<std::string, Ask> asks = {
      {"logprob and entropy", {}},
      {"without combine", {.combine = false}},
      {"and argmax", {.argmax = true}},
      {"and rank of the target", {.target_rank = true}},
      {"and sum of p squared", {.sum_p_squared = true}},
      {"entropy at its own temperature", {.entropy_temperature = true}},
      {"and top-k of 20", {.top_k = 20}},
      {"and 20 candidates per row", {.candidates = true}},
      {"fp32 rows as two bf16 splits, split included", {.dtype = kernels::Dtype::kF32}},
      {"fp32 rows as three bf16 splits, split included",
       {.dtype = kernels::Dtype::kF32, .num_splits = 3}}};
  for (const int64_t hidden_size : {896, 2'048, 4'096}) {
    LOGPROBD_ASSIGN_OR_RETURN(const auto fixture, FusedFixture::Create({.hidden_size = hidden_size,
                                                                        .vocab_size = kVocabSize,
                                                                        .rows_max = 8'192}));
    for (const int64_t rows : {1'024, 8'192}) {
      std::map<std::string, Work> works;
      for (const auto& [name, ask] : asks) {
        works[name] = [&fixture, rows, ask](cudaStream_t s) {
          return fixture->Score(rows, ask, s);
        };
      }
      LOGPROBD_ASSIGN_OR_RETURN(const auto times, watch.Measure(works, flags.common.rounds));
      const double plain = Median(times.at("logprob and entropy").settled);
      for (const auto& [name, ask] : asks) {
        const std::vector<double>& ours = times.at(name).settled;
        std::printf("H=%ld T=%ld %-46s %8.3f ms, %.3f times logprob and entropy\n",
                    static_cast<long>(hidden_size), static_cast<long>(rows), name.c_str(),
                    Median(ours), Median(ours) / plain);
        records.push_back(
            Record(absl::StrCat("GPU fused, H=", hidden_size, ", V=151936, T=", rows, ", ", name),
                   ours, "logprob and entropy alone", plain, ""));
      }
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureWorkspace(const Flags& flags, Stopwatch& watch,
                              std::vector<BenchRecord>& records) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  constexpr int64_t kRows = 8'192;
  for (const auto& [hidden_size, vocab_size] :
       {std::pair<int64_t, int64_t>{2'048, 151'936}, {2'048, 262'208}, {5'376, 262'208}}) {
    std::map<int64_t, std::unique_ptr<FusedFixture>> fixtures;
    for (const int64_t mib : {64, 128}) {
      LOGPROBD_ASSIGN_OR_RETURN(fixtures[mib],
                                FusedFixture::Create({.hidden_size = hidden_size,
                                                      .vocab_size = vocab_size,
                                                      .rows_max = kRows,
                                                      .workspace_bytes = mib * kMiB}));
    }
    for (const bool entropy_temperature : {false, true}) {
      const FusedFixture::Ask ask = {.entropy_temperature = entropy_temperature};
      std::map<std::string, Work> works;
      for (const auto& [mib, fixture] : fixtures) {
        works[absl::StrCat(mib)] = [&fixture = fixture, ask](cudaStream_t s) {
          return fixture->Score(kRows, ask, s);
        };
      }
      LOGPROBD_ASSIGN_OR_RETURN(const auto times, watch.Measure(works, flags.common.rounds));
      const double usual = Median(times.at("64").settled);
      const std::string shape = absl::StrCat("H=", hidden_size, ", V=", vocab_size, ", T=", kRows,
                                             entropy_temperature ? ", entropy temperature" : "");
      const std::string note =
          absl::StrCat("launches of ", fixtures[128]->RowsOfLaunch(ask), " instead of ",
                       fixtures[64]->RowsOfLaunch(ask), " rows");
      std::printf("%s: %.3f times as long with 128 MiB; %s\n", shape.c_str(),
                  Median(times.at("128").settled) / usual, note.c_str());
      std::fflush(stdout);
      records.push_back(Record(absl::StrCat("GPU fused, workspace of 128 MiB, ", shape),
                               times.at("128").settled, "workspace of 64 MiB", usual, note));
    }
  }
  return absl::OkStatus();
}

double SettleMilliseconds(const Flags& flags) {
  return flags.settle_milliseconds.value_or(flags.part == "large" ? kSettleMillisecondsOfLarge
                                                                  : kSettleMillisecondsOfOthers);
}

absl::Status Run(const Flags& flags) {
  LOGPROBD_ASSIGN_OR_RETURN(const auto watch, Stopwatch::Create(SettleMilliseconds(flags)));
  std::vector<BenchRecord> records;
  const std::map<std::string, absl::Status (*)(const Flags&, Stopwatch&, std::vector<BenchRecord>&)>
      parts = {{"large", MeasureLarge},         {"small", MeasureSmall},
               {"rows", MeasureRows},           {"extras", MeasureExtras},
               {"workspace", MeasureWorkspace}, {"choices", MeasureChoices}};
  LOGPROBD_RETURN_IF_ERROR(parts.at(flags.part)(flags, *watch, records));
  return WriteRecords(flags.common, GpuMachineName(), records);
}

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  logprobd::testing::Flags flags;
  CLI::App app("Compares the fused kernel with the GEMM and with reading the weight.");
  logprobd::testing::AddBenchFlags(app, flags.common);
  app.add_option(
         "--part", flags.part,
         "Part to measure: large (many rows), small (few rows), rows (any number of rows), extras"
         " (further outputs), workspace (64 and 128 MiB) or choices (every block tile)")
      ->check(CLI::IsMember({"large", "small", "rows", "extras", "workspace", "choices"}))
      ->capture_default_str();
  app.add_option("--settle-ms", flags.settle_milliseconds,
                 "Time of the same work before a settled time, which is measured for half as long,"
                 " and for at least 50 ms. Energy is measured from 1000 on. Default: 1000 for"
                 " large, otherwise 60. The part rows does not settle.")
      ->check(CLI::NonNegativeNumber)
      ->type_name("MS");
  app.add_option("--heads", flags.heads,
                 "Heads of the part large, as hidden size x vocabulary size; default: ten heads")
      ->delimiter(',')
      ->type_name("HxV,...");
  CLI11_PARSE(app, argc, argv);
  return logprobd::testing::ExitCode("gpu_fused_bench", logprobd::testing::Run(flags));
}
