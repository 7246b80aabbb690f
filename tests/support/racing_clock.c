// Preloaded into a process by tests: its monotonic clock runs RACING_CLOCK times as fast as the
// real one, so that a test need not wait for what happens within minutes. Sleeps last as long as
// ever.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int64_t kSecondNs = 1000000000;
static int64_t rate;
static int64_t start_ns;

static int64_t RealNs(clockid_t clock) {
  struct timespec now;
  syscall(SYS_clock_gettime, clock, &now);
  return now.tv_sec * kSecondNs + now.tv_nsec;
}

__attribute__((constructor)) static void Start(void) {
  const char* text = getenv("RACING_CLOCK");
  rate = text == NULL ? 0 : atoi(text);
  if (rate < 1) abort();  // the test would prove nothing
  start_ns = RealNs(CLOCK_MONOTONIC);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  if (clock != CLOCK_MONOTONIC || rate == 0) {
    return (int)syscall(SYS_clock_gettime, clock, now);
  }
  const int64_t raced_ns = start_ns + (RealNs(clock) - start_ns) * rate;
  now->tv_sec = raced_ns / kSecondNs;
  now->tv_nsec = raced_ns % kSecondNs;
  return 0;
}
