/* Counts, records and fails the system calls of this process below one directory.
 *
 * Preloaded (LD_PRELOAD) into Python. `faults_watch` starts: from then on every call on a path below `root` gets a
 * number, from 0. Calls `first` to `first + count - 1` fail with `error` and do nothing. `faults_stop` ends it and
 * returns the number of calls. Each call is a line in the file `trace`:
 *
 *     CALL \t RESULT \t PATH \t OTHER \t OFFSET \t LENGTH
 *
 * RESULT is 0, or the errno of a call that failed. OTHER is the second path of a rename or link, `create` or `truncate`
 * for an open that made or emptied its file. The bytes of a write are appended to the file `data`; OFFSET is their place
 * in the written file.
 *
 * A lock is held from the call until its line is written, so that lines are in the order of the calls.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 65536
#define REAL(name) ((__typeof__(&name))real(#name))

static char root[PATH_MAX];
static size_t root_length; /* 0: nothing is watched */
static char *paths[FILES]; /* of open files below root, by descriptor */
static char names[1 << 26]; /* these paths: none is freed while root is watched, since threads read them without the lock */
static size_t names_length;
static long calls, first_failure, failures;
static int failure, trace = -1, data = -1;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

void faults_watch(const char *directory, const char *trace_file, const char *data_file, long first, long count, int error) {
  pthread_mutex_lock(&lock);
  snprintf(root, sizeof root, "%s", directory);
  root_length = strlen(root);
  memset(paths, 0, sizeof paths);
  names_length = 0;
  calls = 0;
  first_failure = first;
  failures = count;
  failure = error;
  trace = REAL(open)(trace_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  data = REAL(open)(data_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  pthread_mutex_unlock(&lock);
}

long faults_calls(void) { return calls; }

long faults_stop(void) {
  pthread_mutex_lock(&lock);
  root_length = 0;
  REAL(close)(trace);
  REAL(close)(data);
  pthread_mutex_unlock(&lock);
  return calls;
}

/* Whether `path` is root or below it. */
static int below(const char *path) {
  return root_length && path && !strncmp(path, root, root_length) && (!path[root_length] || path[root_length] == '/');
}

/* The path that `path` means relative to the directory `dirfd`, in `buffer`; NULL if it is not below root. */
static const char *absolute(int dirfd, const char *path, char *buffer) {
  if (!root_length || !path) return NULL;
  if (path[0] == '/' || dirfd < 0 || dirfd >= FILES || !paths[dirfd]) return below(path) ? path : NULL;
  snprintf(buffer, PATH_MAX, *path ? "%s/%s" : "%s%s", paths[dirfd], path);
  return buffer;
}

static const char *path_of(int fd) { return root_length && fd >= 0 && fd < FILES && below(paths[fd]) ? paths[fd] : NULL; }

static void record(const char *call, int result, const char *path, const char *other, long offset, long length) {
  char line[3 * PATH_MAX];
  int n = snprintf(line, sizeof line, "%s\t%d\t%s\t%s\t%ld\t%ld\n", call, result, path, other ? other : "", offset, length);
  if (REAL(write)(trace, line, n) != n) abort();
}

/* Takes a number for this call, and the lock until `end`. Whether it must fail. */
static int begin(const char *call, const char *path, const char *other) {
  pthread_mutex_lock(&lock);
  long number = calls++;
  int fail = number >= first_failure && number < first_failure + failures;
  if (fail) record(call, failure, path, other, 0, 0);
  return fail;
}

static void end(void) {
  int kept = errno;
  pthread_mutex_unlock(&lock);
  errno = kept;
}

static long fail(void) {
  pthread_mutex_unlock(&lock);
  errno = failure;
  return -1;
}

/* After a call that was made: its line. */
static void done(const char *call, long result, const char *path, const char *other, long offset, long length) {
  int kept = errno;
  record(call, result < 0 ? errno : 0, path, other, offset, length);
  errno = kept;
  end();
}

/* Calls with one path that return an int. */
#define ON_PATH(call, dirfd, given, parameters, arguments)                             \
  int call parameters {                                                                \
    char buffer[PATH_MAX];                                                             \
    const char *path = absolute(dirfd, given, buffer);                                 \
    if (!path) return REAL(call) arguments;                                            \
    if (begin(#call, path, NULL)) return fail();                                       \
    int result = REAL(call) arguments;                                                 \
    done(#call, result, path, NULL, 0, 0);                                             \
    return result;                                                                     \
  }

/* Calls with an open file that return an int. */
#define ON_FILE(call, parameters, arguments, length)                                   \
  int call parameters {                                                                \
    const char *path = path_of(fd);                                                    \
    if (!path) return REAL(call) arguments;                                            \
    if (begin(#call, path, NULL)) return fail();                                       \
    int result = REAL(call) arguments;                                                 \
    done(#call, result, path, NULL, 0, length);                                        \
    return result;                                                                     \
  }

/* Calls with two paths. */
#define ON_PATHS(call, from_fd, from, to_fd, to, parameters, arguments)                \
  int call parameters {                                                                \
    char buffer[PATH_MAX], other_buffer[PATH_MAX];                                     \
    const char *path = absolute(from_fd, from, buffer);                                \
    const char *other = absolute(to_fd, to, other_buffer);                             \
    if (!path && !other) return REAL(call) arguments;                                  \
    if (begin(#call, path ? path : from, other ? other : to)) return fail();           \
    int result = REAL(call) arguments;                                                 \
    done(#call, result, path ? path : from, other ? other : to, 0, 0);                 \
    return result;                                                                     \
  }

ON_PATH(mkdir, AT_FDCWD, p, (const char *p, mode_t mode), (p, mode))
ON_PATH(mkdirat, dirfd, p, (int dirfd, const char *p, mode_t mode), (dirfd, p, mode))
ON_PATH(rmdir, AT_FDCWD, p, (const char *p), (p))
ON_PATH(unlink, AT_FDCWD, p, (const char *p), (p))
ON_PATH(unlinkat, dirfd, p, (int dirfd, const char *p, int flags), (dirfd, p, flags))
ON_PATH(access, AT_FDCWD, p, (const char *p, int mode), (p, mode))
ON_PATH(faccessat, dirfd, p, (int dirfd, const char *p, int mode, int flags), (dirfd, p, mode, flags))
ON_PATH(chmod, AT_FDCWD, p, (const char *p, mode_t mode), (p, mode))
ON_PATH(stat, AT_FDCWD, p, (const char *p, struct stat *s), (p, s))
ON_PATH(stat64, AT_FDCWD, p, (const char *p, struct stat64 *s), (p, s))
ON_PATH(lstat, AT_FDCWD, p, (const char *p, struct stat *s), (p, s))
ON_PATH(lstat64, AT_FDCWD, p, (const char *p, struct stat64 *s), (p, s))
ON_PATH(fstatat, dirfd, p, (int dirfd, const char *p, struct stat *s, int flags), (dirfd, p, s, flags))
ON_PATH(fstatat64, dirfd, p, (int dirfd, const char *p, struct stat64 *s, int flags), (dirfd, p, s, flags))
ON_PATH(statx, dirfd, p, (int dirfd, const char *p, int flags, unsigned mask, struct statx *s), (dirfd, p, flags, mask, s))
ON_FILE(fstat, (int fd, struct stat *s), (fd, s), 0)
ON_FILE(fstat64, (int fd, struct stat64 *s), (fd, s), 0)
ON_FILE(fsync, (int fd), (fd), 0)
ON_FILE(fdatasync, (int fd), (fd), 0)
ON_FILE(flock, (int fd, int how), (fd, how), 0)
ON_FILE(ftruncate, (int fd, off_t length), (fd, length), length)
ON_FILE(ftruncate64, (int fd, off64_t length), (fd, length), length)
ON_PATHS(rename, AT_FDCWD, a, AT_FDCWD, b, (const char *a, const char *b), (a, b))
ON_PATHS(renameat, x, a, y, b, (int x, const char *a, int y, const char *b), (x, a, y, b))
ON_PATHS(renameat2, x, a, y, b, (int x, const char *a, int y, const char *b, unsigned flags), (x, a, y, b, flags))
ON_PATHS(link, AT_FDCWD, a, AT_FDCWD, b, (const char *a, const char *b), (a, b))
ON_PATHS(linkat, x, a, y, b, (int x, const char *a, int y, const char *b, int flags), (x, a, y, b, flags))

int truncate(const char *path, off_t length) {
  if (!below(path)) return REAL(truncate)(path, length);
  if (begin("truncate", path, NULL)) return fail();
  int result = REAL(truncate)(path, length);
  done("truncate", result, path, NULL, 0, length);
  return result;
}
int truncate64(const char *path, off64_t length) { return truncate(path, length); }

static void remember(int fd, const char *path) {
  if (fd < 0 || fd >= FILES) return;
  if (!path) {
    paths[fd] = NULL;
    return;
  }
  pthread_mutex_lock(&lock);
  if (names_length + strlen(path) + 1 > sizeof names) abort();
  paths[fd] = strcpy(names + names_length, path);
  names_length += strlen(path) + 1;
  pthread_mutex_unlock(&lock);
}

static int open_at(int dirfd, const char *given, int flags, mode_t mode) {
  char buffer[PATH_MAX];
  const char *path = absolute(dirfd, given, buffer);
  if (!path) {
    int fd = REAL(openat)(dirfd, given, flags, mode);
    if (fd >= 0 && fd < FILES && paths[fd]) remember(fd, NULL);
    return fd;
  }
  if (begin("open", path, NULL)) return fail();
  int existed = !REAL(faccessat)(dirfd, given, F_OK, 0);
  int fd = REAL(openat)(dirfd, given, flags, mode);
  remember(fd, path);
  const char *change = !existed && flags & O_CREAT ? "create" : flags & O_TRUNC ? "truncate" : NULL;
  done("open", fd, path, change, 0, 0);
  return fd;
}

#define OPEN_MODE(mode, last)             \
  va_list more;                           \
  va_start(more, last);                   \
  mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
  va_end(more)

int open(const char *path, int flags, ...) { OPEN_MODE(mode, flags); return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { OPEN_MODE(mode, flags); return open_at(AT_FDCWD, path, flags, mode); }
int openat(int d, const char *path, int flags, ...) { OPEN_MODE(mode, flags); return open_at(d, path, flags, mode); }
int openat64(int d, const char *path, int flags, ...) { OPEN_MODE(mode, flags); return open_at(d, path, flags, mode); }

int close(int fd) {
  const char *path = path_of(fd);
  if (!path) {
    if (fd >= 0 && fd < FILES && paths[fd]) remember(fd, NULL);
    return REAL(close)(fd);
  }
  int failed = begin("close", path, NULL);
  int result = REAL(close)(fd); /* also if it fails: Linux closes the file all the same */
  if (!failed) record("close", result < 0 ? errno : 0, path, NULL, 0, 0);
  remember(fd, NULL);
  if (failed) return fail();
  end();
  return result;
}

static ssize_t written(const char *call, const char *path, ssize_t result, const void *bytes, long offset) {
  if (result > 0 && REAL(write)(data, bytes, result) != result) abort();
  done(call, result, path, NULL, offset, result > 0 ? result : 0);
  return result;
}

ssize_t write(int fd, const void *bytes, size_t length) {
  const char *path = path_of(fd);
  if (!path) return REAL(write)(fd, bytes, length);
  if (begin("write", path, NULL)) return fail();
  ssize_t result = REAL(write)(fd, bytes, length);
  return written("write", path, result, bytes, lseek(fd, 0, SEEK_CUR) - (result > 0 ? result : 0));
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset) {
  const char *path = path_of(fd);
  if (!path) return REAL(pwrite64)(fd, bytes, length, offset);
  if (begin("write", path, NULL)) return fail();
  return written("write", path, REAL(pwrite64)(fd, bytes, length, offset), bytes, offset);
}
ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) { return pwrite64(fd, bytes, length, offset); }

ssize_t writev(int fd, const struct iovec *parts, int count) {
  if (!path_of(fd)) return REAL(writev)(fd, parts, count);
  ssize_t total = 0; /* one write for each part: an allowed outcome is a short count */
  for (int i = 0; i < count; i++) {
    ssize_t result = write(fd, parts[i].iov_base, parts[i].iov_len);
    if (result < 0) return total ? total : -1;
    total += result;
    if ((size_t)result < parts[i].iov_len) break;
  }
  return total;
}

#define READ(call, parameters, arguments)                  \
  ssize_t call parameters {                                \
    const char *path = path_of(fd);                        \
    if (!path) return REAL(call) arguments;                \
    if (begin("read", path, NULL)) return fail();          \
    ssize_t result = REAL(call) arguments;                 \
    done("read", result, path, NULL, 0, 0);                \
    return result;                                         \
  }
READ(read, (int fd, void *bytes, size_t length), (fd, bytes, length))
READ(pread, (int fd, void *bytes, size_t length, off_t offset), (fd, bytes, length, offset))
READ(pread64, (int fd, void *bytes, size_t length, off64_t offset), (fd, bytes, length, offset))
READ(readv, (int fd, const struct iovec *parts, int count), (fd, parts, count))

#define MAP(call, offset_type)                                                                      \
  void *call(void *start, size_t length, int protection, int flags, int fd, offset_type offset) {   \
    const char *path = path_of(fd);                                                                 \
    if (!path) return REAL(call)(start, length, protection, flags, fd, offset);                     \
    if (begin("mmap", path, NULL)) return (void *)fail();                                           \
    void *result = REAL(call)(start, length, protection, flags, fd, offset);                        \
    done("mmap", result == MAP_FAILED ? -1 : 0, path, NULL, 0, 0);                                  \
    return result;                                                                                  \
  }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

/* Directories: the stream is known by its descriptor. */
DIR *opendir(const char *path) {
  if (!below(path)) return REAL(opendir)(path);
  if (begin("opendir", path, NULL)) return fail(), NULL;
  DIR *stream = REAL(opendir)(path);
  if (stream) remember(dirfd(stream), path);
  done("opendir", stream ? 0 : -1, path, NULL, 0, 0);
  return stream;
}

DIR *fdopendir(int fd) {
  const char *path = path_of(fd);
  if (!path) return REAL(fdopendir)(fd);
  if (begin("opendir", path, NULL)) return fail(), NULL;
  DIR *stream = REAL(fdopendir)(fd);
  done("opendir", stream ? 0 : -1, path, NULL, 0, 0);
  return stream;
}

int closedir(DIR *stream) {
  int fd = dirfd(stream);
  int result = REAL(closedir)(stream);
  if (path_of(fd)) remember(fd, NULL);
  return result;
}

#define READ_DIRECTORY(call, entry)                                        \
  struct entry *call(DIR *stream) {                                        \
    const char *path = path_of(dirfd(stream));                             \
    if (!path) return REAL(call)(stream);                                  \
    if (begin("readdir", path, NULL)) return fail(), NULL;                 \
    errno = 0;                                                             \
    struct entry *result = REAL(call)(stream);                             \
    done("readdir", !result && errno ? -1 : 0, path, NULL, 0, 0);          \
    return result;                                                         \
  }
READ_DIRECTORY(readdir, dirent)
READ_DIRECTORY(readdir64, dirent64)
