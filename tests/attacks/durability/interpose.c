/* Kills the process before its n-th operation on a file, or lets that operation fail, wherever it comes from: Python,
 * Rust or C++.
 *
 *     cc -shared -fPIC -O1 -o interpose.so interpose.c -ldl        LD_PRELOAD=interpose.so …
 *
 * attack_arm(n, kind, lasting) counts from now on and strikes at operation n (0: only counts); attack_count() tells how
 * many there were. The kind is KILL, SHORT (a write takes half of its bytes), or the number of an error, such as EIO. A
 * lasting error comes back at every later operation, as on a disk that is full or broken. A disk or a quota that is
 * full refuses what needs space, and nothing else; a signal (EINTR) interrupts what may wait.
 *
 * Operations: write to a regular file, open for writing, fsync, truncate, rename, link, unlink, mkdir, rmdir.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = 0, SHORT = -1 };
enum { WRITES = 1, WAITS = 2, TAKES_SPACE = 4 };

static atomic_long counted = 0, place = 0;
static atomic_int armed = 0, struck = 0, kind = KILL, lasting = 0;

void attack_arm(long n, int what, int for_ever) {
    counted = 0; struck = 0; place = n; kind = what; lasting = for_ever; armed = 1;
}
long attack_count(void) { return counted; }
int attack_struck(void) { return struck; }

static int applies(int does) {
    if (kind == KILL) return 1;
    if (kind == SHORT) return does & WRITES;
    if (kind == EINTR) return does & WAITS;
    if (kind == ENOSPC || kind == EDQUOT) return does & TAKES_SPACE;
    return 1;
}

/* Return the errno with which an operation fails, SHORT for half a write, 0 for nothing. One that the kind does not apply
 * to passes the stroke on to the next. */
static int operation(int does) {
    if (!armed) return 0;
    long number = atomic_fetch_add(&counted, 1) + 1;
    if (!place || number < place || !applies(does) || (struck && !lasting)) return 0;
    struck = 1;
    if (kind == KILL) kill(getpid(), SIGKILL);
    return kind;
}

static int on_file(int fd) {
    struct stat status;
    return armed && fstat(fd, &status) == 0 && S_ISREG(status.st_mode) ? operation(WRITES | WAITS | TAKES_SPACE) : 0;
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__) = 0; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAILING(does) do { int e = operation(does); if (e > 0) { errno = e; return -1; } } while (0)
#define WRITING(fd, n) do { int e = on_file(fd); if (e > 0) { errno = e; return -1; } if (e == SHORT && n > 1) n /= 2; } while (0)

ssize_t write(int fd, const void *data, size_t n) { REAL(ssize_t, write, int, const void *, size_t); WRITING(fd, n); return real(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(ssize_t, writev, int, const struct iovec *, int); WRITING(fd, n); return real(fd, v, n); }
ssize_t pwrite(int fd, const void *d, size_t n, off_t o) { REAL(ssize_t, pwrite, int, const void *, size_t, off_t); WRITING(fd, n); return real(fd, d, n, o); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t o) { REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t); WRITING(fd, n); return real(fd, d, n, o); }
ssize_t sendfile(int to, int from, off_t *o, size_t n) { REAL(ssize_t, sendfile, int, int, off_t *, size_t); WRITING(to, n); return real(to, from, o, n); }
ssize_t sendfile64(int to, int from, off64_t *o, size_t n) { REAL(ssize_t, sendfile64, int, int, off64_t *, size_t); WRITING(to, n); return real(to, from, o, n); }
ssize_t copy_file_range(int f, off64_t *a, int to, off64_t *b, size_t n, unsigned g) { REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned); WRITING(to, n); return real(f, a, to, b, n, g); }
int fsync(int fd) { REAL(int, fsync, int); FAILING(WAITS | TAKES_SPACE); return real(fd); }
int fdatasync(int fd) { REAL(int, fdatasync, int); FAILING(WAITS | TAKES_SPACE); return real(fd); }
int ftruncate(int fd, off_t n) { REAL(int, ftruncate, int, off_t); FAILING(WAITS); return real(fd, n); }
int ftruncate64(int fd, off64_t n) { REAL(int, ftruncate64, int, off64_t); FAILING(WAITS); return real(fd, n); }
int rename(const char *a, const char *b) { REAL(int, rename, const char *, const char *); FAILING(TAKES_SPACE); return real(a, b); }
int renameat(int c, const char *a, int d, const char *b) { REAL(int, renameat, int, const char *, int, const char *); FAILING(TAKES_SPACE); return real(c, a, d, b); }
int renameat2(int c, const char *a, int d, const char *b, unsigned f) { REAL(int, renameat2, int, const char *, int, const char *, unsigned); FAILING(TAKES_SPACE); return real(c, a, d, b, f); }
int link(const char *a, const char *b) { REAL(int, link, const char *, const char *); FAILING(TAKES_SPACE); return real(a, b); }
int linkat(int c, const char *a, int d, const char *b, int f) { REAL(int, linkat, int, const char *, int, const char *, int); FAILING(TAKES_SPACE); return real(c, a, d, b, f); }
int unlink(const char *a) { REAL(int, unlink, const char *); FAILING(0); return real(a); }
int unlinkat(int d, const char *a, int f) { REAL(int, unlinkat, int, const char *, int); FAILING(0); return real(d, a, f); }
int rmdir(const char *a) { REAL(int, rmdir, const char *); FAILING(0); return real(a); }
int mkdir(const char *a, mode_t m) { REAL(int, mkdir, const char *, mode_t); FAILING(TAKES_SPACE); return real(a, m); }
int mkdirat(int d, const char *a, mode_t m) { REAL(int, mkdirat, int, const char *, mode_t); FAILING(TAKES_SPACE); return real(d, a, m); }

#define OPENING(flags) do { if (flags & (O_CREAT | O_TRUNC)) FAILING(WAITS | TAKES_SPACE); } while (0)

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

int open(const char *a, int flags, ...) {
    REAL(int, open, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    OPENING(flags);
    return real(a, flags, m);
}
int open64(const char *a, int flags, ...) {
    REAL(int, open64, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    OPENING(flags);
    return real(a, flags, m);
}
int openat(int d, const char *a, int flags, ...) {
    REAL(int, openat, int, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    OPENING(flags);
    return real(d, a, flags, m);
}
