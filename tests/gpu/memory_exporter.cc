#include "tests/gpu/memory_exporter.h"

#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <vector>

#include "server/base/errors.h"

namespace logprobd::testing {
namespace {

/// A request over the pipe; `num_bytes` bytes of data follow it.
struct Request {
  bool is_free = false;
  int32_t gpu = 0;
  int64_t allocation_bytes = 0;
  int64_t offset = 0;
  int64_t num_bytes = 0;
};

struct Reply {
  bool is_ok = false;
  DeviceSlice slice;
};

bool ReadAll(int file, void* data, size_t size) {
  auto* out = static_cast<std::byte*>(data);
  while (size > 0) {
    const ssize_t count = read(file, out, size);
    if (count <= 0) return false;
    out += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

bool WriteAll(int file, const void* data, size_t size) {
  const auto* in = static_cast<const std::byte*>(data);
  while (size > 0) {
    const ssize_t count = write(file, in, size);
    if (count <= 0) return false;
    in += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

Reply Allocate(const Request& request, const std::vector<std::byte>& bytes, void*& memory) {
  Reply reply;
  cudaDeviceProp properties{};
  cudaIpcMemHandle_t handle{};
  if (cudaSetDevice(request.gpu) != cudaSuccess ||
      cudaGetDeviceProperties(&properties, request.gpu) != cudaSuccess ||
      cudaMalloc(&memory, static_cast<size_t>(request.allocation_bytes)) != cudaSuccess ||
      cudaMemcpy(static_cast<std::byte*>(memory) + request.offset, bytes.data(), bytes.size(),
                 cudaMemcpyHostToDevice) != cudaSuccess ||
      cudaDeviceSynchronize() != cudaSuccess ||
      cudaIpcGetMemHandle(&handle, memory) != cudaSuccess) {
    return reply;
  }
  std::memcpy(reply.slice.device_uuid.data(), properties.uuid.bytes, 16);
  std::memcpy(reply.slice.handle.data(), &handle, sizeof(handle));
  reply.slice.offset = request.offset;
  reply.slice.bytes = request.num_bytes;
  reply.is_ok = true;
  return reply;
}

}  // namespace

int RunMemoryExporter() {
  void* memory = nullptr;
  Request request;
  while (ReadAll(STDIN_FILENO, &request, sizeof(request))) {
    std::vector<std::byte> bytes(static_cast<size_t>(request.num_bytes));
    if (!ReadAll(STDIN_FILENO, bytes.data(), bytes.size())) return 1;
    Reply reply;
    if (request.is_free) {
      reply.is_ok = cudaFree(memory) == cudaSuccess;
    } else {
      reply = Allocate(request, bytes, memory);
    }
    if (!WriteAll(STDOUT_FILENO, &reply, sizeof(reply))) return 1;
  }
  return 0;
}

MemoryExporter::MemoryExporter() {
  int requests[2] = {};
  int replies[2] = {};
  LOGPROBD_CHECK(pipe(requests) == 0 && pipe(replies) == 0);
  process_ = fork();
  LOGPROBD_CHECK(process_ >= 0);
  if (process_ == 0) {
    dup2(requests[0], STDIN_FILENO);
    dup2(replies[1], STDOUT_FILENO);
    for (const int file : {requests[0], requests[1], replies[0], replies[1]}) close(file);
    execl("/proc/self/exe", "memory_exporter", kExporterArgument, nullptr);
    _exit(1);
  }
  close(requests[0]);
  close(replies[1]);
  to_ = requests[1];
  from_ = replies[0];
}

MemoryExporter::~MemoryExporter() {
  close(to_);  // ends the loop of the process
  close(from_);
  if (process_ > 0) waitpid(process_, nullptr, 0);
}

std::optional<DeviceSlice> MemoryExporter::Export(int32_t gpu, int64_t allocation_bytes,
                                                  int64_t offset,
                                                  absl::Span<const std::byte> bytes) {
  const Request request{.gpu = gpu,
                        .allocation_bytes = allocation_bytes,
                        .offset = offset,
                        .num_bytes = static_cast<int64_t>(bytes.size())};
  Reply reply;
  LOGPROBD_CHECK(WriteAll(to_, &request, sizeof(request)) &&
                 WriteAll(to_, bytes.data(), bytes.size()) &&
                 ReadAll(from_, &reply, sizeof(reply)));
  return reply.is_ok ? std::optional(reply.slice) : std::nullopt;
}

void MemoryExporter::Free() {
  const Request request{.is_free = true};
  Reply reply;
  LOGPROBD_CHECK(WriteAll(to_, &request, sizeof(request)) &&
                 ReadAll(from_, &reply, sizeof(reply)) && reply.is_ok);
}

void MemoryExporter::Kill() {
  kill(process_, SIGKILL);
  waitpid(process_, nullptr, 0);
  process_ = -1;
}

}  // namespace logprobd::testing
