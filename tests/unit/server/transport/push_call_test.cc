#include "server/transport/push_call.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "logprobd/v1/weights.grpc.pb.h"
#include "tests/support/control_client.h"
#include "tests/support/fake_client_memory.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_weight_store.h"
#include "tests/support/temp_folder.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Size of the fake GPU's allocations: 9 rows of 2 MiB.
constexpr int64_t kDeviceRowBytes = int64_t{2} << 20;
constexpr int64_t kDeviceRows = 9;

/// Rows as the store received them.
struct Received {
  int64_t row_begin = 0;
  int64_t num_rows = 0;
  bool is_bias = false;
  std::string bytes;
};

class PushCallTest : public ::testing::Test {
 protected:
  PushCallTest() {
    store_.on_push = [this](const WeightsPush& push, const NextPushedRows& next,
                            const TellProgress&) { return Receive(push, next); };
    Make(Clock::Steady());
  }

  void Make(const Clock& clock) {
    server_ = nullptr;
    GrpcServer::Options options = TestServerOptions();
    options.admin = TestAdminAddress();
    options.unix_socket = folder_.path("socket");
    options.message_bytes_max = int64_t{16} << 20;
    options.receive_bytes_max = int64_t{64} << 20;
    options.devices = &devices_;
    server_ = *GrpcServer::Create(options, registry_, metrics_, clock, &store_);
    stub_ = v1::Weights::NewStub(
        grpc::CreateChannel(server_->admin_address(), grpc::InsecureChannelCredentials()));
  }

  absl::StatusOr<PushedWeightsResult> Receive(const WeightsPush& push, const NextPushedRows& next) {
    push_ = push;
    if (!begun_.HasBeenNotified()) {
      begun_.Notify();
    }
    while (true) {
      absl::StatusOr<std::optional<PushedRows>> rows = next();
      if (!rows.ok()) {
        return rows.status();
      }
      if (!rows->has_value()) {
        return result_;
      }
      Received& received = received_.emplace_back(
          Received{(*rows)->row_begin, (*rows)->num_rows, (*rows)->is_bias, ""});
      for (const absl::Span<const std::byte> piece : (*rows)->pieces) {
        received.bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      }
    }
  }

  static v1::PushWeightsRequest Header() {
    v1::PushWeightsRequest message;
    message.mutable_header()->set_version(7);
    message.mutable_header()->set_dtype(v1::DTYPE_F16);
    return message;
  }

  static v1::PushWeightsRequest Rows(uint64_t row_begin, uint64_t rows, const std::string& data) {
    v1::PushWeightsRequest message;
    message.mutable_rows()->set_row_begin(row_begin);
    message.mutable_rows()->set_rows(rows);
    message.mutable_rows()->set_data(data);
    return message;
  }

  /// Sends the messages and returns the status of the call.
  grpc::Status Push(const std::vector<v1::PushWeightsRequest>& messages) {
    grpc::ClientContext context;
    const auto writer = stub_->Push(&context, &response_);
    for (const v1::PushWeightsRequest& message : messages) {
      if (!writer->Write(message)) {
        break;  // the server has ended the call
      }
    }
    writer->WritesDone();
    return writer->Finish();
  }

  const TempFolder folder_;
  FakeWeightStore store_;
  FakeRegistry registry_;
  Metrics metrics_{{.heads = {"fake"}}};
  FakeDeviceMemory devices_{kDeviceRows * kDeviceRowBytes};
  absl::Notification begun_;  // the store has the header
  WeightsPush push_;
  std::vector<Received> received_;
  PushedWeightsResult result_;
  v1::PushWeightsResponse response_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<v1::Weights::Stub> stub_;
};

