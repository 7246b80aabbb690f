#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/app/heads/head_versions.h"
#include "server/app/heads/plan.h"
#include "server/base/errors.h"
#include "server/batching/version_replicas.h"
#include "tests/support/fake_engine.h"
#include "tests/support/in_memory_head.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {

/// A fake model folder.
struct FakeFolder {
  absl::Status status = absl::OkStatus();  ///< If not OK, opening the folder fails.
  int64_t hidden_size = 4;
  int64_t vocab_size = 1'000;
  Dtype dtype = Dtype::kBf16;
  uint64_t seed = 2;
  bool has_nan = false;
  absl::Status read = absl::OkStatus();  ///< If not OK, reading the second half of its rows fails.
};

/// Tests of a head with FakeEngines and several versions. Version 1 is live; "/m/2" and "/m/3" are
/// valid folders. The logprob of a row shows which version scored it.
class HeadVersionsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 4;
  static constexpr int64_t kVocab = 1'000;
  static constexpr int64_t kWeightBytes = kVocab * kHidden * 2;
  static constexpr int64_t kStagingBytes = 2 * 64 * kHidden * 2;  // staging of one version

  HeadVersionsTest() {
    load_.model.roots = std::make_shared<const AllowedRoots>(*AllowedRoots::Create({"/"}));
    load_.batcher.batch_rows_max = 64;
    load_.batcher.batch_wait_max = absl::ZeroDuration();
    load_.plan = PlanOf(1);
    options_.source = "/m/1";
    options_.load_turn = &load_turn_;
    options_.on_change = [this] { ++num_changes_; };
    folders_["/m/2"] = {.seed = 2};
    folders_["/m/3"] = {.seed = 3};
    parts_.open_model = [this](const std::string& path, const ModelFolderOptions& options) {
      return Open(path, options.weights_version);
    };
    parts_.plan_engine = [this](const HeadInfo& info, const EngineOptions& options) {
      return plan_ ? plan_(-TotalBytes(options.reserved, "host"))
                   : absl::StatusOr<EnginePlan>(PlanOf(info.weights_version));
    };
    parts_.create_engines = [this](const HeadWeights& weights, const EnginePlan&,
                                   const EngineOptions& options) {
      return CreateEngines(weights, options);
    };
    parts_.available_host_bytes = [this] { return available_; };
  }

  /// Shares staging between versions and reserves a spare set in addition to that of version 1.
  void MakeWithSpareStaging() {
    load_.batcher.staging = &staging_;
    FakeEngine engine;
    ASSERT_TRUE(staging_.Reserve(0, engine, kStagingBytes / 2, 2 * 2).ok());
    Make();
  }

  ~HeadVersionsTest() override {
    versions_ = nullptr;
    head_ = nullptr;
  }

  /// Makes the head with the current options and parts.
  void Make() {
    auto weights = MakeWeights({.seed = 1}, 1);
    std::vector<std::unique_ptr<ScoringEngine>> replicas;
    replicas.push_back(MakeEngine(1));
    HeadInfo info = engines_[1]->info();
    info.weight_bytes = kWeightBytes;
    head_ = *InProcessHead::Create(info, std::move(weights), std::move(replicas), load_.batcher,
                                   *head_clock_, metrics_);
    versions_ = std::make_unique<HeadVersions>(*head_, VersionLoader(load_, parts_, metrics_),
                                               options_, metrics_);
  }

  absl::StatusOr<WeightsVersion> Load(const WeightsLoad& load) {
    return versions_->Load(load, progress_);
  }

  /// Scores a request and returns the version of the engine that scored it, which must be the
  /// version that the answer names. Returns 0 if the request is refused.
  uint64_t ScoredBy() {
    ScoreRequest request = RequestOfRows(1);
    const float plain = ExpectedResult(request).logprob.at(0);
    absl::Notification done;
    absl::StatusOr<ScoreResult> result;
    const auto ticket = head_->Submit(std::move(request), [&](absl::StatusOr<ScoreResult> answer) {
      result = std::move(answer);
      done.Notify();
    });
    if (!ticket.ok()) {
      refusal_ = ticket.status();
      return 0;
    }
    done.WaitForNotification();
    if (!result.ok()) {
      refusal_ = result.status();
      return 0;
    }
    const auto version =
        static_cast<uint64_t>(std::lround((result->logprob.at(0) - plain) / kOffsetOfVersion));
    EXPECT_EQ(result->weights_version, version);
    return version;
  }

  /// Expects that version 1 is live, unchanged and the only version.
  void ExpectUnharmed() {
    EXPECT_EQ(ScoredBy(), 1U);
    EXPECT_TRUE(head_->ready());
    EXPECT_EQ(head_->info()->weights_version, 1U);
    const HeadWeightsState state = versions_->List();
    EXPECT_EQ(state.live.version, 1U);
    EXPECT_EQ(state.live.source, "/m/1");
    EXPECT_FALSE(state.staged.has_value());
    EXPECT_FALSE(state.previous.has_value());
    EXPECT_TRUE(versions_->memory().empty());
  }

  /// Returns the sample of logprobd_weights_swaps_total.
  std::string NumSwaps(const std::string& result) const {
    const std::string text = metrics_.Serialize();
    const std::string name =
        absl::StrCat("logprobd_weights_swaps_total{head=\"default\",result=\"", result, "\"} ");
    const size_t begin = text.find(name) + name.size();
    return text.substr(begin, text.find('\n', begin) - begin);
  }

  static EnginePlan PlanOf(uint64_t version) {
    return {Device::kCpu,
            absl::StrCat("fake/", version),
            "a test",
            {},
            {{"host", "weights", kWeightBytes}}};
  }

  const Clock* head_clock_ = &Clock::Steady();
  StagingStore staging_;
  VersionLoader::Options load_;
  VersionLoader::Parts parts_;
  HeadVersions::Options options_;
  LoadTurn load_turn_;
  LoadTicker::Progress progress_;
  std::map<std::string, FakeFolder> folders_;
  /// If set, returns the plan in place of one that fits. The parameter is the number of bytes that
  /// are freed first.
  std::function<absl::StatusOr<EnginePlan>(int64_t freed_bytes)> plan_;
  /// Called with the weights on the loading thread, before engines are made.
  std::function<absl::Status(const HeadWeights&)> on_create_;
  absl::StatusOr<int64_t> available_ = int64_t{1} << 40;
  int64_t staging_bytes_max_ = int64_t{1} << 40;  ///< Limit of the engines that are made next.
  int num_created_ = 0;
  int num_changes_ = 0;
  absl::Status refusal_;  ///< Set by ScoredBy.
  std::map<uint64_t, FakeEngine*> engines_;
  Metrics metrics_{{.heads = {"default"}}};
  std::shared_ptr<InProcessHead> head_;
  std::unique_ptr<HeadVersions> versions_;

 private:
  static constexpr float kOffsetOfVersion = 100;

  std::unique_ptr<FakeEngine> MakeEngine(uint64_t version, Dtype dtype = Dtype::kBf16) {
    auto engine = std::make_unique<FakeEngine>(
        FakeEngine::Options{.dtype = dtype,
                            .weights_version = version,
                            .logprob_offset = kOffsetOfVersion * static_cast<float>(version),
                            .memory = {{"host", "weights", kWeightBytes}},
                            .staging_bytes_max = staging_bytes_max_});
    engines_[version] = engine.get();
    return engine;
  }

  absl::StatusOr<ModelFolderHead> Open(const std::string& path, uint64_t version) const {
    const auto found = folders_.find(path);
    if (found == folders_.end()) {
      return absl::NotFoundError(absl::StrCat(path, ": no such folder"));
    }
    LOGPROBD_RETURN_IF_ERROR(found->second.status);
    ModelFolderHead head;
    head.weights = MakeWeights(found->second, version);
    head.warnings = {"a warning of the folder"};
    return head;
  }

  static std::unique_ptr<HeadWeights> MakeWeights(const FakeFolder& folder, uint64_t version) {
    const auto made = MakeRandomHead({.vocab_size = folder.vocab_size,
                                      .hidden_size = folder.hidden_size,
                                      .dtype = folder.dtype,
                                      .seed = folder.seed});
    HeadInfo info = made->info();
    info.name = "default";
    info.weights_version = version;
    info.weight_bytes = info.vocab_size * info.hidden_size * DtypeBytes(info.dtype);
    std::vector<std::byte> bytes(made->weight(), made->weight() + info.weight_bytes);
    if (folder.has_nan) {
      bytes[0] = bytes[1] = std::byte{0xFF};
    }
    auto weights = std::make_unique<InMemoryHead>(info, std::move(bytes));
    if (!folder.read.ok()) {
      weights->FailReadsFrom(info.vocab_size / 2, folder.read);
    }
    return weights;
  }

  absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> CreateEngines(
      const HeadWeights& weights, const EngineOptions& options) {
    ++num_created_;
    if (on_create_) {
      LOGPROBD_RETURN_IF_ERROR(on_create_(weights));
    }
    if (options.progress) {
      options.progress(weights.info().weight_bytes / 2, weights.info().weight_bytes);
    }
    const int64_t row_bytes = kHidden * DtypeBytes(weights.info().dtype);
    std::vector<std::byte> row(static_cast<size_t>(row_bytes));
    LOGPROBD_RETURN_IF_ERROR(weights.ReadRows(0, 1, row.data(), row_bytes));
    std::vector<std::unique_ptr<ScoringEngine>> engines;
    engines.push_back(MakeEngine(weights.info().weights_version, weights.info().dtype));
    return engines;
  }
};

}  // namespace logprobd::testing
