/* Kills or interrupts the process before its n-th operation of a sort, or lets that operation fail, wherever it comes
 * from: Python, Rust or C++.
 *
 *     cc -shared -fPIC -O1 -o interpose.so interpose.c -ldl        LD_PRELOAD=interpose.so …
 *
 * attack_arm(sort, n, kind, lasting) counts from now on and strikes at operation n of that sort (0: only counts);
 * attack_count(sort) tells how many there were. The kind is the number of an error, such as EIO, or one of those below.
 * A lasting error comes back at every later operation of the sort, as on a disk that is full or broken. A disk or a
 * quota that is full refuses what needs space, and nothing else; a signal (EINTR) interrupts what may wait.
 *
 * What is read, looked at or closed counts in the folder OUTRIDER_ATTACK alone: Python reads its own modules.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { KILL = 0, SHORT = -1, TERM = -2, INT = -3, STOP = -4 };
/* CHANGES are writes to a regular file, open for writing, fsync, truncate, rename, link, unlink, mkdir, rmdir, chmod. */
enum { CHANGES, SPACE, WAITS, WRITES, READS, OPENS, LOOKS, MAPS, CLOSES, LOCKS, CLOCK, SORTS };

static atomic_long counted[SORTS], place = 0;
static atomic_int armed = 0, struck = 0, sort = CHANGES, kind = KILL, lasting = 0;

void attack_arm(int which, long n, int what, int for_ever) {
    for (int i = 0; i < SORTS; i++) counted[i] = 0;
    struck = 0; place = n; sort = which; kind = what; lasting = for_ever; armed = 1;
}
long attack_count(int which) { return counted[which]; }
int attack_struck(void) { return struck; }

/* Return the errno with which an operation of a sort fails, SHORT for half of it, 0 for nothing. */
static int operation(int which) {
    if (!armed) return 0;
    long number = atomic_fetch_add(&counted[which], 1) + 1;
    if (which != sort || !place || number < place || (struck && !lasting)) return 0;
    struck = 1;
    if (kind > 0 || kind == SHORT) return kind;
    if (kind == STOP) raise(SIGSTOP);
    else if (kind == KILL) kill(getpid(), SIGKILL);
    else kill(getpid(), kind == TERM ? SIGTERM : SIGINT);
    return 0;
}

/* Return the same of a change, which is of other sorts, too (bits). */
static int change(int does) {
    int failing = operation(CHANGES);
    for (int which = SPACE; which <= WRITES; which++)
        if (does & 1 << which) { int e = operation(which); failing = failing ? failing : e; }
    return failing;
}

static int on_file(int fd) {
    struct stat status;
    return armed && fstat(fd, &status) == 0 && S_ISREG(status.st_mode) ? change(1 << WRITES | 1 << WAITS | 1 << SPACE) : 0;
}

static int inside(const char *name) {
    const char *root = getenv("OUTRIDER_ATTACK");
    return armed && root && name && strncmp(name, root, strlen(root)) == 0;
}

static int is_inside(int fd) {
    char link[32], name[4096];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0) return 0;
    name[length] = 0;
    return inside(name);
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__) = 0; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAILING(does) do { int e = change(does); if (e > 0) { errno = e; return -1; } } while (0)
#define REFUSING(which, applies, failed) do { int e = applies ? operation(which) : 0; if (e > 0) { errno = e; return failed; } } while (0)
#define READING(fd, n) do { int e = is_inside(fd) ? operation(READS) : 0; if (e > 0) { errno = e; return -1; } if (e == SHORT && n > 1) n /= 2; } while (0)
#define WRITING(fd, n) do { int e = on_file(fd); if (e > 0) { errno = e; return -1; } if (e == SHORT && n > 1) n /= 2; } while (0)