TEST_F(PushCallTest, PassesTheHeaderAndTheRowsToTheStoreAndAnswersItsResult) {
  result_ = {.pushed = {.version = 7, .rows = 3, .vocab_rows = 9},
             .staged = WeightsVersion{7, "abc", "pushed", 1, 18}};
  v1::PushWeightsRequest header = Header();
  header.mutable_header()->set_head("policy");
  header.mutable_header()->set_vocab_rows(9);
  header.mutable_header()->set_sha256("00ff");
  header.mutable_header()->set_allow_nonfinite(true);
  v1::PushWeightsRequest bias = Rows(4, 1, "c");
  bias.mutable_rows()->set_is_bias(true);

  ASSERT_TRUE(Push({header, Rows(5, 2, "ab"), bias}).ok());

  EXPECT_EQ(push_.head, "policy");
  EXPECT_EQ(push_.version, 7U);
  EXPECT_EQ(push_.dtype, Dtype::kF16);
  EXPECT_EQ(push_.vocab_rows, 9);
  EXPECT_EQ(push_.sha256, "00ff");
  EXPECT_TRUE(push_.allow_nonfinite);
  ASSERT_EQ(received_.size(), 2U);
  EXPECT_EQ(received_[0].row_begin, 5);
  EXPECT_EQ(received_[0].num_rows, 2);
  EXPECT_EQ(received_[0].bytes, "ab");
  EXPECT_FALSE(received_[0].is_bias);
  EXPECT_TRUE(received_[1].is_bias);
  EXPECT_EQ(response_.pushed().rows(), 3U);
  EXPECT_EQ(response_.pushed().vocab_rows(), 9U);
  EXPECT_EQ(response_.staged().sha256(), "abc");
}

TEST_F(PushCallTest, AnswersWithoutAStagedVersionUntilAllRowsHaveArrived) {
  result_ = {.pushed = {.version = 7, .rows = 1, .vocab_rows = 9}, .staged = std::nullopt};

  ASSERT_TRUE(Push({Header(), Rows(5, 1, "ab")}).ok());

  EXPECT_EQ(response_.pushed().version(), 7U);
  EXPECT_FALSE(response_.has_staged());
}

TEST_F(PushCallTest, TheAuditLineNamesTheVersionThatWasStaged) {
  result_ = {.pushed = {.version = 7}, .staged = WeightsVersion{7, "abc", "pushed", 1, 18}};
  v1::PushWeightsRequest header = Header();
  header.mutable_header()->set_head("policy");
  ::testing::internal::CaptureStderr();

  ASSERT_TRUE(Push({header}).ok());
  result_.staged = std::nullopt;
  header.mutable_header()->set_sha256("00ff");
  ASSERT_TRUE(Push({header}).ok());
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(log, HasSubstr(" head=policy version=7 sha256=abc outcome=OK\n"));
  EXPECT_THAT(log, HasSubstr(" head=policy version=7 sha256=00ff outcome=OK\n"));
}

