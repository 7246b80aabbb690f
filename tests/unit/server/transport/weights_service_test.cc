#include "server/transport/weights_service.h"

#include <atomic>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "grpc/compression.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "tests/support/fake_weight_store.h"
#include "tests/support/full_stderr.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class WeightsServiceTest : public ::testing::Test {
 protected:
  WeightsServiceTest() { Make(&store_); }

  void Make(WeightStore* store) {
    server_ = nullptr;  // gives up the address
    GrpcServer::Options options = TestServerOptions();
    options.admin = TestAdminAddress();
    options.audit_required = audit_required_;
    server_ = *GrpcServer::Create(options, registry_, metrics_, Clock::Steady(), store);
    admin_ = grpc::CreateChannel(server_->admin_address(), grpc::InsecureChannelCredentials());
    stub_ = v1::Weights::NewStub(admin_);
  }

  /// Loads "/m/2" and reads the stream to its end.
  grpc::Status Load(std::vector<v1::LoadWeightsProgress>* messages = nullptr) {
    v1::LoadWeightsRequest request;
    request.set_path("/m/2");
    return Load(request, messages);
  }

  grpc::Status Load(const v1::LoadWeightsRequest& request,
                    std::vector<v1::LoadWeightsProgress>* messages = nullptr) {
    grpc::ClientContext context;
    const auto reader = stub_->Load(&context, request);
    v1::LoadWeightsProgress message;
    while (reader->Read(&message)) {
      if (messages != nullptr) {
        messages->push_back(message);
      }
    }
    return reader->Finish();
  }

  grpc::Status List(const std::string& head = "") {
    grpc::ClientContext context;
    v1::ListWeightsRequest request;
    request.set_head(head);
    return stub_->List(&context, request, &list_);
  }

  bool audit_required_ = false;
  FakeWeightStore store_;
  FakeRegistry registry_;
  Metrics metrics_{{.heads = {"fake"}}};
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> admin_;
  std::unique_ptr<v1::Weights::Stub> stub_;
  v1::ListWeightsResponse list_;
};

WeightsVersion SomeVersion(uint64_t version) {
  return {version, "abc", absl::StrCat("/m/", version), 1'700'000'000, 8'000, Dtype::kF32};
}

TEST_F(WeightsServiceTest, PassesTheFieldsOfALoadToTheStore) {
  WeightsLoad asked;
  store_.on_load = [&](const WeightsLoad& load, const TellProgress&) {
    asked = load;
    return SomeVersion(2);
  };
  v1::LoadWeightsRequest request;
  request.set_head("policy");
  request.set_path("/m/new model");
  request.set_version(7);
  request.set_sha256("00ff");
  request.set_commit(true);
  request.set_in_place(true);
  request.set_allow_nonfinite(true);

  ASSERT_TRUE(Load(request).ok());

  EXPECT_EQ(asked.head, "policy");
  EXPECT_EQ(asked.path, "/m/new model");
  EXPECT_EQ(asked.version, 7U);
  EXPECT_EQ(asked.sha256, "00ff");
  EXPECT_TRUE(asked.commit);
  EXPECT_TRUE(asked.in_place);
  EXPECT_TRUE(asked.allow_nonfinite);
}

