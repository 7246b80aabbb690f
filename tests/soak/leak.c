// A leak on purpose: preloaded into a server, it leaks LEAK_BYTES (default: 4096) with every message
// that is sent on a socket. gRPC sends at least one per answer. Built and used by soak.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static size_t leak_bytes = 4096;
static ssize_t (*real_sendmsg)(int, const struct msghdr*, int);

__attribute__((constructor)) static void find_real(void) {
  const char* text = getenv("LEAK_BYTES");
  if (text != NULL) leak_bytes = strtoul(text, NULL, 10);
  *(void**)&real_sendmsg = dlsym(RTLD_NEXT, "sendmsg");
}

ssize_t sendmsg(int socket, const struct msghdr* message, int flags) {
  void* lost = malloc(leak_bytes);
  // Writing makes the block resident; the volatile pointer keeps the compiler from removing it.
  void* volatile kept = lost;
  if (kept != NULL) memset(kept, 1, leak_bytes);
  return real_sendmsg(socket, message, flags);
}
