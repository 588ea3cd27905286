/* Kills the process before its n-th operation on a file, wherever it comes from: Python, Rust or C++.
 *
 *     cc -shared -fPIC -O1 -o interpose.so interpose.c -ldl        LD_PRELOAD=interpose.so …
 *
 * attack_arm(n) counts from now on and kills before operation n (0: only counts); attack_count() tells how many there
 * were. Operations: write to a regular file, open for writing, fsync, truncate, rename, unlink, mkdir, rmdir.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long counted = 0, fatal = 0;
static atomic_int armed = 0;

void attack_arm(long n) { counted = 0; fatal = n; armed = 1; }
long attack_count(void) { return counted; }

static void operation(void) {
    if (!armed) return;
    if (atomic_fetch_add(&counted, 1) + 1 == fatal) kill(getpid(), SIGKILL);
}

static void on_file(int fd) {
    struct stat status;
    if (armed && fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) operation();
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__) = 0; if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t n) { REAL(ssize_t, write, int, const void *, size_t); on_file(fd); return real(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(ssize_t, writev, int, const struct iovec *, int); on_file(fd); return real(fd, v, n); }
ssize_t pwrite(int fd, const void *d, size_t n, off_t o) { REAL(ssize_t, pwrite, int, const void *, size_t, off_t); on_file(fd); return real(fd, d, n, o); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t o) { REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t); on_file(fd); return real(fd, d, n, o); }
int fsync(int fd) { REAL(int, fsync, int); operation(); return real(fd); }
int fdatasync(int fd) { REAL(int, fdatasync, int); operation(); return real(fd); }
int ftruncate(int fd, off_t n) { REAL(int, ftruncate, int, off_t); operation(); return real(fd, n); }
int ftruncate64(int fd, off64_t n) { REAL(int, ftruncate64, int, off64_t); operation(); return real(fd, n); }
int rename(const char *a, const char *b) { REAL(int, rename, const char *, const char *); operation(); return real(a, b); }
int renameat(int c, const char *a, int d, const char *b) { REAL(int, renameat, int, const char *, int, const char *); operation(); return real(c, a, d, b); }
int renameat2(int c, const char *a, int d, const char *b, unsigned f) { REAL(int, renameat2, int, const char *, int, const char *, unsigned); operation(); return real(c, a, d, b, f); }
int unlink(const char *a) { REAL(int, unlink, const char *); operation(); return real(a); }
int unlinkat(int d, const char *a, int f) { REAL(int, unlinkat, int, const char *, int); operation(); return real(d, a, f); }
int rmdir(const char *a) { REAL(int, rmdir, const char *); operation(); return real(a); }
int mkdir(const char *a, mode_t m) { REAL(int, mkdir, const char *, mode_t); operation(); return real(a, m); }
int mkdirat(int d, const char *a, mode_t m) { REAL(int, mkdirat, int, const char *, mode_t); operation(); return real(d, a, m); }

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }
static void opening(int flags) { if (flags & (O_CREAT | O_TRUNC)) operation(); }

int open(const char *a, int flags, ...) {
    REAL(int, open, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    opening(flags);
    return real(a, flags, m);
}
int open64(const char *a, int flags, ...) {
    REAL(int, open64, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    opening(flags);
    return real(a, flags, m);
}
int openat(int d, const char *a, int flags, ...) {
    REAL(int, openat, int, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    opening(flags);
    return real(d, a, flags, m);
}
