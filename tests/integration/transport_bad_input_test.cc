// Sends bad input over a real connection to the transport with a fake head. Each entry has a fault,
// the code that the server must return for it and a part of the message. After each fault the
// server must still serve, hold no request and have counted the fault. The ids are those of the
// table in tests/FAULTS.md.
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "grpc/compression.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/support/test_stream.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

grpc::Status SendBytes(TransportServer& server, const std::string& bytes) {
  grpc::ClientContext context;
  grpc::ByteBuffer answer;
  return CallRaw(server.channel, kScoreMethod, BufferOf(bytes), answer, context);
}

/// Returns a function that sends a valid request of two rows, modified by `change`.
std::function<grpc::Status(TransportServer&)> Changed(
    std::function<void(v1::ScoreRequest&)> change) {
  return [change = std::move(change)](TransportServer& server) {
    v1::ScoreRequest request = ValidRequest(2);
    change(request);
    return SendBytes(server, request.SerializeAsString());
  };
}

/// Returns a function that sends a valid request followed by `bytes`.
std::function<grpc::Status(TransportServer&)> With(std::string bytes) {
  return [bytes = std::move(bytes)](TransportServer& server) {
    return SendBytes(server, ValidRequest(2).SerializeAsString() + bytes);
  };
}

std::function<grpc::Status(TransportServer&)> Only(std::string bytes) {
  return [bytes = std::move(bytes)](TransportServer& server) { return SendBytes(server, bytes); };
}

