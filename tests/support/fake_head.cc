#include "tests/support/fake_head.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace logprobd::testing {

HeadInfo FakeHeadInfo() {
  HeadInfo info;
  info.name = "fake";
  info.model_type = "fake_model";
  info.tensor = "lm_head.weight";
  info.hidden_size = 8;
  info.vocab_size = 100;
  info.vocab_rows = 104;
  info.dtype = Dtype::kBf16;
  info.scale = 0.5F;
  info.softcap = 30.0F;
  info.weight_bytes = 1'664;
  info.weights_version = 3;
  info.engine = "fake/none";
  info.layout = {{0, 0, "gpu1", 0, 100}, {1, 0, "gpu0", 0, 100}};
  info.limits.request_rows_max = 64;
  info.limits.message_bytes_max = 1 << 20;
  info.limits.top_k_max = 16;
  info.limits.candidates_max = 256;
  info.limits.segments_max = 32;
  info.limits.stream_window = 4;
  return info;
}

ScoreResult FakeScores(const ScoreRequest& request) {
  const OutputSet outputs = request.outputs();
  ScoreResult result;
  result.rows = request.rows;
  result.ignored_rows =
      std::count(request.targets.begin(), request.targets.end(), request.ignore_index);
  result.weights_version = 3;
  // Each column has different numbers, so that tests detect exchanged columns.
  ForEachOutputColumn([&](const auto& column) {
    if (column.shape == ColumnShape::kRow && column.IsReturned(outputs)) {
      auto& values = result.*column.values;
      const int first_value = 1'000 * (static_cast<int>(column.wire_field) - 10);
      for (int64_t row = 0; row < request.rows; ++row) {
        values.push_back(static_cast<std::decay_t<decltype(values[0])>>(first_value + row));
      }
    }
  });
  for (size_t row = 0; row < result.logprob.size(); ++row) {
    const int32_t target = request.targets[row];
    result.logprob[row] =
        target == request.ignore_index ? 0.0F : static_cast<float>(-(target + 1)) / 8;
  }
  if (outputs.Has(Output::kArgmax)) {
    result.argmax_id.assign(request.targets.begin(), request.targets.end());
  }
  if (outputs.Has(Output::kGreedy)) {
    result.greedy.assign(result.greedy.size(), 1);
  }
  for (int64_t i = 0; i < request.rows * request.top_k; ++i) {
    result.top_k_ids.push_back(static_cast<int32_t>(i));
    result.top_k_logprobs.push_back(-static_cast<float>(i));
  }
  for (const int32_t id : request.candidate_ids) {
    result.candidate_logprobs.push_back(-static_cast<float>(id) / 4);
  }
  if (request.trace) {
    const auto after = [&](int64_t us) { return request.received + absl::Microseconds(us); };
    result.times = {.submitted = after(1),
                    .first_cut = after(2),
                    .last_cut = after(3),
                    .first_start = after(4),
                    .last_start = after(5),
                    .last_end = after(6),
                    .kernel_seconds = 1.5e-6};
  }
  for (int64_t segment = 0; segment < request.num_segments(); ++segment) {
    result.segment_logprob.push_back(-static_cast<double>(segment));
    result.segment_rows.push_back(static_cast<uint32_t>(segment));
    result.segment_greedy.push_back(1);
  }
  return result;
}

FakeHead::FakeHead(HeadInfo info) : info_(std::make_shared<const HeadInfo>(std::move(info))) {}

FakeHead::~FakeHead() { Release(); }

bool FakeHead::ready() const {
  absl::MutexLock lock(&mutex_);
  return ready_;
}

absl::StatusOr<RequestTicket> FakeHead::Submit(ScoreRequest request, ScoreCallback done) {
  absl::Status answer;
  RequestTicket ticket = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (!refusal_.ok()) {
      return refusal_;
    }
    ticket = ++last_ticket_;
    last_request_ = request;
    if (held_) {
      waiting_.push_back({ticket, std::move(request), std::move(done)});
      return ticket;
    }
    answer = answer_;
  }
  if (answer.ok()) {
    std::move(done)(FakeScores(request));
  } else {
    std::move(done)(std::move(answer));
  }
  return ticket;
}

void FakeHead::Cancel(RequestTicket ticket) {
  std::optional<Waiting> found;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                                 [ticket](const Waiting& w) { return w.ticket == ticket; });
    if (it == waiting_.end()) {
      return;
    }
    found.emplace(std::move(*it));
    waiting_.erase(it);
    ++cancelled_;
  }
  std::move(found->done)(absl::CancelledError("cancelled by the client"));
}

