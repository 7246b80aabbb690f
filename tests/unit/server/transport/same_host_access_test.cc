#include "server/transport/same_host_access.h"

#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/control_client.h"
#include "tests/support/fake_client_memory.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_stream.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kPage = 4'096;
constexpr size_t kAllocationBytes = 1'024;
constexpr int64_t kRequestBytes = 32;  // size of ValidRequest's two rows

/// A server with a Unix socket, a fake head and shared memory of one page, and a client with a
/// region that takes it.
class SameHostAccessTest : public ::testing::Test {
 protected:
  SameHostAccessTest()
      : server_(Options()),
        client_(server_.server->unix_socket_path() + SameHostAccess::kControlSuffix),
        hello_(client_.Hello()),
        region_(client_.CreateRegion(kPage)) {}

  GrpcServer::Options Options() {
    GrpcServer::Options options = TestServerOptions();
    options.unix_socket = folder_.path("socket");
    options.pinning = &pinning_;
    options.devices = &devices_;
    options.shared_memory.bytes_max = kPage;
    return options;
  }

  /// Returns a request with two rows in the region.
  v1::ScoreRequest InRegion(uint64_t offset = 0) const {
    v1::ScoreRequest request = ValidRequest();
    request.clear_hidden();
    request.mutable_shared_memory()->set_region(region_.id());
    request.mutable_shared_memory()->set_offset(offset);
    request.mutable_shared_memory()->set_bytes(kRequestBytes);
    return request;
  }

  /// Returns a request with two rows in the GPU memory that a handle names.
  v1::ScoreRequest OnGpu(char handle = 'h', uint64_t offset = 0) const {
    v1::ScoreRequest request = ValidRequest();
    request.clear_hidden();
    v1::CudaIpcSlice& slice = *request.mutable_cuda_ipc();
    slice.set_lease(hello_.welcome().lease());
    slice.set_device_uuid(std::string(16, 'u'));
    slice.set_handle(std::string(64, handle));
    slice.set_offset(offset);
    slice.set_bytes(kRequestBytes);
    return request;
  }

  grpc::Status Score(const v1::ScoreRequest& request) {
    grpc::ClientContext context;
    return server_.stub->Score(&context, request, &response_);
  }

  double Metric(const std::string& series) const {
    const std::string text = absl::StrCat("\n", server_.metrics.Serialize());
    const size_t begin = text.find(absl::StrCat("\n", series, " "));
    return begin == std::string::npos ? -1 : std::stod(text.substr(begin + series.size() + 2));
  }

  const TempFolder folder_;
  FakePinning pinning_;
  FakeDeviceMemory devices_{kAllocationBytes};
  TransportServer server_;
  ControlClient client_;
  const v1::LocalReply hello_;
  MappedRegion region_;
  v1::ScoreResponse response_;
};

TEST_F(SameHostAccessTest, PassesTheLocationOfRowsInSharedMemoryToTheHead) {
  std::memset(region_.bytes().data() + 64, 0x3F, kRequestBytes);

  const grpc::Status status = Score(InRegion(64));

  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response_.rows(), 2U);
  const HiddenPayload hidden = server_.head->last_request().hidden;
  EXPECT_EQ(hidden.place, PayloadPlace::kSharedMemory);
  EXPECT_TRUE(hidden.is_pinned);
  EXPECT_EQ(hidden.bytes, kRequestBytes);
  ASSERT_EQ(hidden.pieces.size(), 1U);
  EXPECT_THAT(hidden.pieces[0], Each(std::byte{0x3F}));
  EXPECT_EQ(Metric(R"(logprobd_received_bytes_total{transport="shm"})"),
            static_cast<double>(InRegion(64).ByteSizeLong() + kRequestBytes));
  EXPECT_EQ(Metric(R"(logprobd_received_bytes_total{transport="tcp"})"), 0);
}

TEST_F(SameHostAccessTest, PassesTheLocationOfRowsOnAGpuToTheHead) {
  const grpc::Status status = Score(OnGpu('h', 16));

  ASSERT_TRUE(status.ok()) << status.error_message();
  const HiddenPayload hidden = server_.head->last_request().hidden;
  EXPECT_EQ(hidden.place, PayloadPlace::kDevice);
  EXPECT_EQ(hidden.gpu, 0);
  EXPECT_THAT(hidden.pieces[0], Each(std::byte{'h'}));
  ASSERT_EQ(devices_.opened().size(), 1U);
  EXPECT_EQ(devices_.opened()[0].offset, 16);
  EXPECT_THAT(devices_.opened()[0].device_uuid, Each('u'));
  EXPECT_EQ(Metric(R"(logprobd_received_bytes_total{transport="cuda_ipc"})"),
            static_cast<double>(OnGpu('h', 16).ByteSizeLong() + kRequestBytes));
}