grpc::Status SendCompressed(TransportServer& server, grpc_compression_algorithm algorithm) {
  grpc::ClientContext context;
  context.set_compression_algorithm(algorithm);
  v1::ScoreRequest request = ValidRequest(2);
  request.set_hidden(std::string(900'000, '\0'));
  v1::ScoreResponse response;
  return server.stub->Score(&context, request, &response);
}

struct Fault {
  std::string id;  ///< Id in the fault table, followed by a description.
  std::function<grpc::Status(TransportServer&)> send;
  StatusCode code = StatusCode::INVALID_ARGUMENT;
  std::string message = {};  ///< Part of the message, or empty if gRPC itself returns the status.
};

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.id; }

/// Returns how many Score calls have been answered with `code`.
int64_t Answered(const Metrics& metrics, absl::StatusCode code) {
  int64_t sum = 0;
  for (const absl::string_view line : absl::StrSplit(metrics.Serialize(), '\n')) {
    if (absl::StartsWith(line, "logprobd_requests_total{") &&
        absl::StrContains(line, "method=\"Score\"") &&
        absl::StrContains(line, absl::StrCat("code=\"", absl::StatusCodeToString(code), "\""))) {
      double value = 0;
      EXPECT_TRUE(absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) << line;
      sum += static_cast<int64_t>(value);
    }
  }
  return sum;
}

void ExpectStillServing(TransportServer& server) {
  server.head->RefuseWith(absl::OkStatus());
  server.head->AnswerWith(absl::OkStatus());
  server.head->SetReady(true);
  server.head->Release();
  // The check uses a new connection, because gRPC may close that of the fault: after A14, the next
  // call failed with "Socket closed".
  const auto stub = v1::Scoring::NewStub(server.NewChannel());
  grpc::ClientContext context;
  v1::ScoreResponse response;
  const grpc::Status status = stub->Score(&context, ValidRequest(2), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.rows(), 2U);
  EXPECT_EQ(server.head->num_waiting(), 0);
}

class TransportBadInputTest : public ::testing::TestWithParam<Fault> {};

TEST_P(TransportBadInputTest, GivesItsCodeAndLeavesTheServerServing) {
  const Fault& fault = GetParam();
  TransportServer server;
  const auto code = static_cast<absl::StatusCode>(fault.code);
  const int64_t answered = Answered(server.metrics, code);

  const grpc::Status status = fault.send(server);

  EXPECT_EQ(status.error_code(), fault.code) << status.error_message();
  if (!fault.message.empty()) {
    EXPECT_THAT(status.error_message(), HasSubstr(fault.message));
    EXPECT_EQ(Answered(server.metrics, code), answered + 1);
  }
  ExpectStillServing(server);
}

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

const Fault kWireFaults[] = {
    {"A1RandomBytes", Only("\xF7\x13\x9C\x00\xFE\x41\x88"), StatusCode::INVALID_ARGUMENT,
     "ScoreRequest"},
    {"A2TruncatedField",
     With("\xD2\x05\x7F"
          "short"),
     StatusCode::INVALID_ARGUMENT, "length 127, but 5 bytes are left"},
    {"A3LongNumber", With("\x28" + std::string(10, '\xFF') + "\x01"), StatusCode::INVALID_ARGUMENT,
     "rows: the number is truncated or has more than 64 bits"},
    {"A3LongLength", With("\x82\x02" + std::string(4, '\xFF') + "\x0F"),
     StatusCode::INVALID_ARGUMENT, "hidden: length 4294967295"},
    {"A4WrongWireType",
     With("\x2D"
          "1234"),
     StatusCode::INVALID_ARGUMENT, "rows: wire type 5, must be 0"},
    {"A5HiddenTwice",
     With("\x82\x02\x04"
          "1234"),
     StatusCode::INVALID_ARGUMENT, "hidden: given twice"},
    {"A5TargetsTwice",
     With("\x3A\x04"
          "1234"),
     StatusCode::INVALID_ARGUMENT, "targets: given twice"},
    {"A6PayloadFirst",
     [](TransportServer& server) {
       v1::ScoreRequest hidden;
       hidden.set_hidden(std::string(32, 'h'));
       v1::ScoreRequest rest = ValidRequest(2);
       rest.clear_hidden();
       return SendBytes(server, hidden.SerializeAsString() + rest.SerializeAsString());
     },
     StatusCode::OK, ""},
    {"A7FewUnknownFields", With("\xA0\x06\x05"), StatusCode::OK, ""},
    {"A7ManyUnknownFields", With("\xA2\x06\x80\x80\x04" + std::string(65'536, 'x')),
     StatusCode::INVALID_ARGUMENT, "bytes of unknown fields, must be at most 65536"},
    {"A8NestedGroups", With([] {
       std::string groups;
       for (int i = 0; i < 500; ++i) {
         groups += "\xC3\x02";
       }
       return groups;
     }()),
     StatusCode::INVALID_ARGUMENT, "groups are not supported"},
    {"A9EmptyMessage", Only(""), StatusCode::INVALID_ARGUMENT, "dtype: 0, must be"},
    {"A10MessageOverTheLimit", Only(std::string(2 << 20, '\0')), StatusCode::RESOURCE_EXHAUSTED},
    {"A12Gzip", [](TransportServer& server) { return SendCompressed(server, GRPC_COMPRESS_GZIP); },
     StatusCode::UNIMPLEMENTED},
    {"A12Deflate",
     [](TransportServer& server) { return SendCompressed(server, GRPC_COMPRESS_DEFLATE); },
     StatusCode::UNIMPLEMENTED},
    {"A13UnknownMethod",
     [](TransportServer& server) {
       grpc::ClientContext context;
       grpc::ByteBuffer answer;
       return CallRaw(server.channel, "/logprobd.v1.Scoring/Nonsense", BufferOf("x"), answer,
                      context);
     },
     StatusCode::UNIMPLEMENTED},
    {"A13UnknownService",
     [](TransportServer& server) {
       grpc::ClientContext context;
       grpc::ByteBuffer answer;
       return CallRaw(server.channel, "/nonsense.Service/Score", BufferOf("x"), answer, context);
     },
     StatusCode::UNIMPLEMENTED},
    {"A14LargeMetadata",
     [](TransportServer& server) {
       grpc::ClientContext context;
       context.AddMetadata("client_id", std::string(20'000, 'a'));
       v1::ScoreResponse response;
       return server.stub->Score(&context, ValidRequest(2), &response);
     },
     StatusCode::RESOURCE_EXHAUSTED},
    {"A15IdNotUtf8",
     With("\x0A\x02"
          "a\xFF"),
     StatusCode::INVALID_ARGUMENT, "request_id: not valid UTF-8"},
    {"A15HeadNotUtf8", With("\x12\x01\x80"), StatusCode::INVALID_ARGUMENT, "head: not valid UTF-8"},
    {"A16IdWithNewline", Changed([](v1::ScoreRequest& r) { r.set_request_id("a\nerror b"); }),
     StatusCode::INVALID_ARGUMENT, "request_id: holds control characters"},
    {"A16IdWithEscape", Changed([](v1::ScoreRequest& r) { r.set_request_id("\x1B[2J"); }),
     StatusCode::INVALID_ARGUMENT, "request_id: holds control characters"},
    {"A16IdTooLong", Changed([](v1::ScoreRequest& r) { r.set_request_id(std::string(129, 'a')); }),
     StatusCode::INVALID_ARGUMENT, "request_id: 129 bytes, must be at most 128"},
    {"A22NoMessage",
     [](TransportServer& server) { return CallWithoutMessage(server.channel, kScoreMethod); },
     StatusCode::INVALID_ARGUMENT, "dtype: 0, must be"},
};
INSTANTIATE_TEST_SUITE_P(Wire, TransportBadInputTest, ::testing::ValuesIn(kWireFaults),
                         [](const auto& test) { return test.param.id; });

const Fault kShapeFaults[] = {
    {"B23HiddenTooShort", Changed([](v1::ScoreRequest& r) { r.mutable_hidden()->pop_back(); }),
     StatusCode::INVALID_ARGUMENT, "hidden: 31 bytes, must be 32"},
    {"B24ProductOverflows", Changed([](v1::ScoreRequest& r) {
       r.set_rows(4'294'967'295);
       r.set_hidden_size(4'294'967'295);
     }),
     StatusCode::INVALID_ARGUMENT, "hidden_size: 4294967295, must be 8"},
    {"B25OtherHiddenSize", Changed([](v1::ScoreRequest& r) { r.set_hidden_size(16); }),
     StatusCode::INVALID_ARGUMENT, "hidden_size: 16, must be 8"},
    {"B26NoRows", Changed([](v1::ScoreRequest& r) {
       r.set_rows(0);
       r.clear_targets();
       r.clear_hidden();
     }),
     StatusCode::OK, ""},
    {"B27TooManyRows", Changed([](v1::ScoreRequest& r) { r.set_rows(65); }),
     StatusCode::INVALID_ARGUMENT, "rows: 65, must be in [0, 64]"},
    {"B28TooFewTargets", Changed([](v1::ScoreRequest& r) { r.set_targets("1234"); }),
     StatusCode::INVALID_ARGUMENT, "targets: 1 ids, must be 2"},
    {"B28OddTargets", Changed([](v1::ScoreRequest& r) { r.set_targets("12345"); }),
     StatusCode::INVALID_ARGUMENT, "targets: 5 bytes, must be a multiple of 4"},
    {"B29TargetTooLarge", Changed([](v1::ScoreRequest& r) {
       r.set_targets(BytesOf<int32_t>({5, 2'000'000}));
     }),
     StatusCode::INVALID_ARGUMENT, "targets[1]: 2000000, must be in [0, 100)"},
    {"B29NegativeTarget", Changed([](v1::ScoreRequest& r) {
       r.set_targets(BytesOf<int32_t>({-1, 5}));
     }),
     StatusCode::INVALID_ARGUMENT, "targets[0]: -1"},
    {"B30TargetInThePadding", Changed([](v1::ScoreRequest& r) {
       r.set_targets(BytesOf<int32_t>({5, 103}));
     }),
     StatusCode::INVALID_ARGUMENT, "targets[1]: 103, must be in [0, 100)"},
    {"B31IgnoredRows", Changed([](v1::ScoreRequest& r) {
       r.set_targets(BytesOf<int32_t>({-100, -100}));
     }),
     StatusCode::OK, ""},
    {"B31IgnoreIndexOfAnId", Changed([](v1::ScoreRequest& r) { r.set_ignore_index(7); }),
     StatusCode::INVALID_ARGUMENT, "ignore_index: 7, must lie outside [0, 100)"},
    {"B32NoDtype", Changed([](v1::ScoreRequest& r) { r.clear_dtype(); }),
     StatusCode::INVALID_ARGUMENT, "dtype: 0"},
    {"B32UnknownDtype",
     Changed([](v1::ScoreRequest& r) { r.set_dtype(static_cast<v1::Dtype>(12)); }),
     StatusCode::INVALID_ARGUMENT, "dtype: 12"},
    {"B32UnknownPriority",
     Changed([](v1::ScoreRequest& r) { r.set_priority(static_cast<v1::Priority>(9)); }),
     StatusCode::INVALID_ARGUMENT, "priority: 9"},
    {"B32UnknownOutput", Changed([](v1::ScoreRequest& r) { r.set_outputs(1'024); }),
     StatusCode::INVALID_ARGUMENT, "outputs: 1024"},
    {"B35ZeroTemperature", Changed([](v1::ScoreRequest& r) { r.set_temperature(0); }),
     StatusCode::INVALID_ARGUMENT, "temperature: 0, must be finite and in [1e-4, 1e4]"},
    {"B35NegativeTemperature", Changed([](v1::ScoreRequest& r) { r.set_temperature(-1); }),
     StatusCode::INVALID_ARGUMENT, "temperature: -1"},
    {"B35NanTemperature", Changed([](v1::ScoreRequest& r) { r.set_temperature(kNan); }),
     StatusCode::INVALID_ARGUMENT, "temperature: nan"},
    {"B35InfiniteTemperature", Changed([](v1::ScoreRequest& r) { r.set_temperature(kInfinity); }),
     StatusCode::INVALID_ARGUMENT, "temperature: inf"},
    {"B35TinyTemperature", Changed([](v1::ScoreRequest& r) { r.set_temperature(1e-30F); }),
     StatusCode::INVALID_ARGUMENT, "temperature: 1e-30"},
    {"B35SmallestTemperature", Changed([](v1::ScoreRequest& r) { r.set_temperature(1e-4F); }),
     StatusCode::OK, ""},
    {"B35LargestTemperature", Changed([](v1::ScoreRequest& r) { r.set_temperature(1e4F); }),
     StatusCode::OK, ""},
    {"B35RowTemperature", Changed([](v1::ScoreRequest& r) {
       r.set_row_temperatures(BytesOf<float>({1, 0}));
     }),
     StatusCode::INVALID_ARGUMENT, "row_temperatures[1]: 0"},
    {"B35EntropyTemperature", Changed([](v1::ScoreRequest& r) { r.set_entropy_temperature(0); }),
     StatusCode::INVALID_ARGUMENT, "entropy_temperature: 0"},
    {"B36TopKTooLarge", Changed([](v1::ScoreRequest& r) { r.set_top_k(17); }),
     StatusCode::INVALID_ARGUMENT, "top_k: 17, must be in [0, 16]"},
    {"B37SegmentsFall", Changed([](v1::ScoreRequest& r) {
       r.set_segment_offsets(BytesOf<uint32_t>({0, 2, 1, 2}));
     }),
     StatusCode::INVALID_ARGUMENT, "segment_offsets[2]: 1"},
    {"B37SegmentsEndLate", Changed([](v1::ScoreRequest& r) {
       r.set_segment_offsets(BytesOf<uint32_t>({0, 3}));
     }),
     StatusCode::INVALID_ARGUMENT, "segment_offsets[1]: 3, must end at rows, 2"},
    {"B37CandidateOffsetsFall", Changed([](v1::ScoreRequest& r) {
       r.set_candidate_ids(BytesOf<int32_t>({1, 2}));
       r.set_candidate_offsets(BytesOf<uint32_t>({0, 4'294'967'295, 2}));
     }),
     StatusCode::INVALID_ARGUMENT, "candidate_offsets[2]: 2"},
    {"B37CandidateTooLarge", Changed([](v1::ScoreRequest& r) {
       r.set_candidate_ids(BytesOf<int32_t>({1, 100}));
       r.set_candidate_offsets(BytesOf<uint32_t>({0, 1, 2}));
     }),
     StatusCode::INVALID_ARGUMENT, "candidate_ids[1]: 100, must be in [0, 100)"},
    {"B38TooManySegments", Changed([](v1::ScoreRequest& r) {
       r.set_segment_offsets(BytesOf(std::vector<uint32_t>(34, 0)));
     }),
     StatusCode::INVALID_ARGUMENT, "segment_offsets: 33 segments, must be at most 32"},
    {"B38TooManyCandidates", Changed([](v1::ScoreRequest& r) {
       r.set_candidate_ids(BytesOf(std::vector<int32_t>(257, 0)));
     }),
     StatusCode::INVALID_ARGUMENT, "candidate_ids: 257 ids, must be at most 256"},
    {"B39PayloadAtAnOddOffset", Changed([](v1::ScoreRequest& r) { r.set_request_id("odd"); }),
     StatusCode::OK, ""},
    {"B41Fp32HiddenForABf16Head", Changed([](v1::ScoreRequest& r) {
       r.set_dtype(v1::DTYPE_F32);
       r.set_hidden(std::string(64, '\0'));
     }),
     StatusCode::OK, ""},
    {"B42SharedMemoryAndHidden",
     With("\x8A\x02\x01"
          "x"),
     StatusCode::INVALID_ARGUMENT,
     "shared_memory: given together with hidden, must be the only payload"},
    {"B42NoPayload", Changed([](v1::ScoreRequest& r) { r.clear_hidden(); }),
     StatusCode::INVALID_ARGUMENT, "hidden: 0 bytes, must be 32"},
};
INSTANTIATE_TEST_SUITE_P(Shape, TransportBadInputTest, ::testing::ValuesIn(kShapeFaults),
                         [](const auto& test) { return test.param.id; });

grpc::Status ScoreAfter(TransportServer& server, const std::function<void(FakeHead&)>& set) {
  set(*server.head);
  return SendBytes(server, ValidRequest(2).SerializeAsString());
}

// B24: only a head with as many hidden elements lets a request get as far as the product. The last
// size fits 63 bits.
TEST(TransportBadInputSizesTest, B24ProductBeyond63Bits) {
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  HeadInfo info = FakeHeadInfo();
  info.hidden_size = kMost;
  info.limits.request_rows_max = kMost;
  TransportServer server(TestServerOptions(), info);
  const auto send = [&server](uint32_t rows) {
    return Changed([rows](v1::ScoreRequest& r) {
      r.set_rows(rows);
      r.set_hidden_size(kMost);
    })(server);
  };

  for (const uint32_t rows : {kMost, 1U << 31}) {
    const grpc::Status status = send(rows);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat("rows: ", rows, " x hidden_size ",
                                                               kMost, " is more than 2^63 bytes")));
  }
  EXPECT_THAT(send(1U << 30).error_message(),
              HasSubstr("hidden: 32 bytes, must be 9223372034707292160"));
  EXPECT_EQ(server.head->num_submitted(), 0);
}

const Fault kStateFaults[] = {
    {"C44UnknownHead", Changed([](v1::ScoreRequest& r) { r.set_head("absent"); }),
     StatusCode::NOT_FOUND, "head: \"absent\" is not served here"},
    {"C45VersionNotLive", Changed([](v1::ScoreRequest& r) { r.set_weights_version(2); }),
     StatusCode::FAILED_PRECONDITION, "weights_version: 2, but version 3 is live"},
    {"C46NotReady",
     [](TransportServer& server) {
       return ScoreAfter(server, [](FakeHead& head) { head.SetReady(false); });
     },
     StatusCode::UNAVAILABLE, "head \"fake\" is not ready"},
    {"D59QueueFull",
     [](TransportServer& server) {
       return ScoreAfter(server, [](FakeHead& head) {
         head.RefuseWith(WithRetryAfter(absl::ResourceExhaustedError("queue_rows: full"),
                                        absl::Milliseconds(5)));
       });
     },
     StatusCode::RESOURCE_EXHAUSTED, "queue_rows: full"},
    {"D62DeadlinePassed",
     [](TransportServer& server) {
       return ScoreAfter(server, [](FakeHead& head) {
         head.RefuseWith(absl::DeadlineExceededError("the deadline has passed"));
       });
     },
     StatusCode::DEADLINE_EXCEEDED, "the deadline has passed"},
    {"D63DeadlineWhileQueued",
     [](TransportServer& server) {
       server.head->Hold();
       grpc::ClientContext context;
       // The deadline is long enough for the request to arrive on a busy machine.
       context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
       v1::ScoreResponse response;
       const grpc::Status status = server.stub->Score(&context, ValidRequest(2), &response);
       server.head->WaitForCancelled(1);
       return status;
     },
     StatusCode::DEADLINE_EXCEEDED},
    {"D65CancelledWhileQueued",
     [](TransportServer& server) {
       server.head->Hold();
       TestStream stream(server.channel);
       stream.Send(ValidRequest(2));
       server.head->WaitForSubmitted(1);
       stream.Cancel();
       server.head->WaitForCancelled(1);
       return stream.Finish();
     },
     StatusCode::CANCELLED},
    {"D66ClientGoneWithWorkInFlight",
     [](TransportServer& server) {
       server.head->Hold();
       std::vector<std::unique_ptr<TestStream>> streams;
       for (int i = 0; i < 16; ++i) {  // at most 4 chunks of a stream are unanswered
         streams.push_back(std::make_unique<TestStream>(server.NewChannel()));
         for (int chunk = 0; chunk < 6; ++chunk) {
           streams.back()->Send(ValidRequest(2));
         }
       }
       server.head->WaitForSubmitted(64);
       streams.clear();
       server.head->WaitForCancelled(64);
       return grpc::Status::OK;
     },
     StatusCode::OK},
    {"E77InternalErrorHidesItsDetails",
     [](TransportServer& server) {
       return ScoreAfter(server, [](FakeHead& head) {
         head.AnswerWith(absl::InternalError("secret_gpu7 has gone"));
       });
     },
     StatusCode::INTERNAL, "internal error; the server's log has the details"},
    {"G104ManyHeadNames",
     [](TransportServer& server) {
       grpc::Status status;
       for (int i = 0; i < 300; ++i) {
         v1::ScoreRequest request = ValidRequest(2);
         request.set_head(absl::StrCat("attack", i));
         status = SendBytes(server, request.SerializeAsString());
         EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND);
       }
       EXPECT_FALSE(absl::StrContains(server.metrics.Serialize(), "attack"));
       return status;
     },
     StatusCode::NOT_FOUND},
};
INSTANTIATE_TEST_SUITE_P(State, TransportBadInputTest, ::testing::ValuesIn(kStateFaults),
                         [](const auto& test) { return test.param.id; });

TEST(TransportBadInputWithoutHeadTest, C46NothingIsLoaded) {
  TransportServer server(TestServerOptions(), FakeHeadInfo(), /*with_head=*/false);
  const grpc::Status status = SendBytes(server, ValidRequest(2).SerializeAsString());
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(status.error_message(), "no head is loaded yet");
}

}  // namespace
}  // namespace logprobd::testing
