/* Makes a system call of a process fail, for tests: preloaded (LD_PRELOAD) and set up by `fault_arm`.

   Of the calls of one kind on files whose path matches a pattern (fnmatch(3), where `*` also takes `/`), the `nth` and
   the `count` - 1 after it do what `action` says: "error" (fail with errno `value`), "signal" (send `value` to this
   process, then go on) or "truncate", "remove" or "rewrite" the file (then go on). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char wanted[32], pattern[PATH_MAX], action[32];
static int nth, count, value, seen, armed;
static long long jump;
static int *hits; /* shared with the process that forks */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void fault_arm(const char *call, const char *path, const char *what, int number, int from, int times) {
    strncpy(wanted, call, sizeof wanted - 1);
    strncpy(pattern, path, sizeof pattern - 1);
    strncpy(action, what, sizeof action - 1);
    value = number, nth = from, count = times, seen = 0, armed = 1;
}

__attribute__((constructor)) static void share(void) {
    hits = mmap(NULL, sizeof *hits, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void fault_reset(void) { *hits = 0; }

int fault_hits(void) { return *hits; }

void fault_clock(long long seconds) { jump = seconds; }

static int fails(const char *call, const char *path) {
    if (!armed || strcmp(call, wanted) || fnmatch(pattern, path, 0))
        return 0;
    int at = __sync_add_and_fetch(&seen, 1);
    if (at < nth || at >= nth + count)
        return 0;
    __sync_add_and_fetch(hits, 1);
    if (!strcmp(action, "error")) {
        errno = value;
        return 1;
    }
    int before = armed;
    armed = 0;
    if (!strcmp(action, "signal"))
        kill(getpid(), value);
    else if (!strcmp(action, "remove"))
        unlink(path);
    else if (!strcmp(action, "truncate"))
        (void)!truncate(path, 0);
    else if (!strcmp(action, "rewrite")) {
        int file = REAL(open64)(path, O_WRONLY);
        off_t size = lseek(file, 0, SEEK_END);
        (void)!REAL(pwrite64)(file, "rewritten", 9, size - 9);
        close(file);
    }
    armed = before;
    return 0;
}

static int fails_fd(const char *call, int fd) {
    if (!armed || strcmp(call, wanted))
        return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(call, path);
}

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    if (fails(flags & O_CREAT ? "create" : "open", path))
        return -1;
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); \
    mode = va_arg(more, mode_t); va_end(more); }
int open(const char *path, int flags, ...) { MODE return opened("open", path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened("open64", path, flags, mode); }

#define BY_FD(kind, type, name, parameters, arguments) \
    type name parameters { return fails_fd(kind, fd) ? -1 : REAL(name) arguments; }
BY_FD("read", ssize_t, read, (int fd, void *b, size_t n), (fd, b, n))
BY_FD("read", ssize_t, pread64, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
BY_FD("read", ssize_t, preadv64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
BY_FD("read", ssize_t, preadv64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
BY_FD("write", ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n))
BY_FD("write", ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o))
BY_FD("fsync", int, fsync, (int fd), (fd))
BY_FD("truncate", int, ftruncate64, (int fd, off64_t n), (fd, n))

int rename(const char *from, const char *to) { return fails("rename", from) ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return fails("unlink", path) ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails("mkdir", path) ? -1 : REAL(mkdir)(path, mode); }

int clock_gettime(clockid_t clock, struct timespec *found) {
    int failed = REAL(clock_gettime)(clock, found);
    if (!failed && clock == CLOCK_REALTIME && jump)
        found->tv_sec += (jump = -jump); /* forwards and back, at every look */
    return failed;
}