TEST_F(WeightsServiceTest, StreamsProgressAndEndsWithTheVersion) {
  store_.on_load = [&](const WeightsLoad&, const TellProgress& progress) {
    EXPECT_TRUE(progress({"verifying", 10, 8'000}));
    return SomeVersion(2);
  };
  std::vector<v1::LoadWeightsProgress> messages;

  ASSERT_TRUE(Load(&messages).ok());

  ASSERT_EQ(messages.size(), 2U);
  EXPECT_EQ(messages[0].phase(), "verifying");
  EXPECT_EQ(messages[0].bytes_done(), 10U);
  EXPECT_EQ(messages[0].bytes_total(), 8'000U);
  EXPECT_FALSE(messages[0].has_done());
  EXPECT_EQ(messages[1].phase(), "done");
  EXPECT_EQ(messages[1].bytes_done(), 8'000U);
  EXPECT_EQ(messages[1].bytes_total(), 8'000U);
  EXPECT_EQ(messages[1].done().version(), 2U);
  EXPECT_EQ(messages[1].done().sha256(), "abc");
  EXPECT_EQ(messages[1].done().source(), "/m/2");
  EXPECT_EQ(messages[1].done().loaded_unix_seconds(), 1'700'000'000);
  EXPECT_EQ(messages[1].done().weight_bytes(), 8'000U);
  EXPECT_EQ(messages[1].done().dtype(), v1::DTYPE_F32);
}

// Regression: the lines of calls that name no head and no version had head="" and version=0.
TEST_F(WeightsServiceTest, WritesOneAuditLineWithTheFieldsThatAreKnown) {
  store_.state.head = "policy";
  store_.state.live = SomeVersion(3);
  store_.on_load = [](const WeightsLoad&, const TellProgress&) {
    return absl::NotFoundError("/m/new: no such folder");
  };
  v1::LoadWeightsRequest request;
  request.set_path("/m/new");
  v1::WeightsResponse response;
  grpc::ClientContext context;

  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(Load(request).ok());
  EXPECT_TRUE(stub_->Rollback(&context, v1::RollbackWeightsRequest(), &response).ok());
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(log, HasSubstr(" head=policy path=/m/new outcome=NOT_FOUND reason=\"/m/new: no such "
                             "folder\"\n"));
  EXPECT_THAT(log, HasSubstr(" head=policy version=3 sha256=abc outcome=OK\n"));
  EXPECT_EQ(log.find("no such folder"), log.rfind("no such folder")) << log;
}

TEST_F(WeightsServiceTest, TheLineOfAChangeNamesTheVersionThatWasAskedForOrIsLoaded) {
  store_.state.head = "policy";
  store_.on_load = [](const WeightsLoad&, const TellProgress&) { return SomeVersion(2); };
  store_.status = absl::FailedPreconditionError("nothing is staged");
  v1::CommitWeightsRequest commit;
  commit.set_version(5);
  v1::WeightsResponse response;
  grpc::ClientContext context;

  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(Load().ok());
  EXPECT_FALSE(stub_->Commit(&context, commit, &response).ok());
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(log, HasSubstr(" head=policy version=2 path=/m/2 sha256=abc outcome=OK\n"));
  EXPECT_THAT(log, HasSubstr(" head=policy version=5 outcome=FAILED_PRECONDITION "));
}

/// Returns the number of audit lines in `log`, each of which must have `method` and `outcome`.
int CountAuditLines(const std::string& log, const std::string& method, const std::string& outcome) {
  int count = 0;
  for (const absl::string_view line : absl::StrSplit(log, '\n', absl::SkipEmpty())) {
    if (!absl::StrContains(line, " audit method=")) continue;  // not those of connections
    ++count;
    EXPECT_THAT(std::string(line), HasSubstr(absl::StrCat(" audit method=", method, " ")));
    EXPECT_THAT(std::string(line), HasSubstr(absl::StrCat(" outcome=", outcome)));
  }
  return count;
}

constexpr const char* kChanges[] = {"Load", "Push", "Commit", "Rollback", "Discard"};

// Regression: calls that were refused before they reached the store had no line.
TEST_F(WeightsServiceTest, EachCallThatAsksForAChangeHasOneLineHoweverItEnds) {
  store_.on_load = [](const WeightsLoad&, const TellProgress&) { return SomeVersion(2); };
  store_.on_push = [](const WeightsPush&, const NextPushedRows&, const TellProgress&) {
    return absl::AbortedError("busy");
  };
  store_.status = absl::FailedPreconditionError("nothing is staged");
  v1::PushWeightsRequest no_dtype;
  no_dtype.mutable_header()->set_version(7);
  v1::LoadWeightsRequest bad_path;
  bad_path.set_path("/m/a\nb");
  const std::string too_large(70'000, '\0');
  struct Case {
    std::string what;
    std::vector<const char*> methods;
    std::string message;
  };
  const Case cases[] = {{"malformed", {std::begin(kChanges), std::end(kChanges)}, "\xFF\xFF\xFF"},
                        {"too large", {std::begin(kChanges), std::end(kChanges)}, too_large},
                        {"empty", {std::begin(kChanges), std::end(kChanges)}, ""},
                        {"a bad path", {"Load"}, bad_path.SerializeAsString()},
                        {"no dtype", {"Push"}, no_dtype.SerializeAsString()}};

  for (const Case& each : cases) {
    for (const char* method : each.methods) {
      grpc::ClientContext context;
      grpc::ByteBuffer answer;
      ::testing::internal::CaptureStderr();
      const grpc::Status status = CallRaw(admin_, absl::StrCat("/logprobd.v1.Weights/", method),
                                          BufferOf(each.message), answer, context);
      const std::string log = ::testing::internal::GetCapturedStderr();

      const std::string code = absl::StatusCodeToString(
          static_cast<absl::StatusCode>(static_cast<int>(status.error_code())));
      EXPECT_FALSE(status.ok());
      EXPECT_EQ(CountAuditLines(log, method, code), 1) << each.what << "\n" << log;
    }
  }
}

TEST_F(WeightsServiceTest, ACallWithoutAMessageHasALine) {
  for (const char* method : kChanges) {
    ::testing::internal::CaptureStderr();
    const grpc::Status status =
        CallWithoutMessage(admin_, absl::StrCat("/logprobd.v1.Weights/", method));
    const std::string log = ::testing::internal::GetCapturedStderr();

    EXPECT_FALSE(status.ok());
    EXPECT_EQ(CountAuditLines(log, method, "INVALID_ARGUMENT"), 1) << log;
  }
}

TEST_F(WeightsServiceTest, AMessageThatGrpcRefusesChangesNothing) {
  store_.on_load = [this](const WeightsLoad&, const TellProgress&) {
    store_.calls.emplace_back("load");
    return SomeVersion(2);
  };
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  v1::CommitWeightsRequest compressed;
  compressed.set_head(std::string(1'000, 'a'));  // gRPC compresses what becomes smaller
  v1::LoadWeightsRequest too_large;
  too_large.set_path(std::string(2 << 20, 'a'));  // TestServerOptions allow 1 MiB
  v1::WeightsResponse response;

  const grpc::Status commit = stub_->Commit(&context, compressed, &response);
  const grpc::Status load = Load(too_large);

  EXPECT_EQ(commit.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(load.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(store_.calls.empty());
}

TEST_F(WeightsServiceTest, ChangesNothingWhoseAuditLineCannotBeWrittenIfThatIsRequired) {
  store_.on_load = [this](const WeightsLoad&, const TellProgress&) {
    store_.calls.emplace_back("load");
    return SomeVersion(2);
  };
  v1::WeightsResponse response;
  for (const bool is_required : {true, false}) {
    audit_required_ = is_required;
    Make(&store_);
    store_.calls.clear();
    const int64_t lost = LostLogLines(LogKind::kAudit);
    grpc::Status status[3];
    {
      const FullStderr full;
      grpc::ClientContext commit;
      grpc::ClientContext rollback;
      status[0] = Load();
      status[1] = stub_->Commit(&commit, {}, &response);
      status[2] = stub_->Rollback(&rollback, {}, &response);
    }

    for (const grpc::Status& each : status) {
      EXPECT_EQ(each.error_code(),
                is_required ? grpc::StatusCode::UNAVAILABLE : grpc::StatusCode::OK);
      if (is_required) {
        EXPECT_THAT(each.error_message(), HasSubstr("nothing was changed (--audit-required)"));
      }
    }
    EXPECT_EQ(store_.calls.size(), is_required ? 0U : 3U);
    EXPECT_GE(LostLogLines(LogKind::kAudit) - lost, is_required ? 6 : 3);
  }
}

TEST_F(WeightsServiceTest, WritesALineBeforeAndAfterAChangeIfLinesAreRequired) {
  audit_required_ = true;
  Make(&store_);
  store_.state.head = "policy";
  store_.state.live = SomeVersion(3);
  v1::WeightsResponse response;
  grpc::ClientContext context;

  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(stub_->Rollback(&context, {}, &response).ok());
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(log, ContainsRegex(" audit method=Rollback .* head=policy outcome=ASKED\n"
                                 ".* head=policy version=3 sha256=abc outcome=OK\n"));
}

TEST_F(WeightsServiceTest, BoundsWhatALineQuotes) {
  v1::PushWeightsRequest push;
  push.mutable_header()->set_head(std::string(60'000, '\x01'));
  push.mutable_header()->set_sha256(std::string(4'000, 'a'));
  grpc::ClientContext context;
  v1::PushWeightsResponse response;
  ::testing::internal::CaptureStderr();
  const auto writer = stub_->Push(&context, &response);
  writer->Write(push);
  writer->WritesDone();
  EXPECT_FALSE(writer->Finish().ok());
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(log, HasSubstr("...(60000 bytes)"));
  EXPECT_THAT(log, HasSubstr(" outcome=INVALID_ARGUMENT"));
  EXPECT_LE(log.size(), kLogLineBytesMax);
}

// Regression: a phase that ended before the message of the previous phase was written was not
// reported.
TEST_F(WeightsServiceTest, ReportsEveryPhaseHoweverShort) {
  store_.on_load = [&](const WeightsLoad&, const TellProgress& progress) {
    for (const char* phase : {"checking", "verifying", "loading", "committing"}) {
      for (int i = 0; i < 1'000; ++i) {
        EXPECT_TRUE(progress({phase, i, 1'000}));
      }
    }
    return SomeVersion(2);
  };
  std::vector<v1::LoadWeightsProgress> messages;

  ASSERT_TRUE(Load(&messages).ok());

  std::vector<std::string> phases;
  for (const v1::LoadWeightsProgress& message : messages) {
    if (phases.empty() || phases.back() != message.phase()) {
      phases.push_back(message.phase());
    }
  }
  EXPECT_THAT(phases, ElementsAre("checking", "verifying", "loading", "committing", "done"));
}

TEST_F(WeightsServiceTest, AClientThatDoesNotReadDelaysNothing) {
  absl::Notification loaded;
  store_.on_load = [&](const WeightsLoad&, const TellProgress& progress) {
    for (int i = 0; i < 100'000; ++i) {
      EXPECT_TRUE(progress({"loading", i, 100'000}));
    }
    loaded.Notify();
    return SomeVersion(2);
  };
  grpc::ClientContext context;
  v1::LoadWeightsRequest request;
  request.set_path("/m/2");
  const auto reader = stub_->Load(&context, request);

  loaded.WaitForNotification();

  v1::LoadWeightsProgress message;
  while (reader->Read(&message)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(message.done().version(), 2U);
}

TEST_F(WeightsServiceTest, ACancelledCallCancelsItsLoad) {
  absl::Notification begun;
  absl::Notification ended;
  store_.on_load = [&](const WeightsLoad&, const TellProgress& progress) {
    begun.Notify();
    while (progress({"loading", 1, 2})) {
    }
    ended.Notify();
    return absl::CancelledError("the load was cancelled");
  };
  grpc::ClientContext context;
  v1::LoadWeightsRequest request;
  request.set_path("/m/2");
  const auto reader = stub_->Load(&context, request);
  begun.WaitForNotification();

  context.TryCancel();

  ended.WaitForNotification();
  v1::LoadWeightsProgress message;
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(WeightsServiceTest, ReportsTheWholeReasonOfAFailure) {
  store_.on_load = [&](const WeightsLoad&, const TellProgress& progress) {
    progress({"verifying", 1, 2});
    return absl::DataLossError("/m/2/model.safetensors: the sha256 is another");
  };

  const grpc::Status status = Load();

  EXPECT_EQ(status.error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(status.error_message(), "/m/2/model.safetensors: the sha256 is another");
}

TEST_F(WeightsServiceTest, RefusesInvalidRequests) {
  store_.on_load = [](const WeightsLoad&, const TellProgress&) {
    ADD_FAILURE() << "the request must not reach the store";
    return SomeVersion(2);
  };
  for (const std::string& path : {std::string(), std::string(4'096, 'a'), std::string("/m/a\nb"),
                                  std::string("/m/\x1b[2J")}) {
    v1::LoadWeightsRequest request;
    request.set_path(path);
    const grpc::Status status = Load(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("path: "));
  }
  for (const char* method : {"Commit", "Rollback", "Discard", "List"}) {
    grpc::ClientContext context;
    grpc::ByteBuffer answer;
    const grpc::Status status = CallRaw(admin_, absl::StrCat("/logprobd.v1.Weights/", method),
                                        BufferOf("\xFF\xFF\xFF"), answer, context);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
  }
  EXPECT_TRUE(store_.calls.empty());
}

TEST_F(WeightsServiceTest, TakesAPathOfUpTo4095Bytes) {
  std::string loaded;
  store_.on_load = [&](const WeightsLoad& load, const TellProgress&) {
    loaded = load.path;
    return SomeVersion(2);
  };
  v1::LoadWeightsRequest request;
  for (const size_t bytes : {size_t{1}, size_t{4'095}}) {
    request.set_path(std::string(bytes, 'a'));
    EXPECT_TRUE(Load(request).ok());
    EXPECT_EQ(loaded.size(), bytes);
  }
  request.set_path(std::string(4'096, 'a'));
  EXPECT_EQ(Load(request).error_message(), "path: 4096 bytes, must be in [1, 4095]");
}

TEST_F(WeightsServiceTest, ChangesVersionsAndReturnsTheStateOfTheHead) {
  store_.state = {"policy", SomeVersion(3), SomeVersion(4), SomeVersion(2)};
  store_.state.pushed = PushedVersion{.version = 6, .rows = 2, .vocab_rows = 9};
  v1::WeightsResponse response;
  {
    grpc::ClientContext context;
    v1::CommitWeightsRequest request;
    request.set_head("policy");
    request.set_version(3);
    ASSERT_TRUE(stub_->Commit(&context, request, &response).ok());
  }
  {
    grpc::ClientContext context;
    v1::RollbackWeightsRequest request;
    request.set_head("policy");
    ASSERT_TRUE(stub_->Rollback(&context, request, &response).ok());
  }
  {
    grpc::ClientContext context;
    v1::DiscardWeightsRequest request;
    request.set_staged(true);
    request.set_previous(true);
    ASSERT_TRUE(stub_->Discard(&context, request, &response).ok());
  }

  EXPECT_THAT(store_.calls,
              ElementsAre("commit policy 3", "rollback policy", "discard  staged previous"));
  EXPECT_EQ(response.head().head(), "policy");
  EXPECT_EQ(response.head().live().version(), 3U);
  EXPECT_EQ(response.head().staged().version(), 4U);
  EXPECT_EQ(response.head().previous().source(), "/m/2");
  EXPECT_EQ(response.head().pushed().version(), 6U);
  EXPECT_EQ(response.head().pushed().rows(), 2U);
  EXPECT_EQ(response.head().pushed().vocab_rows(), 9U);
}

TEST_F(WeightsServiceTest, ListsHeadsWithoutAbsentVersions) {
  store_.state = {"policy", WeightsVersion(), std::nullopt, std::nullopt};
  store_.state.highest_version = 9;

  ASSERT_TRUE(List("value").ok());

  ASSERT_EQ(list_.heads_size(), 2);
  EXPECT_EQ(list_.heads(0).head(), "value");
  EXPECT_EQ(list_.heads(1).head(), "policy");
  EXPECT_FALSE(list_.heads(1).has_live());
  EXPECT_FALSE(list_.heads(1).has_staged());
  EXPECT_FALSE(list_.heads(1).has_previous());
  EXPECT_FALSE(list_.heads(1).has_pushed());
  EXPECT_EQ(list_.heads(1).highest_version(), 9U);
}

TEST_F(WeightsServiceTest, PassesOnTheErrorsOfTheStore) {
  store_.status = absl::FailedPreconditionError("no version is staged");
  grpc::ClientContext context;
  v1::WeightsResponse response;

  const grpc::Status status = stub_->Commit(&context, {}, &response);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(), "no version is staged");
  EXPECT_EQ(List().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(WeightsServiceTest, IsNotServedOnTheDataListener) {
  const auto stub = v1::Weights::NewStub(grpc::CreateChannel(
      absl::StrCat("127.0.0.1:", server_->port()), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::ListWeightsResponse response;

  EXPECT_EQ(stub->List(&context, {}, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(WeightsServiceTest, IsNotServedWithoutAStore) {
  Make(nullptr);

  EXPECT_EQ(List().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(WeightsServiceTest, RunsABoundedNumberOfCallsAtOnce) {
  std::atomic<int> num_running = 0;
  absl::Notification go_on;
  store_.on_load = [&](const WeightsLoad&, const TellProgress&) {
    ++num_running;
    go_on.WaitForNotification();
    return SomeVersion(2);
  };
  std::vector<std::thread> clients;
  for (int i = 0; i < WeightsService::kCallsMax; ++i) {
    clients.emplace_back([&] { EXPECT_TRUE(Load().ok()); });
  }
  while (num_running < WeightsService::kCallsMax) {
    std::this_thread::yield();
  }

  const grpc::Status refused = List();
  ::testing::internal::CaptureStderr();
  const grpc::Status load = Load();
  grpc::ClientContext context;
  v1::WeightsResponse response;
  const grpc::Status rollback = stub_->Rollback(&context, {}, &response);
  const std::string log = ::testing::internal::GetCapturedStderr();

  for (const grpc::Status& each : {refused, load, rollback}) {
    EXPECT_EQ(each.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(each.error_message(), HasSubstr("32 calls of the Weights service are running"));
  }
  for (const char* method : {"Load", "Rollback"}) {
    EXPECT_THAT(log, ContainsRegex(
                         absl::StrCat(" audit method=", method, " .* outcome=RESOURCE_EXHAUSTED")));
  }
  go_on.Notify();
  for (std::thread& client : clients) {
    client.join();
  }
}

/// A push that sends its header and then nothing, on a connection of its own: a connection has a
/// limit of calls too.
struct OpenPush {
  explicit OpenPush(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub = v1::Weights::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    writer = stub->Push(&context, &response);
    v1::PushWeightsRequest header;
    header.mutable_header()->set_version(7);
    header.mutable_header()->set_dtype(v1::DTYPE_F16);
    writer->Write(header);
  }

  grpc::Status End() {
    writer->WritesDone();
    return writer->Finish();
  }

  grpc::ClientContext context;
  v1::PushWeightsResponse response;
  std::unique_ptr<v1::Weights::Stub> stub;
  std::unique_ptr<grpc::ClientWriter<v1::PushWeightsRequest>> writer;
};

// Regression: pushes and all other calls had one limit, so that open pushes kept out a rollback.
TEST_F(WeightsServiceTest, OpenPushesAreBoundedAndKeepOutNoOtherCall) {
  std::atomic<int> num_running = 0;
  store_.on_push = [&](const WeightsPush&, const NextPushedRows& next,
                       const TellProgress&) -> absl::StatusOr<PushedWeightsResult> {
    ++num_running;
    const absl::Status end = next().status();
    --num_running;
    LOGPROBD_RETURN_IF_ERROR(end);
    return PushedWeightsResult();
  };
  const auto await_running = [&](int count) {
    while (num_running != count) {
      std::this_thread::yield();
    }
  };
  std::vector<std::unique_ptr<OpenPush>> pushes;
  for (int i = 0; i < WeightsService::kPushesMax; ++i) {
    pushes.push_back(std::make_unique<OpenPush>(server_->admin_address()));
  }
  await_running(WeightsService::kPushesMax);

  ::testing::internal::CaptureStderr();
  OpenPush refused(server_->admin_address());

  const grpc::Status status = refused.End();
  EXPECT_EQ(CountAuditLines(::testing::internal::GetCapturedStderr(), "Push", "RESOURCE_EXHAUSTED"),
            1);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("256 pushes"));
  EXPECT_EQ(refused.context.GetServerTrailingMetadata().count("grpc-retry-pushback-ms"), 1U);
  EXPECT_TRUE(List().ok());
  grpc::ClientContext context;
  v1::WeightsResponse response;
  EXPECT_TRUE(stub_->Rollback(&context, {}, &response).ok());
  EXPECT_TRUE(pushes.back()->End().ok());
  pushes.pop_back();
  while (true) {  // the ended push gives up its place after its answer
    OpenPush next(server_->admin_address());
    if (next.End().ok()) {
      break;
    }
  }
  for (const auto& push : pushes) {
    EXPECT_TRUE(push->End().ok());
  }
}

TEST_F(WeightsServiceTest, FinishesRunningCallsAtShutdownAndRefusesNewOnes) {
  absl::Notification begun;
  absl::Notification go_on;
  store_.on_load = [&](const WeightsLoad&, const TellProgress&) {
    begun.Notify();
    go_on.WaitForNotification();
    return SomeVersion(2);
  };
  grpc::Status loaded;
  std::thread client([&] { loaded = Load(); });
  begun.WaitForNotification();
  std::thread shutdown([&] { server_->Shutdown(absl::Hours(1)); });

  grpc::Status refused;
  while (refused.ok()) {
    refused = List();
  }

  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.error_message(), "the server is shutting down");
  go_on.Notify();
  shutdown.join();
  client.join();
  EXPECT_TRUE(loaded.ok()) << loaded.error_message();
}

TEST_F(WeightsServiceTest, CancelsALoadThatOutlivesTheGrace) {
  absl::Notification begun;
  bool is_given_up = false;
  store_.on_load = [&](const WeightsLoad&, const TellProgress& progress) {
    begun.Notify();
    while (progress({"loading", 1, 2})) {
    }
    is_given_up = true;
    return absl::CancelledError("the load was cancelled");
  };
  grpc::Status loaded;
  std::thread client([&] { loaded = Load(); });
  begun.WaitForNotification();

  server_ = nullptr;

  EXPECT_TRUE(is_given_up);
  client.join();
  EXPECT_FALSE(loaded.ok());
}

// Otherwise a push would go on in a store that is gone.
TEST_F(WeightsServiceTest, TheServerEndsAfterThePushesThatStillRun) {
  absl::Notification begun;
  absl::Notification has_ended;
  store_.on_push = [&](const WeightsPush&, const NextPushedRows&,
                       const TellProgress& progress) -> absl::StatusOr<PushedWeightsResult> {
    begun.Notify();
    while (progress({})) {
    }
    EXPECT_FALSE(has_ended.WaitForNotificationWithTimeout(absl::Milliseconds(100)));
    return absl::CancelledError("the push was cancelled");
  };
  OpenPush push(server_->admin_address());
  begun.WaitForNotification();

  server_ = nullptr;

  has_ended.Notify();
  EXPECT_FALSE(push.End().ok());
}

}  // namespace
}  // namespace logprobd::testing
