// Tells the thread sanitizer what absl::Mutex and absl::Notification do. The distribution's Abseil
// is not built with the sanitizer, which would report every pair of accesses under a Mutex as a
// race. The linker redirects calls of the Mutex methods to the wrappers in this file (--wrap, see
// CMakeLists.txt).
//
// Each unlock releases the mutex's address, and each lock acquires it. The thread that unlocks
// evaluates conditions inside the unlock, after the release, so the sanitizer must ignore these
// reads.

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

extern "C" {
void __tsan_acquire(void* address);                         // NOLINT: names of the sanitizer
void __tsan_release(void* address);                         // NOLINT
void AnnotateIgnoreReadsBegin(const char* file, int line);  // NOLINT
void AnnotateIgnoreReadsEnd(const char* file, int line);    // NOLINT
}

// LOGPROBD_ABSL_NAMESPACE is the mangled name of Abseil's inline namespace.
#define LOGPROBD_MUTEX(kind, method) \
  asm("__" kind "__ZN4absl" LOGPROBD_ABSL_NAMESPACE "5Mutex" method)

namespace logprobd::testing {

using absl::Condition;
using absl::Duration;
using absl::Mutex;

// The deadlock detector keeps a global graph in code without the sanitizer, which would report
// races in it.
const bool kIgnoresCycles = [] {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return true;
}();

void RealLock(Mutex* mutex) LOGPROBD_MUTEX("real", "4LockEv");
void RealUnlock(Mutex* mutex) LOGPROBD_MUTEX("real", "6UnlockEv");
void RealReaderLock(Mutex* mutex) LOGPROBD_MUTEX("real", "10ReaderLockEv");
void RealReaderUnlock(Mutex* mutex) LOGPROBD_MUTEX("real", "12ReaderUnlockEv");
bool RealTryLock(Mutex* mutex) LOGPROBD_MUTEX("real", "7TryLockEv");
void RealAwait(Mutex* mutex, const Condition& condition)
    LOGPROBD_MUTEX("real", "5AwaitERKNS0_9ConditionE");
void RealLockWhen(Mutex* mutex, const Condition& condition)
    LOGPROBD_MUTEX("real", "8LockWhenERKNS0_9ConditionE");
bool RealAwaitWithTimeout(Mutex* mutex, const Condition& condition, Duration timeout)
    LOGPROBD_MUTEX("real", "16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");

/// Makes the sanitizer ignore the reads of this thread during its lifetime.
struct IgnoreReads {
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

void WrapLock(Mutex* mutex) LOGPROBD_MUTEX("wrap", "4LockEv");
void WrapUnlock(Mutex* mutex) LOGPROBD_MUTEX("wrap", "6UnlockEv");
void WrapReaderLock(Mutex* mutex) LOGPROBD_MUTEX("wrap", "10ReaderLockEv");
void WrapReaderUnlock(Mutex* mutex) LOGPROBD_MUTEX("wrap", "12ReaderUnlockEv");
bool WrapTryLock(Mutex* mutex) LOGPROBD_MUTEX("wrap", "7TryLockEv");
void WrapAwait(Mutex* mutex, const Condition& condition)
    LOGPROBD_MUTEX("wrap", "5AwaitERKNS0_9ConditionE");
void WrapLockWhen(Mutex* mutex, const Condition& condition)
    LOGPROBD_MUTEX("wrap", "8LockWhenERKNS0_9ConditionE");
bool WrapAwaitWithTimeout(Mutex* mutex, const Condition& condition, Duration timeout)
    LOGPROBD_MUTEX("wrap", "16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");

void WrapLock(Mutex* mutex) {
  RealLock(mutex);
  __tsan_acquire(mutex);
}

void WrapUnlock(Mutex* mutex) {
  __tsan_release(mutex);
  const IgnoreReads ignore;
  RealUnlock(mutex);
}

void WrapReaderLock(Mutex* mutex) {
  RealReaderLock(mutex);
  __tsan_acquire(mutex);
}

void WrapReaderUnlock(Mutex* mutex) {
  __tsan_release(mutex);
  const IgnoreReads ignore;
  RealReaderUnlock(mutex);
}

bool WrapTryLock(Mutex* mutex) {
  const bool is_locked = RealTryLock(mutex);
  if (is_locked) {
    __tsan_acquire(mutex);
  }
  return is_locked;
}

void WrapAwait(Mutex* mutex, const Condition& condition) {
  __tsan_release(mutex);
  {
    const IgnoreReads ignore;
    RealAwait(mutex, condition);
  }
  __tsan_acquire(mutex);
}

void WrapLockWhen(Mutex* mutex, const Condition& condition) {
  {
    const IgnoreReads ignore;
    RealLockWhen(mutex, condition);
  }
  __tsan_acquire(mutex);
}

bool WrapAwaitWithTimeout(Mutex* mutex, const Condition& condition, Duration timeout) {
  __tsan_release(mutex);
  bool holds = false;
  {
    const IgnoreReads ignore;
    holds = RealAwaitWithTimeout(mutex, condition, timeout);
  }
  __tsan_acquire(mutex);
  return holds;
}

void RealNotify(absl::Notification* notification) asm("__real__ZN4absl" LOGPROBD_ABSL_NAMESPACE
                                                      "12Notification6NotifyEv");
void RealWait(const absl::Notification* notification) asm("__real__ZNK4absl" LOGPROBD_ABSL_NAMESPACE
                                                          "12Notification19WaitForNotificationEv");
bool RealWaitWithTimeout(const absl::Notification* notification, Duration timeout) asm(
    "__real__ZNK4absl" LOGPROBD_ABSL_NAMESPACE
    "12Notification30WaitForNotificationWithTimeoutENS0_8DurationE");
void WrapNotify(absl::Notification* notification) asm("__wrap__ZN4absl" LOGPROBD_ABSL_NAMESPACE
                                                      "12Notification6NotifyEv");
void WrapWait(const absl::Notification* notification) asm("__wrap__ZNK4absl" LOGPROBD_ABSL_NAMESPACE
                                                          "12Notification19WaitForNotificationEv");

bool WrapWaitWithTimeout(const absl::Notification* notification, Duration timeout) asm(
    "__wrap__ZNK4absl" LOGPROBD_ABSL_NAMESPACE
    "12Notification30WaitForNotificationWithTimeoutENS0_8DurationE");

void WrapNotify(absl::Notification* notification) {
  __tsan_release(notification);
  RealNotify(notification);
}

void WrapWait(const absl::Notification* notification) {
  RealWait(notification);
  __tsan_acquire(const_cast<absl::Notification*>(notification));
}

bool WrapWaitWithTimeout(const absl::Notification* notification, Duration timeout) {
  const bool is_notified = RealWaitWithTimeout(notification, timeout);
  if (is_notified) {
    __tsan_acquire(const_cast<absl::Notification*>(notification));
  }
  return is_notified;
}

}  // namespace logprobd::testing