TEST_F(PushCallTest, ChecksTheHeaderOnBothSidesOfItsLimits) {
  const auto error_with = [this](const std::function<void(v1::PushHeader&)>& change) {
    v1::PushWeightsRequest header = Header();
    change(*header.mutable_header());
    return Push({header}).error_message();
  };

  EXPECT_EQ(Push({Rows(0, 1, "a")}).error_message(), "header: missing, must be the first message");
  EXPECT_EQ(error_with([](auto& header) { header.set_dtype(v1::DTYPE_UNSPECIFIED); }),
            "dtype: 0, must be DTYPE_BF16, DTYPE_F16 or DTYPE_F32");
  EXPECT_EQ(error_with([](auto& header) { header.set_dtype(static_cast<v1::Dtype>(4)); }),
            "dtype: 4, must be DTYPE_BF16, DTYPE_F16 or DTYPE_F32");
  EXPECT_EQ(error_with([](auto& header) { header.set_vocab_rows(uint64_t{1} << 32); }),
            "vocab_rows: 4294967296, must be less than 2^32");
  EXPECT_FALSE(begun_.HasBeenNotified());
  EXPECT_EQ(error_with([](auto& header) {
              header.set_dtype(v1::DTYPE_F32);
              header.set_vocab_rows((uint64_t{1} << 32) - 1);
            }),
            "");
  EXPECT_EQ(push_.vocab_rows, 4'294'967'295);
}

TEST_F(PushCallTest, ChecksRowsOnBothSidesOfTheirLimits) {
  constexpr uint64_t kMost = 4'294'967'295;
  EXPECT_TRUE(Push({Header(), Rows(kMost, kMost, "a")}).ok());
  ASSERT_EQ(received_.size(), 1U);
  EXPECT_EQ(received_[0].row_begin, static_cast<int64_t>(kMost));
  EXPECT_EQ(received_[0].num_rows, static_cast<int64_t>(kMost));

  for (const auto& [begin, rows] :
       std::vector<std::pair<uint64_t, uint64_t>>{{kMost + 1, 1}, {0, kMost + 1}, {0, 0}}) {
    EXPECT_EQ(Push({Header(), Rows(begin, rows, "a")}).error_message(),
              absl::StrCat("rows: ", rows, " from row ", begin,
                           ", must be at least 1 and less than 2^32"));
  }
  EXPECT_EQ(Push({Header(), Header()}).error_message(),
            "rows: missing, must be in every message but the first");
  v1::PushWeightsRequest two = Rows(0, 1, "a");
  two.mutable_rows()->mutable_shared_memory();
  EXPECT_EQ(Push({Header(), two}).error_message(),
            "rows: 2 of data, shared_memory and cuda_ipc are set, must be exactly one");
  EXPECT_EQ(Push({Header(), Rows(0, 1, "")}).error_message(),
            "rows: 0 of data, shared_memory and cuda_ipc are set, must be exactly one");
}

TEST_F(PushCallTest, TakesMessagesUpToTheirLimits) {
  // The tags and the lengths of the header, of its head and of its other fields take the rest.
  const auto header_of = [](size_t bytes) {
    v1::PushWeightsRequest message = Header();
    message.mutable_header()->set_head(std::string(bytes - message.ByteSizeLong() - 6, 'x'));
    EXPECT_EQ(message.ByteSizeLong(), bytes);
    return message;
  };
  const auto rows_of = [](size_t bytes) {
    v1::PushWeightsRequest message = Rows(0, 1, "");
    message = Rows(0, 1, std::string(bytes - message.ByteSizeLong() - 8, 'x'));
    EXPECT_EQ(message.ByteSizeLong(), bytes);
    return message;
  };
  const size_t rows_bytes_max =
      static_cast<size_t>(PushCall::kDataBytesMax) + kSmallMessageBytesMax;

  EXPECT_EQ(Push({header_of(kSmallMessageBytesMax), rows_of(rows_bytes_max)}).error_message(), "");
  EXPECT_EQ(Push({header_of(kSmallMessageBytesMax + 1)}).error_message(),
            "a message of 65537 bytes, must be at most 65536");
  EXPECT_EQ(Push({Header(), rows_of(rows_bytes_max + 1)}).error_message(),
            absl::StrCat("a message of ", rows_bytes_max + 1, " bytes, must be at most ",
                         rows_bytes_max));
}

TEST_F(PushCallTest, WithoutAUnixSocketRowsMustBeInTheMessages) {
  server_ = nullptr;
  GrpcServer::Options options = TestServerOptions();
  options.admin = TestAdminAddress();
  server_ = *GrpcServer::Create(options, registry_, metrics_, Clock::Steady(), &store_);
  stub_ = v1::Weights::NewStub(
      grpc::CreateChannel(server_->admin_address(), grpc::InsecureChannelCredentials()));
  v1::PushWeightsRequest shared = Rows(1, 1, "");
  shared.mutable_rows()->mutable_shared_memory()->set_bytes(1);
  v1::PushWeightsRequest gpu = Rows(1, 1, "");
  gpu.mutable_rows()->mutable_cuda_ipc()->set_bytes(1);

  for (const auto& [message, field] :
       {std::pair{shared, "shared_memory"}, std::pair{gpu, "cuda_ipc"}}) {
    const grpc::Status status = Push({Header(), message});
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(),
                StartsWith(absl::StrCat(field, ": this server has no Unix socket")));
  }
}

TEST_F(PushCallTest, AnswersTheErrorOfTheStoreWhileTheClientStillSends) {
  store_.on_push = [](const WeightsPush&, const NextPushedRows&, const TellProgress&) {
    return absl::AbortedError("rows of version 6 are being received");
  };
  const std::vector<v1::PushWeightsRequest> rows(50, Rows(0, 1, std::string(1 << 20, 'x')));
  std::vector<v1::PushWeightsRequest> messages = {Header()};
  messages.insert(messages.end(), rows.begin(), rows.end());

  const grpc::Status status = Push(messages);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(status.error_message(), "rows of version 6 are being received");
}

