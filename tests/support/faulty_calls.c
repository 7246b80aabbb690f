// Preloaded into a process by tests: while the byte in the file FAULTY_SWITCH is not zero, the calls of the
// function FAULTY_CALL on the thread FAULTY_THREAD (on all threads, if it is not set) set errno to
// FAULTY_ERRNO and fail, or, if that is not set, never return and keep the locks of their thread, as calls of
// a driver that hangs do. FAULTY_CALL is clock_gettime, preadv, fallocate or, unless this is built with
// NO_DRIVER_CALLS, cuEventQuery.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const volatile char* is_on;
static const char* faulty_call;
static const char* faulty_thread;
static int faulty_errno;

__attribute__((constructor)) static void MapSwitch(void) {
  const char* path = getenv("FAULTY_SWITCH");
  const int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  faulty_call = getenv("FAULTY_CALL");
  faulty_thread = getenv("FAULTY_THREAD");
  if (file < 0 || faulty_call == NULL) abort();  // the test would prove nothing
  if (getenv("FAULTY_ERRNO") != NULL) faulty_errno = atoi(getenv("FAULTY_ERRNO"));
  void* memory = mmap(NULL, 1, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) abort();
  is_on = memory;
}

// Returns true if the call must fail, and does not return if it must hang.
static bool IsFaulty(const char* call) {
  if (is_on == NULL || *is_on == 0 || strcmp(call, faulty_call) != 0) return false;
  char thread[16] = "";
  prctl(PR_GET_NAME, thread);
  if (faulty_thread != NULL && strcmp(thread, faulty_thread) != 0) return false;
  while (faulty_errno == 0) pause();
  errno = faulty_errno;
  return true;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  return IsFaulty("clock_gettime") ? -1 : (int)syscall(SYS_clock_gettime, clock, now);
}

ssize_t preadv(int file, const struct iovec* pieces, int num_pieces, off_t offset) {
  return IsFaulty("preadv") ? -1 : syscall(SYS_preadv, file, pieces, num_pieces, offset, 0L);
}

int fallocate(int file, int mode, off_t offset, off_t bytes) {
  return IsFaulty("fallocate") ? -1 : (int)syscall(SYS_fallocate, file, mode, offset, bytes);
}

#ifndef NO_DRIVER_CALLS
// CUDA's runtime is linked into the server. It takes the driver's functions from dlsym, and from
// cuGetProcAddress, which it takes from dlsym and then, in the version that it prefers, from itself.
static int (*real_event_query)(void* event);
static int (*real_get_proc_address)(const char*, void**, int, uint64_t, void*);

static int EventQuery(void* event) {
  (void)IsFaulty("cuEventQuery");
  return real_event_query(event);
}

static int GetProcAddress(const char* symbol, void** function, int version, uint64_t flags, void* status);

// Returns the function that the caller gets in place of `found`.
static void* Replaced(const char* symbol, void* found) {
  if (found == NULL) return NULL;
  if (strcmp(symbol, "cuEventQuery") == 0) {
    real_event_query = (int (*)(void*))found;
    return (void*)EventQuery;
  }
  if (strcmp(symbol, "cuGetProcAddress_v2") == 0) {
    real_get_proc_address = (int (*)(const char*, void**, int, uint64_t, void*))found;
    return (void*)GetProcAddress;
  }
  return found;
}

static int GetProcAddress(const char* symbol, void** function, int version, uint64_t flags, void* status) {
  const int result = real_get_proc_address(symbol, function, version, flags, status);
  if (result == 0) {
    // From version 12.0 on this name means the function with five parameters.
    const bool is_itself = strcmp(symbol, "cuGetProcAddress") == 0 && version >= 12000;
    *function = Replaced(is_itself ? "cuGetProcAddress_v2" : symbol, *function);
  }
  return result;
}

void* dlsym(void* restrict library, const char* restrict symbol) {
  static void* (*real_dlsym)(void*, const char*);
  if (real_dlsym == NULL) {
    real_dlsym = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  }
  return Replaced(symbol, real_dlsym(library, symbol));
}
#endif
