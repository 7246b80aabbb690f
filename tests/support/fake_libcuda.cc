// Replaces libcuda.so.1 in tests without a GPU. Its "device" memory is the heap, and the IPC handle
// of an allocation contains its address. Copies are made when the context is synchronized, as late
// as a driver may make them.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr uint64_t kMemoryBytes = uint64_t{1} << 30;
int context = 0;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
std::mutex mutex;
std::vector<Copy> copies;

void CopyLater(void* to, const void* from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  copies.push_back({to, from, bytes});
}

void* At(uint64_t address) { return reinterpret_cast<void*>(address); }  // NOLINT

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : kInvalidDevice;
}
int cuDeviceGetUuid_v2(void* uuid, int) {
  std::memset(uuid, 7, 16);
  return 0;
}
int cuDevicePrimaryCtxRetain(void** made, int) {
  *made = &context;
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxSynchronize() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  copies.clear();
  return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (bytes > kMemoryBytes) return kOutOfMemory;
  *address = reinterpret_cast<uint64_t>(std::malloc(bytes));
  return 0;
}
int cuMemFree_v2(uint64_t address) {
  std::free(At(address));
  return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  CopyLater(At(to), from, bytes);
  return 0;
}
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) {
  CopyLater(At(to), At(from), bytes);
  return 0;
}
int cuIpcGetMemHandle(void* handle, uint64_t address) {
  std::memset(handle, 0, 64);
  std::memcpy(handle, &address, sizeof(address));
  return 0;
}
int cuGetErrorName(int error, const char** name) {
  *name = error == kOutOfMemory     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kInvalidDevice ? "CUDA_ERROR_INVALID_DEVICE"
                                    : "CUDA_ERROR_UNKNOWN";
  return 0;
}

}  // extern "C"