void FakeHead::Verify(const VerifyOptions& options, VerifyCallback done) {
  {
    absl::MutexLock lock(&mutex_);
    last_verify_ = options;
    waiting_verify_ = std::move(done);
    if (holds_verify_) {
      return;
    }
  }
  FinishVerify(absl::OkStatus());
}

void FakeHead::HoldVerify() {
  absl::MutexLock lock(&mutex_);
  holds_verify_ = true;
}

void FakeHead::WaitForVerify() const {
  const auto waits = [this] {
    mutex_.AssertReaderHeld();
    return waiting_verify_.has_value();
  };
  absl::MutexLock lock(&mutex_, absl::Condition(&waits));
}

void FakeHead::FinishVerify(const absl::Status& status) {
  VerifyReport report;
  report.weights_version = info()->weights_version;
  VerifyCallback done;
  {
    absl::MutexLock lock(&mutex_);
    done = *std::exchange(waiting_verify_, std::nullopt);
    report.rows = last_verify_.rows;
  }
  report.passed = true;
  report.logprob_difference_max = 1e-6;
  report.entropy_difference_max = 2e-6;
  report.logprob_tolerance = 1e-4;
  report.entropy_tolerance = 2e-4;
  report.logit_stddev = 3;
  report.seconds = 0.5;
  std::move(done)(status.ok() ? absl::StatusOr<VerifyReport>(report) : status);
}

void FakeHead::SetReady(bool ready) {
  absl::MutexLock lock(&mutex_);
  ready_ = ready;
}

void FakeHead::Hold() {
  absl::MutexLock lock(&mutex_);
  held_ = true;
}

void FakeHead::Release(bool reversed) {
  std::deque<Waiting> waiting;
  {
    absl::MutexLock lock(&mutex_);
    held_ = false;
    waiting.swap(waiting_);
  }
  if (reversed) {
    std::reverse(waiting.begin(), waiting.end());
  }
  for (Waiting& w : waiting) {
    std::move(w.done)(FakeScores(w.request));
  }
}

void FakeHead::RefuseWith(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  refusal_ = std::move(status);
}

void FakeHead::AnswerWith(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  answer_ = std::move(status);
}

void FakeHead::WaitForSubmitted(int64_t count) const {
  absl::MutexLock lock(&mutex_);
  const auto reached = [this, count] {
    mutex_.AssertReaderHeld();
    return static_cast<int64_t>(last_ticket_) >= count;
  };
  mutex_.Await(absl::Condition(&reached));
}

void FakeHead::WaitForCancelled(int64_t count) const {
  absl::MutexLock lock(&mutex_);
  const auto reached = [this, count] {
    mutex_.AssertReaderHeld();
    return cancelled_ >= count;
  };
  mutex_.Await(absl::Condition(&reached));
}

int64_t FakeHead::num_submitted() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(last_ticket_);
}

int64_t FakeHead::num_waiting() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(waiting_.size());
}

ScoreRequest FakeHead::last_request() const {
  absl::MutexLock lock(&mutex_);
  return last_request_;
}

VerifyOptions FakeHead::last_verify() const {
  absl::MutexLock lock(&mutex_);
  return last_verify_;
}

void FakeRegistry::Add(std::shared_ptr<ServedHead> head) {
  absl::MutexLock lock(&mutex_);
  heads_.push_back(std::move(head));
}

absl::StatusOr<std::shared_ptr<ServedHead>> FakeRegistry::Find(absl::string_view name) const {
  absl::MutexLock lock(&mutex_);
  if (heads_.empty()) {
    return absl::UnavailableError("no head is loaded yet");
  }
  if (name.empty()) {
    if (heads_.size() > 1) {
      return absl::InvalidArgumentError("head: empty, must name one of several heads");
    }
    return heads_[0];
  }
  for (const std::shared_ptr<ServedHead>& head : heads_) {
    if (head->info()->name == name) {
      return head;
    }
  }
  return absl::NotFoundError(absl::StrCat("head: \"", name, "\" is not served here"));
}

std::vector<std::shared_ptr<ServedHead>> FakeRegistry::List() const {
  absl::MutexLock lock(&mutex_);
  return heads_;
}

}  // namespace logprobd::testing