TEST_F(SameHostAccessTest, CountsRequestsByTheTransportOfTheirRows) {
  const auto requests = [this](const std::string& transport) {
    return Metric(absl::StrCat("logprobd_request_duration_seconds_count{head=\"fake\",",
                               "method=\"Score\",transport=\"", transport, "\"}"));
  };
  EXPECT_TRUE(Score(InRegion()).ok());
  EXPECT_TRUE(Score(InRegion()).ok());
  EXPECT_TRUE(Score(OnGpu()).ok());
  EXPECT_TRUE(Score(ValidRequest()).ok());

  server_.server->Shutdown(absl::Minutes(1));  // waits until the responses are counted
  for (const char* const transport : {"shm", "cuda_ipc", "tcp"}) {
    EXPECT_GT(Metric(absl::StrCat("logprobd_sent_bytes_total{transport=\"", transport, "\"}")), 0);
  }
  EXPECT_EQ(requests("shm"), 2);
  EXPECT_EQ(requests("cuda_ipc"), 1);
  EXPECT_EQ(requests("tcp"), 1);
}

TEST_F(SameHostAccessTest, KeepsARegionThatIsClosedWhileARequestReadsIt) {
  std::memset(region_.bytes().data(), 0x3F, kRequestBytes);
  server_.head->Hold();
  grpc::Status status;
  std::thread call([&] { status = Score(InRegion()); });
  server_.head->WaitForSubmitted(1);

  EXPECT_EQ(client_.CloseRegion(region_.id()).status_code(), 0);

  EXPECT_EQ(pinning_.pinned_bytes(), kPage);
  server_.head->Release();
  call.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(server_.head->last_request().hidden.pieces[0], Each(std::byte{0x3F}));
  EXPECT_EQ(Score(InRegion()).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(SameHostAccessTest, ForgetsTheRegionsOfALeaseThatEnds) {
  const v1::ScoreRequest on_gpu = OnGpu();
  client_.Close();
  pinning_.WaitForPinned(0);

  EXPECT_EQ(Score(InRegion()).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Score(on_gpu).error_code(), grpc::StatusCode::NOT_FOUND);
  // The server creates a region only once the one that it replaces is no longer counted.
  ControlClient next(server_.server->unix_socket_path() + SameHostAccess::kControlSuffix);
  next.Hello();
  ASSERT_EQ(next.CreateRegion(kPage).message.status_code(), 0);
  EXPECT_EQ(Metric("logprobd_shm_regions"), 1);
  EXPECT_EQ(Metric("logprobd_shm_bytes"), kPage);
}

TEST_F(SameHostAccessTest, ScoresChunksOfAStream) {
  TestStream stream(server_.channel);
  v1::ScoreRequest request = InRegion();
  request.set_chunk_id(7);

  stream.Send(request);

  const v1::ScoreResponse answer = stream.Read();
  EXPECT_EQ(answer.status_code(), 0) << answer.status_message();
  EXPECT_EQ(answer.chunk_id(), 7U);
}

struct BadSlice {
  std::string name;
  std::function<void(v1::ScoreRequest& in_region, v1::ScoreRequest& on_gpu)> change;
  grpc::StatusCode code;
  std::string message;
};

void PrintTo(const BadSlice& test, std::ostream* out) { *out << test.name; }

class BadSliceTest : public SameHostAccessTest, public ::testing::WithParamInterface<BadSlice> {};

TEST_P(BadSliceTest, IsRefusedAndTheNextRequestIsScored) {
  const BadSlice& bad = GetParam();
  v1::ScoreRequest in_region = InRegion();
  v1::ScoreRequest on_gpu = OnGpu();
  const std::string good[] = {in_region.SerializeAsString(), on_gpu.SerializeAsString()};
  bad.change(in_region, on_gpu);
  int refused = 0;
  for (const v1::ScoreRequest& request : {in_region, on_gpu}) {
    if (request.SerializeAsString() == good[0] || request.SerializeAsString() == good[1]) {
      continue;
    }
    const grpc::Status status = Score(request);
    EXPECT_EQ(status.error_code(), bad.code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(bad.message));
    ++refused;
  }

  EXPECT_EQ(refused, 1);
  EXPECT_TRUE(Score(InRegion()).ok());
  EXPECT_TRUE(Score(OnGpu()).ok());
}

INSTANTIATE_TEST_SUITE_P(
    Slices, BadSliceTest,
    ::testing::Values(
        BadSlice{"UnknownRegion",
                 [](auto& shared, auto&) {
                   shared.mutable_shared_memory()->set_region(std::string(16, 'x'));
                 },
                 grpc::StatusCode::NOT_FOUND, "no such region"},
        BadSlice{"BeyondTheRegion",
                 [](auto& shared, auto&) { shared.mutable_shared_memory()->set_offset(kPage); },
                 grpc::StatusCode::INVALID_ARGUMENT,
                 "32 bytes from offset 4096, must end within the region of 4096 bytes"},
        BadSlice{
            "OffsetOverflows",
            [](auto& shared, auto&) { shared.mutable_shared_memory()->set_offset(~uint64_t{63}); },
            grpc::StatusCode::INVALID_ARGUMENT, "must be less than 2^63"},
        BadSlice{"MisalignedOffset",
                 [](auto& shared, auto&) { shared.mutable_shared_memory()->set_offset(2); },
                 grpc::StatusCode::INVALID_ARGUMENT, "must be a multiple of 64"},
        BadSlice{"FewerBytesThanRows",
                 [](auto& shared, auto&) { shared.mutable_shared_memory()->set_bytes(16); },
                 grpc::StatusCode::INVALID_ARGUMENT, "shared_memory.bytes: 16 bytes, must be 32"},
        BadSlice{"HiddenAndSlice", [](auto& shared, auto&) { shared.set_hidden("rows"); },
                 grpc::StatusCode::INVALID_ARGUMENT, "must be the only payload"},
        BadSlice{"UnknownLease",
                 [](auto&, auto& gpu) { gpu.mutable_cuda_ipc()->set_lease(std::string(16, 'x')); },
                 grpc::StatusCode::NOT_FOUND, "no such lease"},
        BadSlice{"BadHandle",
                 [](auto&, auto& gpu) {
                   gpu.mutable_cuda_ipc()->set_handle(std::string(63, 'h') + "x");
                 },
                 grpc::StatusCode::INVALID_ARGUMENT,
                 "the handle names no memory of another process"},
        BadSlice{"BeyondTheAllocation",
                 [](auto&, auto& gpu) { gpu.mutable_cuda_ipc()->set_offset(kAllocationBytes); },
                 grpc::StatusCode::INVALID_ARGUMENT, "beyond 1024"},
        BadSlice{"MoreGpuBytesThanRows",
                 [](auto&, auto& gpu) { gpu.mutable_cuda_ipc()->set_bytes(64); },
                 grpc::StatusCode::INVALID_ARGUMENT, "cuda_ipc.bytes: 64 bytes, must be 32"}),
    [](const ::testing::TestParamInfo<BadSlice>& test) { return test.param.name; });

TEST(SameHostAccessPathTest, GivesUpItsPathsAtStop) {
  const TempFolder folder;
  Metrics metrics{Metrics::Options()};
  const SameHostAccess::Options options{.grpc_path = folder.path("socket"), .regions = {}};
  const auto first = SameHostAccess::Create(options, metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*first)->info().grpc_path, folder.path("socket"));
  EXPECT_EQ((*first)->info().control_path, folder.path("socket.control"));
  EXPECT_TRUE((*first)->info().shared_memory);
  EXPECT_FALSE((*first)->info().cuda_ipc);
  EXPECT_EQ(SameHostAccess::Create(options, metrics).status().code(),
            absl::StatusCode::kUnavailable);
  ControlClient client((*first)->info().control_path);
  client.Hello();

  (*first)->Stop();

  EXPECT_TRUE(client.IsClosed());
  EXPECT_TRUE(SameHostAccess::Create(options, metrics).ok());
}

TEST(SameHostAccessOffTest, RefusesSlicesOfASwitchedOffKind) {
  GrpcServer::Options options = TestServerOptions();
  TransportServer without_socket(options);
  const TempFolder folder;
  options.unix_socket = folder.path("socket");
  options.shared_memory.bytes_max = 0;
  TransportServer without_memory(options);
  v1::ScoreRequest shared = ValidRequest();
  shared.clear_hidden();
  shared.mutable_shared_memory()->set_region(std::string(16, 'r'));
  shared.mutable_shared_memory()->set_bytes(kRequestBytes);
  v1::ScoreRequest gpu = ValidRequest();
  gpu.clear_hidden();
  gpu.mutable_cuda_ipc()->set_lease(std::string(16, 'l'));
  gpu.mutable_cuda_ipc()->set_device_uuid(std::string(16, 'u'));
  gpu.mutable_cuda_ipc()->set_handle(std::string(64, 'h'));
  gpu.mutable_cuda_ipc()->set_bytes(kRequestBytes);

  struct Case {
    TransportServer& server;
    const v1::ScoreRequest& request;
    std::string message;
  };
  for (const Case& test :
       {Case{without_socket, shared, "shared_memory: this server has no Unix socket"},
        Case{without_socket, gpu, "cuda_ipc: this server has no Unix socket"},
        Case{without_memory, shared, "--shared-memory-bytes"},
        Case{without_memory, gpu, "--cuda-ipc"}}) {
    grpc::ClientContext context;
    v1::ScoreResponse response;
    const grpc::Status status = test.server.stub->Score(&context, test.request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr(test.message));
  }
}

}  // namespace
}  // namespace logprobd::testing