TEST_F(PushCallTest, ReadsRowsInSharedMemory) {
  ControlClient control(server_->unix_socket_path() + SameHostAccess::kControlSuffix);
  control.Hello();
  MappedRegion region(control.CreateRegion(4'096));
  region.bytes()[64] = std::byte{'r'};
  v1::PushWeightsRequest message = Rows(1, 1, "");
  v1::SharedMemorySlice& slice = *message.mutable_rows()->mutable_shared_memory();
  slice.set_region(region.id());
  slice.set_offset(64);
  slice.set_bytes(1);

  ASSERT_TRUE(Push({Header(), message}).ok());

  ASSERT_EQ(received_.size(), 1U);
  EXPECT_EQ(received_[0].bytes, "r");
  slice.set_offset(65);
  EXPECT_THAT(Push({Header(), message}).error_message(), HasSubstr("shared_memory.offset"));
  slice.set_offset(64);
  slice.set_region(std::string(16, '\0'));
  EXPECT_EQ(Push({Header(), message}).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(PushCallTest, ReadsManyRowsInSharedMemoryInPieces) {
  constexpr int64_t kBytes = kDeviceRows * kDeviceRowBytes;
  ControlClient control(server_->unix_socket_path() + SameHostAccess::kControlSuffix);
  control.Hello();
  MappedRegion region(control.CreateRegion(kBytes));
  for (int64_t row = 0; row < kDeviceRows; ++row) {
    region.bytes()[static_cast<size_t>(row * kDeviceRowBytes)] = std::byte(row);
  }
  v1::PushWeightsRequest message = Rows(3, kDeviceRows, "");
  v1::SharedMemorySlice& slice = *message.mutable_rows()->mutable_shared_memory();
  slice.set_region(region.id());
  slice.set_bytes(kBytes);

  ASSERT_TRUE(Push({Header(), message}).ok());

  ASSERT_EQ(received_.size(), 3U);  // 4, 4 and 1 rows of 2 MiB
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(received_[i].row_begin, 3 + 4 * static_cast<int64_t>(i));
    EXPECT_EQ(received_[i].num_rows, i < 2 ? 4 : 1);
    EXPECT_EQ(received_[i].bytes.size(),
              static_cast<size_t>(received_[i].num_rows * kDeviceRowBytes));
    EXPECT_EQ(received_[i].bytes[0], static_cast<char>(4 * i));
  }
  message.mutable_rows()->set_rows(7);
  EXPECT_THAT(Push({Header(), message}).error_message(),
              HasSubstr("rows: 7, but shared_memory has"));
  message.mutable_rows()->set_rows(2);  // rows above 8 MiB
  EXPECT_EQ(Push({Header(), message}).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  slice.set_bytes(0);
  EXPECT_EQ(Push({Header(), message}).error_message(), "rows: 2, but shared_memory has 0 bytes");
  slice.set_bytes(2 * PushCall::kDataBytesMax);  // rows of exactly 8 MiB
  received_.clear();
  EXPECT_TRUE(Push({Header(), message}).ok());
  ASSERT_EQ(received_.size(), 2U);
  EXPECT_EQ(received_[1].row_begin, 4);
  EXPECT_EQ(received_[1].num_rows, 1);
}

TEST_F(PushCallTest, CopiesRowsInGpuMemoryInPieces) {
  ControlClient control(server_->unix_socket_path() + SameHostAccess::kControlSuffix);
  v1::PushWeightsRequest message = Rows(3, kDeviceRows, "");
  v1::CudaIpcSlice& slice = *message.mutable_rows()->mutable_cuda_ipc();
  slice.set_lease(control.Hello().welcome().lease());
  slice.set_device_uuid(std::string(16, 'u'));
  slice.set_handle(std::string(64, 'g'));
  slice.set_bytes(kDeviceRows * kDeviceRowBytes);

  // The last message has more rows than those in the GPU's memory.
  ASSERT_TRUE(Push({Header(), message, Rows(20, 30, "a")}).ok());

  ASSERT_EQ(received_.size(), 4U);  // 4, 4 and 1 rows of 2 MiB, and one in a message
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(received_[i].row_begin, 3 + 4 * static_cast<int64_t>(i));
    EXPECT_EQ(received_[i].num_rows, i < 2 ? 4 : 1);
    EXPECT_EQ(received_[i].bytes,
              std::string(static_cast<size_t>(received_[i].num_rows * kDeviceRowBytes), 'g'));
  }
  EXPECT_EQ(received_[3].row_begin, 20);
  EXPECT_EQ(received_[3].bytes, "a");
  message.mutable_rows()->set_rows(2);
  EXPECT_THAT(Push({Header(), message}).error_message(), HasSubstr("rows: 2, but cuda_ipc has"));
  slice.set_lease(std::string(16, 'x'));
  EXPECT_EQ(Push({Header(), message}).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(PushCallTest, ACallThatEndsEarlyReleasesTheClientsMemoryBeforeItAnswers) {
  store_.on_push = [](const WeightsPush&, const NextPushedRows& next,
                      const TellProgress&) -> absl::StatusOr<PushedWeightsResult> {
    EXPECT_TRUE(next().ok());  // the first of several pieces
    return absl::AbortedError("enough");
  };
  ControlClient control(server_->unix_socket_path() + SameHostAccess::kControlSuffix);
  v1::PushWeightsRequest message = Rows(0, kDeviceRows, "");
  v1::CudaIpcSlice& slice = *message.mutable_rows()->mutable_cuda_ipc();
  slice.set_lease(control.Hello().welcome().lease());
  slice.set_device_uuid(std::string(16, 'u'));
  slice.set_handle(std::string(64, 'g'));
  slice.set_bytes(kDeviceRows * kDeviceRowBytes);

  EXPECT_EQ(Push({Header(), message}).error_code(), grpc::StatusCode::ABORTED);

  EXPECT_EQ(devices_.opened().size(), 1U);
  EXPECT_FALSE(devices_.is_in_use());
}

TEST_F(PushCallTest, RefusesMessagesThatAreTooLargeOrMalformed) {
  const std::string large(static_cast<size_t>(PushCall::kDataBytesMax) + (1 << 17), 'x');
  EXPECT_THAT(Push({Header(), Rows(0, 1, large)}).error_message(), HasSubstr("must be at most"));
  EXPECT_TRUE(received_.empty());
  v1::PushWeightsRequest header = Header();
  header.mutable_header()->set_head(std::string(1 << 20, 'x'));
  EXPECT_THAT(Push({header}).error_message(), HasSubstr("must be at most 65536"));

  grpc::ClientContext context;
  grpc::ByteBuffer answer;
  const grpc::Status status =
      CallRaw(grpc::CreateChannel(server_->admin_address(), grpc::InsecureChannelCredentials()),
              "/logprobd.v1.Weights/Push", BufferOf("\xFF\xFF\xFF"), answer, context);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(PushCallTest, ACancelledCallEndsTheWaitForRows) {
  grpc::ClientContext context;
  const auto writer = stub_->Push(&context, &response_);
  writer->Write(Header());
  begun_.WaitForNotification();

  context.TryCancel();

  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server_ = nullptr;  // waits for the call's thread
  EXPECT_TRUE(received_.empty());
}

TEST_F(PushCallTest, ACancelledCallEndsBetweenThePiecesOfAMessage) {
  ControlClient control(server_->unix_socket_path() + SameHostAccess::kControlSuffix);
  control.Hello();
  MappedRegion region(control.CreateRegion(kDeviceRows * kDeviceRowBytes));
  v1::PushWeightsRequest message = Rows(0, kDeviceRows, "");
  message.mutable_rows()->mutable_shared_memory()->set_region(region.id());
  message.mutable_rows()->mutable_shared_memory()->set_bytes(kDeviceRows * kDeviceRowBytes);
  absl::Status second;
  store_.on_push = [&](const WeightsPush&, const NextPushedRows& next,
                       const TellProgress& progress) -> absl::StatusOr<PushedWeightsResult> {
    EXPECT_TRUE(next().ok());
    begun_.Notify();
    while (progress({})) {  // until the server knows of the cancellation
      std::this_thread::yield();
    }
    second = next().status();
    return second;
  };
  grpc::ClientContext context;
  const auto writer = stub_->Push(&context, &response_);
  writer->Write(Header());
  writer->Write(message);
  begun_.WaitForNotification();

  context.TryCancel();

  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server_ = nullptr;  // waits for the call's thread
  EXPECT_EQ(second.code(), absl::StatusCode::kCancelled);
}

TEST_F(PushCallTest, ShutdownEndsTheWaitForRowsWithoutTheGrace) {
  grpc::ClientContext context;
  const auto writer = stub_->Push(&context, &response_);
  writer->Write(Header());
  begun_.WaitForNotification();

  server_->Shutdown(absl::Hours(1));

  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(PushCallTest, ACallWithoutMessagesEndsAfterTheIdleTime) {
  FakeClock clock;
  Make(clock);
  grpc::ClientContext context;
  const auto writer = stub_->Push(&context, &response_);
  writer->Write(Header());
  begun_.WaitForNotification();
  std::thread time([&] {
    for (absl::Duration passed; passed < PushCall::kIdleMax; passed += absl::Seconds(1)) {
      clock.WaitUntilAsleep(2);  // beside the thread of the health service
      clock.Advance(absl::Seconds(1));
    }
  });

  const grpc::Status status = writer->Finish();

  time.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_THAT(status.error_message(), HasSubstr("no message arrived for 30s"));
  server_ = nullptr;
}

}  // namespace
}  // namespace logprobd::testing
