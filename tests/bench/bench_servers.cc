#include "tests/bench/bench_servers.h"

#include <fcntl.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <ctime>
#include <deque>
#include <iostream>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/scoring_engine.h"
#include "server/batching/batcher.h"
#include "server/batching/task_pool.h"
#include "tests/bench/row_checksum.h"
#include "tests/support/batcher_on.h"

extern char** environ;

namespace logprobd::testing {
namespace {

class HeapBuffer final : public StagingBuffer {
 public:
  explicit HeapBuffer(int64_t size_bytes)
      : size_bytes_(size_bytes), memory_(new std::byte[static_cast<size_t>(size_bytes)]) {}
  std::byte* data() override { return memory_.get(); }
  int64_t size_bytes() const override { return size_bytes_; }

 private:
  const int64_t size_bytes_;
  const std::unique_ptr<std::byte[]> memory_;
};

constexpr int64_t kRowsOfTask = 32;  // 256 KiB

/// Completes each batch on its own thread, like every engine, and reads the rows if requested.
class NullEngine final : public ScoringEngine {
 public:
  explicit NullEngine(const NullHeadOptions& options)
      : reads_(options.reads),
        pool_("read", options.reads ? options.reading_threads : 0),
        thread_([this] { Run(); }) {
    info_.name = "null";
    info_.model_type = "null";
    info_.hidden_size = 4'096;
    info_.vocab_size = 151'936;
    info_.vocab_rows = 151'936;
    info_.engine = "null";
  }

  ~NullEngine() override {
    {
      absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    thread_.join();
  }

  const HeadInfo& info() const override { return info_; }
  int64_t batch_rows_max() const override { return 8'192; }
  MemoryPlan memory() const override { return {}; }
  bool healthy() const override { return true; }

  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override {
    return std::make_unique<HeapBuffer>(size_bytes);
  }

  bool reads_in_place() const override { return reads_; }

  void Start(ScoreBatch& batch, ScoreDone done) override {
    std::fill(batch.nonfinite.begin(), batch.nonfinite.end(), uint8_t{0});
    std::fill(batch.logprob.begin(), batch.logprob.end(), 0.0F);
    std::fill(batch.entropy.begin(), batch.entropy.end(), 0.0F);
    absl::MutexLock lock(&mutex_);
    started_.push_back({&batch, std::move(done)});
  }

 private:
  struct Started {
    ScoreBatch* batch;
    ScoreDone done;
  };

  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopping_ || !started_.empty();
  }

  void Run() {
    while (true) {
      Started started;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &NullEngine::HasWork));
        if (started_.empty()) return;
        started = std::move(started_.front());
        started_.pop_front();
      }
      if (reads_) Read(*started.batch);
      std::move(started.done)(absl::OkStatus());
    }
  }

  void Read(ScoreBatch& batch) {
    const auto row_bytes = static_cast<size_t>(info_.hidden_size) * 2;
    rows_.clear();
    if (batch.runs.empty()) AddRows({.data = batch.hidden, .num_rows = batch.num_rows});
    for (const HiddenRun& run : batch.runs) AddRows(run);
    pool_.Run((batch.num_rows + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task) {
      const auto end = static_cast<size_t>(std::min((task + 1) * kRowsOfTask, batch.num_rows));
      for (auto row = static_cast<size_t>(task * kRowsOfTask); row < end; ++row) {
        batch.logprob[row] = RowChecksum({rows_[row], row_bytes});
      }
    });
  }

  void AddRows(const HiddenRun& run) {
    for (int64_t row = 0; row < run.num_rows; ++row) {
      rows_.push_back(run.data + row * info_.hidden_size * 2);
    }
  }

  HeadInfo info_;
  const bool reads_;
  std::vector<const std::byte*> rows_;  // rows of the batch that is being read
  TaskPool pool_;
  absl::Mutex mutex_;
  std::deque<Started> started_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class NullHead final : public ServedHead {
 public:
  explicit NullHead(const NullHeadOptions& options) : engine_(options) {}

  static absl::StatusOr<std::shared_ptr<ServedHead>> Create(const Clock& clock, Metrics& metrics,
                                                            const NullHeadOptions& options) {
    auto head = std::make_shared<NullHead>(options);
    absl::StatusOr<std::shared_ptr<Batcher>> batcher =
        BatcherOn({&head->engine_}, {.client_share_max = 1.0, .head = "null"}, clock, metrics);
    if (!batcher.ok()) return batcher.status();
    head->batcher_ = *std::move(batcher);
    return head;
  }

  std::shared_ptr<const HeadInfo> info() const override {
    return std::make_shared<const HeadInfo>(engine_.info());
  }
  bool ready() const override { return true; }
  absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) override {
    return batcher_->Submit(std::move(request), std::move(done));
  }
  void Cancel(RequestTicket ticket) override { batcher_->Cancel(ticket); }
  void Verify(const VerifyOptions&, VerifyCallback done) override {
    std::move(done)(absl::UnimplementedError("the null head has no weight to verify"));
  }