ssize_t write(int fd, const void *data, size_t n) { REAL(ssize_t, write, int, const void *, size_t); WRITING(fd, n); return real(fd, data, n); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(ssize_t, writev, int, const struct iovec *, int); WRITING(fd, n); return real(fd, v, n); }
ssize_t pwrite(int fd, const void *d, size_t n, off_t o) { REAL(ssize_t, pwrite, int, const void *, size_t, off_t); WRITING(fd, n); return real(fd, d, n, o); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t o) { REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t); WRITING(fd, n); return real(fd, d, n, o); }
ssize_t sendfile(int to, int from, off_t *o, size_t n) { REAL(ssize_t, sendfile, int, int, off_t *, size_t); WRITING(to, n); return real(to, from, o, n); }
ssize_t sendfile64(int to, int from, off64_t *o, size_t n) { REAL(ssize_t, sendfile64, int, int, off64_t *, size_t); WRITING(to, n); return real(to, from, o, n); }
ssize_t copy_file_range(int f, off64_t *a, int to, off64_t *b, size_t n, unsigned g) { REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned); WRITING(to, n); return real(f, a, to, b, n, g); }
int fsync(int fd) { REAL(int, fsync, int); FAILING(1 << WAITS | 1 << SPACE); return real(fd); }
int fdatasync(int fd) { REAL(int, fdatasync, int); FAILING(1 << WAITS | 1 << SPACE); return real(fd); }
int ftruncate(int fd, off_t n) { REAL(int, ftruncate, int, off_t); FAILING(1 << WAITS); return real(fd, n); }
int ftruncate64(int fd, off64_t n) { REAL(int, ftruncate64, int, off64_t); FAILING(1 << WAITS); return real(fd, n); }
int rename(const char *a, const char *b) { REAL(int, rename, const char *, const char *); FAILING(1 << SPACE); return real(a, b); }
int renameat(int c, const char *a, int d, const char *b) { REAL(int, renameat, int, const char *, int, const char *); FAILING(1 << SPACE); return real(c, a, d, b); }
int renameat2(int c, const char *a, int d, const char *b, unsigned f) { REAL(int, renameat2, int, const char *, int, const char *, unsigned); FAILING(1 << SPACE); return real(c, a, d, b, f); }
int link(const char *a, const char *b) { REAL(int, link, const char *, const char *); FAILING(1 << SPACE); return real(a, b); }
int linkat(int c, const char *a, int d, const char *b, int f) { REAL(int, linkat, int, const char *, int, const char *, int); FAILING(1 << SPACE); return real(c, a, d, b, f); }
int unlink(const char *a) { REAL(int, unlink, const char *); FAILING(0); return real(a); }
int unlinkat(int d, const char *a, int f) { REAL(int, unlinkat, int, const char *, int); FAILING(0); return real(d, a, f); }
int rmdir(const char *a) { REAL(int, rmdir, const char *); FAILING(0); return real(a); }
int mkdir(const char *a, mode_t m) { REAL(int, mkdir, const char *, mode_t); FAILING(1 << SPACE); return real(a, m); }
int mkdirat(int d, const char *a, mode_t m) { REAL(int, mkdirat, int, const char *, mode_t); FAILING(1 << SPACE); return real(d, a, m); }

#define OPENING(flags, applies) do { if (flags & (O_CREAT | O_TRUNC)) FAILING(1 << WAITS | 1 << SPACE); else REFUSING(OPENS, applies, -1); } while (0)

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

int open(const char *a, int flags, ...) {
    REAL(int, open, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    OPENING(flags, inside(a));
    return real(a, flags, m);
}
int open64(const char *a, int flags, ...) {
    REAL(int, open64, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    OPENING(flags, inside(a));
    return real(a, flags, m);
}
int openat(int d, const char *a, int flags, ...) {
    REAL(int, openat, int, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    OPENING(flags, inside(a) || (a[0] != '/' && is_inside(d)));
    return real(d, a, flags, m);
}
int openat64(int d, const char *a, int flags, ...) {
    REAL(int, openat64, int, const char *, int, ...);
    va_list rest; va_start(rest, flags); mode_t m = mode_of(flags, rest); va_end(rest);
    OPENING(flags, inside(a) || (a[0] != '/' && is_inside(d)));
    return real(d, a, flags, m);
}
int chmod(const char *a, mode_t m) { REAL(int, chmod, const char *, mode_t); FAILING(0); return real(a, m); }

ssize_t read(int fd, void *data, size_t n) { REAL(ssize_t, read, int, void *, size_t); READING(fd, n); return real(fd, data, n); }
ssize_t pread64(int fd, void *d, size_t n, off64_t o) { REAL(ssize_t, pread64, int, void *, size_t, off64_t); READING(fd, n); return real(fd, d, n, o); }
int stat64(const char *a, struct stat64 *s) { REAL(int, stat64, const char *, struct stat64 *); REFUSING(LOOKS, inside(a), -1); return real(a, s); }
int lstat64(const char *a, struct stat64 *s) { REAL(int, lstat64, const char *, struct stat64 *); REFUSING(LOOKS, inside(a), -1); return real(a, s); }
DIR *opendir(const char *a) { REAL(DIR *, opendir, const char *); REFUSING(LOOKS, inside(a), 0); return real(a); }
struct dirent64 *readdir64(DIR *d) { REAL(struct dirent64 *, readdir64, DIR *); REFUSING(LOOKS, is_inside(dirfd(d)), 0); return real(d); }
void *mmap64(void *a, size_t n, int p, int f, int fd, off64_t o) { REAL(void *, mmap64, void *, size_t, int, int, int, off64_t); REFUSING(MAPS, fd >= 0 && is_inside(fd), MAP_FAILED); return real(a, n, p, f, fd, o); }
void *mmap(void *a, size_t n, int p, int f, int fd, off_t o) { return mmap64(a, n, p, f, fd, o); }
int flock(int fd, int how) { REAL(int, flock, int, int); REFUSING(LOCKS, is_inside(fd), -1); return real(fd, how); }
/* The descriptor is gone all the same, as on Linux. */
int close(int fd) { REAL(int, close, int); int e = is_inside(fd) ? operation(CLOSES) : 0, code = real(fd); if (e > 0) { errno = e; return -1; } return code; }
/* Any error sets the clock back by a day, from then on if it lasts. */
int clock_gettime(clockid_t id, struct timespec *t) {
    REAL(int, clock_gettime, clockid_t, struct timespec *);
    int code = real(id, t);
    if (id == CLOCK_REALTIME && operation(CLOCK) > 0) t->tv_sec -= 86400;
    return code;
}
