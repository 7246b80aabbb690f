#include "server/transport/health_service.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "grpc/grpc.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/support/channel_arguments.h"
#include "grpcpp/support/client_callback.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

constexpr char kCheck[] = "/grpc.health.v1.Health/Check";
constexpr char kWatch[] = "/grpc.health.v1.Health/Watch";

std::string RequestOf(const std::string& service) {
  return absl::StrCat("\x0A", std::string(1, static_cast<char>(service.size())), service);
}

/// A call whose client decides when it sends a message and when it ends its half. It always reads,
/// unless `reads` is false: then it does from Read() on.
class TestCall final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  TestCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
           bool reads = true)
      : stub_(channel) {
    stub_.PrepareBidiStreamingCall(&context_, method, grpc::StubOptions(), this);
    AddHold();
    if (reads) Read();
    StartCall();
  }
  ~TestCall() override {
    context_.TryCancel();
    (void)Finish();
  }

  void Read() { StartRead(&incoming_); }
  void Send(const std::string& message) {
    outgoing_ = BufferOf(message);
    StartWrite(&outgoing_);
  }
  void SendLast(const std::string& message) {
    outgoing_ = BufferOf(message);
    StartWriteLast(&outgoing_, grpc::WriteOptions());
  }

  /// Waits for `count` responses and returns the last status.
  int Await(size_t count) {
    const absl::MutexLock lock(&mutex_);
    const auto has_come = [&] { return statuses_.size() >= count || is_done_; };
    mutex_.Await(absl::Condition(&has_come));
    return statuses_.size() == count ? statuses_.back() : -1;
  }

  /// Waits until a message that was sent has left, so that another one may be.
  void AwaitSent() {
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_sent_));
    is_sent_ = false;
  }

  size_t num_responses() {
    const absl::MutexLock lock(&mutex_);
    return statuses_.size();
  }

  /// Waits until the server ends the call and returns its code.
  grpc::StatusCode Finish() {
    if (std::exchange(has_hold_, false)) RemoveHold();
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_done_));
    return status_.error_code();
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    {
      const absl::MutexLock lock(&mutex_);
      const std::string bytes = StringOf(incoming_);
      statuses_.push_back(bytes.size() == 2 && bytes[0] == 8 ? bytes[1] : -1);
    }
    Read();
  }
  void OnWriteDone(bool /*ok*/) override {
    const absl::MutexLock lock(&mutex_);
    is_sent_ = true;
  }
  void OnDone(const grpc::Status& status) override {
    const absl::MutexLock lock(&mutex_);
    status_ = status;
    is_done_ = true;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_;
  grpc::ByteBuffer incoming_;
  bool has_hold_ = true;  // used by the test's thread
  absl::Mutex mutex_;
  std::vector<int> statuses_ ABSL_GUARDED_BY(mutex_);
  bool is_sent_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_done_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

class HealthServiceTest : public ::testing::Test {
 protected:
  explicit HealthServiceTest(HealthService::Options options = {})
      : options_(options), service_(*HealthService::Create(options_, clock_)) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(methods_.get());
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
    channel_ = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    service_->SetServing(true);
  }
  ~HealthServiceTest() override { server_->Shutdown(std::chrono::system_clock::now()); }

  /// Waits until nothing happens before `delay` has passed, and lets it pass.
  void Pass(absl::Duration delay) {
    clock_.WaitForWaiter(clock_.Now() + delay);
    clock_.Advance(delay);
  }

  /// Expects that of calls without a message, one more than may wait, one has less time for it. The
  /// server may begin them in any order.
  void ExpectLessTimeForOneMoreThanMayWait() {
    std::vector<std::unique_ptr<TestCall>> checks;
    for (int i = 0; i <= options_.waiting_calls_max; ++i) {
      checks.push_back(std::make_unique<TestCall>(channel_, kCheck));
    }

    Pass(options_.crowded_message_time_max);
    Pass(options_.message_time_max - options_.crowded_message_time_max);

    for (const auto& check : checks) EXPECT_EQ(check->Finish(), grpc::StatusCode::OK);
  }

  /// Returns a channel that takes 5 bytes of an answer, which has 7, before its call reads.
  std::shared_ptr<grpc::Channel> NewNarrowChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 5);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // would widen it
    return grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
  }

  FakeClock clock_;
  const HealthService::Options options_;
  const std::unique_ptr<HealthService> service_;
  const std::unique_ptr<grpc::CallbackGenericService> methods_ = service_->NewMethods();
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(HealthServiceTest, ChecksKnownServicesAndRefusesOthers) {
  for (const char* const service : {"", "logprobd.v1.Scoring"}) {
    for (const bool serving : {true, false}) {
      service_->SetServing(serving);
      TestCall call(channel_, kCheck);
      call.SendLast(RequestOf(service));
      EXPECT_EQ(call.Await(1), serving ? 1 : 2) << service;
      EXPECT_EQ(call.Finish(), grpc::StatusCode::OK);
    }
  }
  TestCall unknown(channel_, kCheck);
  unknown.SendLast(RequestOf("logprobd.v1.Weights"));
  EXPECT_EQ(unknown.Finish(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(HealthServiceTest, RefusesMessagesThatAreMalformedOrTooLarge) {
  for (const std::string& message : {std::string("\x0A\x05", 2), std::string(100'000, '\0')}) {
    for (const char* const method : {kCheck, kWatch}) {
      TestCall call(channel_, method);
      call.SendLast(message);
      EXPECT_EQ(call.Finish(), grpc::StatusCode::INVALID_ARGUMENT);
    }
  }
}

TEST_F(HealthServiceTest, HasNoOtherMethods) {
  TestCall call(channel_, "/grpc.health.v1.Health/List");
  EXPECT_EQ(call.Finish(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(HealthServiceTest, WatchesSeeEachChangeOnceAndUnknownServicesStayUnknown) {
  TestCall known(channel_, kWatch);
  known.SendLast(RequestOf("logprobd.v1.Scoring"));
  TestCall unknown(channel_, kWatch);
  unknown.SendLast(RequestOf("another"));
  EXPECT_EQ(known.Await(1), 1);
  EXPECT_EQ(unknown.Await(1), 3);

  service_->SetServing(true);  // no change
  service_->SetServing(false);
  EXPECT_EQ(known.Await(2), 2);
  service_->SetServing(true);
  EXPECT_EQ(known.Await(3), 1);
  EXPECT_EQ(unknown.Await(1), 3);
}

// Regression: gRPC collected a message without end before the call began.
TEST_F(HealthServiceTest, AnswersACheckWhoseMessageDoesNotArriveInTime) {
  TestCall call(channel_, kCheck);

  Pass(options_.message_time_max);

  EXPECT_EQ(call.Await(1), 1);
  EXPECT_EQ(call.Finish(), grpc::StatusCode::OK);
}

TEST_F(HealthServiceTest, EndsAWatchWhoseMessageDoesNotArriveInTime) {
  TestCall call(channel_, kWatch);

  Pass(options_.message_time_max);

  EXPECT_EQ(call.Finish(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(HealthServiceTest, CallsThatHaveTheirMessageDoNotCountAsWaiting) {
  for (int i = 0; i <= options_.waiting_calls_max; ++i) {
    TestCall check(channel_, kCheck);
    check.SendLast("");
    EXPECT_EQ(check.Finish(), grpc::StatusCode::OK);
    TestCall unknown(channel_, kCheck);
    unknown.SendLast(RequestOf("another"));
    EXPECT_EQ(unknown.Finish(), grpc::StatusCode::NOT_FOUND);
  }
  std::vector<std::unique_ptr<TestCall>> watches;
  for (int i = 0; i <= options_.waiting_calls_max; ++i) {
    watches.push_back(std::make_unique<TestCall>(channel_, kWatch));
    watches.back()->SendLast("");
    EXPECT_EQ(watches.back()->Await(1), 1);
  }

  TestCall silent(channel_, kCheck);
  Pass(options_.message_time_max);

  EXPECT_EQ(silent.Finish(), grpc::StatusCode::OK);
}

TEST_F(HealthServiceTest, AWatchCountsAsWaitingOnce) {
  for (int i = 0; i < 2; ++i) {
    TestCall watch(channel_, kWatch);
    watch.SendLast("");
    EXPECT_EQ(watch.Await(1), 1);
  }

  ExpectLessTimeForOneMoreThanMayWait();
}

// Otherwise each core could collect a message without end for as long.
TEST_F(HealthServiceTest, ACallWaitsLessForItsMessageWhileManyDo) {
  ExpectLessTimeForOneMoreThanMayWait();
}

// Otherwise gRPC would collect what the client sends after the message, up to its window.
TEST_F(HealthServiceTest, EndsAWatchWhoseClientDoesNotEndItsHalf) {
  TestCall silent(channel_, kWatch);
  silent.Send("");
  Pass(options_.message_time_max);
  EXPECT_EQ(silent.Finish(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(HealthServiceTest, AWatchHasOneMessage) {
  TestCall call(channel_, kWatch);
  call.Send("");
  call.AwaitSent();
  call.SendLast("");

  EXPECT_EQ(call.Finish(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(HealthServiceTest, AWatchGetsNothingBeforeItsMessageHasArrived) {
  TestCall call(channel_, kWatch);
  clock_.WaitForWaiter(clock_.Now() + options_.message_time_max);

  service_->SetServing(false);
  service_->SetServing(true);
  Pass(options_.message_time_max);

  EXPECT_EQ(call.Finish(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(call.num_responses(), 0U);
}

TEST_F(HealthServiceTest, AWatchThatReadsSlowlyGetsTheLastStatusAfterTheOneBeingSent) {
  TestCall call(NewNarrowChannel(), kWatch, /*reads=*/false);
  call.SendLast("");
  clock_.WaitForWaiter(clock_.Now() + options_.watch_time_max);

  service_->SetServing(false);
  service_->SetServing(true);
  service_->SetServing(false);
  call.Read();

  EXPECT_EQ(call.Await(2), 2);
}

TEST_F(HealthServiceTest, AWatchThatIsOverEndsWhenItsResponseHasBeenTaken) {
  TestCall call(NewNarrowChannel(), kWatch, /*reads=*/false);
  call.SendLast("");
  Pass(options_.watch_time_max);
  clock_.WaitForWaiter(clock_.Now() + options_.answer_time_max);

  call.Read();

  EXPECT_EQ(call.Finish(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(call.num_responses(), 1U);
}

// Regression: watches never ended, and with them their connections.
TEST_F(HealthServiceTest, EndsAWatchAfterItsTime) {
  TestCall call(channel_, kWatch);
  call.SendLast("");
  EXPECT_EQ(call.Await(1), 1);

  Pass(options_.watch_time_max);

  EXPECT_EQ(call.Finish(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(HealthServiceTest, CancelsACheckWhoseAnswerIsNotTakenInTime) {
  TestCall call(NewNarrowChannel(), kCheck, /*reads=*/false);
  call.SendLast("");

  Pass(options_.answer_time_max);
  clock_.WaitForWaiter(absl::InfiniteFuture());  // The call has been cancelled.

  call.Read();
  EXPECT_EQ(call.Finish(), grpc::StatusCode::CANCELLED);
}

TEST_F(HealthServiceTest, CancelsAWatchWhoseEndIsNotTakenInTime) {
  TestCall call(NewNarrowChannel(), kWatch, /*reads=*/false);
  call.SendLast("");
  Pass(options_.watch_time_max);

  Pass(options_.answer_time_max);
  clock_.WaitForWaiter(absl::InfiniteFuture());

  call.Read();
  EXPECT_EQ(call.Finish(), grpc::StatusCode::CANCELLED);
}

class HealthServiceOfFewCallsTest : public HealthServiceTest,
                                    public ::testing::WithParamInterface<HealthService::Options> {
 protected:
  HealthServiceOfFewCallsTest() : HealthServiceTest(GetParam()) {}
};

TEST_P(HealthServiceOfFewCallsTest, ANewCallReplacesTheOldestIfThereAreTooMany) {
  std::vector<std::unique_ptr<TestCall>> watches;
  for (int i = 0; i < 3; ++i) {
    watches.push_back(std::make_unique<TestCall>(channel_, kWatch));
    watches.back()->SendLast("");
    EXPECT_EQ(watches.back()->Await(1), 1);
  }

  EXPECT_EQ(watches[0]->Finish(), grpc::StatusCode::CANCELLED);
  service_->SetServing(false);
  EXPECT_EQ(watches[1]->Await(2), 2);
  EXPECT_EQ(watches[2]->Await(2), 2);
}

INSTANTIATE_TEST_SUITE_P(, HealthServiceOfFewCallsTest,
                         ::testing::Values(HealthService::Options{.peer_calls_max = 2},
                                           HealthService::Options{.calls_max = 2}));

TEST_F(HealthServiceTest, CallsThatTheirClientsLeaveAreForgotten) {
  for (int i = 0; i < 3; ++i) {
    TestCall watch(channel_, kWatch);
    watch.SendLast("");
    EXPECT_EQ(watch.Await(1), 1);
  }

  clock_.WaitForWaiter(absl::InfiniteFuture());
}

}  // namespace
}  // namespace logprobd::testing