 private:
  NullEngine engine_;
  std::shared_ptr<Batcher> batcher_;  // declared after engine_, so it stops first
};

/// Copies the slices of a message to memory that this thread reuses.
void Copy(const grpc::ByteBuffer& message) {
  thread_local std::vector<uint8_t> memory;
  if (memory.size() < message.Length()) memory.resize(message.Length());
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) return;
  uint8_t* end = memory.data();
  for (const grpc::Slice& slice : slices) end = std::copy(slice.begin(), slice.end(), end);
}

class EchoReactor final : public grpc::ServerGenericBidiReactor {
 public:
  explicit EchoReactor(bool copies) : copies_(copies) { StartRead(&buffer_); }

  void OnReadDone(bool is_ok) override {
    if (!is_ok) {
      Finish(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "the call has no message"));
      return;
    }
    if (copies_) Copy(buffer_);
    const grpc::Slice slice(std::string(8, '\0'));
    buffer_ = grpc::ByteBuffer(&slice, 1);
    StartWriteAndFinish(&buffer_, {}, grpc::Status::OK);
  }

  void OnDone() override { delete this; }

 private:
  const bool copies_;
  grpc::ByteBuffer buffer_;
};

class EchoService final : public grpc::CallbackGenericService {
 public:
  explicit EchoService(bool copies) : copies_(copies) {}

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new EchoReactor(copies_);
  }

  const bool copies_;
};

constexpr char kThisProgram[] = "/proc/self/exe";

/// Returns the text up to the next newline, or an empty string at the end of the file.
std::string ReadLine(int file) {
  std::string line;
  for (char c = 0; read(file, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

}  // namespace

absl::StatusOr<std::shared_ptr<ServedHead>> MakeNullHead(const Clock& clock, Metrics& metrics,
                                                         const NullHeadOptions& options) {
  return NullHead::Create(clock, metrics, options);
}

struct EchoServer::Impl {
  explicit Impl(bool copies) : service(copies) {}

  EchoService service;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer(bool copies) : impl_(std::make_unique<Impl>(copies)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &impl_->port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterCallbackGenericService(&impl_->service);
  impl_->server = builder.BuildAndStart();
}

EchoServer::~EchoServer() { impl_->server->Shutdown(); }

std::string EchoServer::address() const { return absl::StrCat("127.0.0.1:", impl_->port); }

absl::StatusOr<std::unique_ptr<ServerChild>> ServerChild::Start(const std::string& kind) {
  int input[2];
  int output[2];
  if (pipe2(input, O_CLOEXEC) != 0 || pipe2(output, O_CLOEXEC) != 0) {
    return absl::ErrnoToStatus(errno, "cannot create a pipe");
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
  std::string program = kThisProgram;
  std::string flag = "--serve";
  std::string value = kind;
  char* const arguments[] = {program.data(), flag.data(), value.data(), nullptr};
  pid_t pid = 0;
  const int error = posix_spawn(&pid, kThisProgram, &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(input[0]);
  close(output[1]);
  if (error != 0) {
    close(input[1]);
    close(output[0]);
    return absl::ErrnoToStatus(error, kThisProgram);
  }
  std::unique_ptr<ServerChild> child(new ServerChild(pid, input[1]));
  child->address_ = ReadLine(output[0]);
  close(output[0]);
  if (child->address_.empty()) {
    return absl::InternalError(absl::StrCat("the server ", kind, " did not start"));
  }
  return child;
}

ServerChild::~ServerChild() {
  close(input_);
  waitpid(pid_, nullptr, 0);
}

double ServerChild::CpuSeconds() const {
  clockid_t clock = 0;
  timespec time = {};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void ServeUntilClosed(const std::string& address) {
  std::cout << address << std::endl;
  ReadLine(STDIN_FILENO);
}

}  // namespace logprobd::testing
