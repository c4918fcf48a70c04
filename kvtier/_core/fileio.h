/* SPDX-License-Identifier: Apache-2.0 */
/* One chunk, one file: the system calls of the file tier, without Python and without the GIL.
 *
 * Job: store, load, look for and remove single chunk files below a directory descriptor. Owns no
 * state: descriptor, buffers and items belong to the caller (fileio.pyx). Every call goes through a
 * hook (struct kv_fault) that is inert unless a test filled in a table. Nothing here can raise; each
 * item gets a status: 0, a positive errno, or one of the KV_* codes below.
 *
 * File: payload, zeros up to a multiple of 4096, then a trailer of 4096 bytes. A file is written
 * under a temporary name in the same directory and renamed, so a name always means a whole file. */
#ifndef KVTIER_FILEIO_H
#define KVTIER_FILEIO_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"

#define KV_PAGE 4096
#define KV_KEY_MAX 40
#define KV_TAG_MAX 96
#define KV_PATH_MAX 128 /* 90 at most */
#define KV_TEMP_MAX 256
#define KV_MAGIC "KVTIERF\n"
#define KV_VERSION 1u
#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

/* Status of an item beside 0 and errno. */
enum {
    KV_WAITING = -1,   /* nobody has taken it */
    KV_EXISTS = -2,    /* store: a whole file is there */
    KV_MISSING = -3,   /* load, stat: no file */
    KV_SHORT = -4,     /* load, stat: shorter than it should be, somebody may still be writing */
    KV_CORRUPT = -5,   /* load: a whole file whose bytes are not what was stored */
    KV_FOREIGN = -6    /* load: a whole file of a format that this version does not know */
};

enum kv_op {
    KV_OPEN, KV_READ, KV_WRITE, KV_RENAME, KV_STAT, KV_FSYNC, KV_FALLOCATE, KV_MKDIR, KV_UNLINK,
    KV_CLOSE, KV_OPS
};

/* What a test wants one kind of call to do. */
struct kv_fault {
    int32_t error;      /* errno to return instead of making the call; 0 is none */
    int32_t gate;       /* descriptor to read a byte from before the call; -1 is none */
    int64_t after;      /* calls that pass before `error` or `limit` applies */
    int64_t times;      /* calls it then applies to; negative is all */
    int64_t limit;      /* bytes that one read or write moves at most; negative is all */
    int64_t lost;       /* bytes that a write claims to have written but did not */
    int64_t calls;      /* calls seen so far */
};

struct kv_item {
    uint8_t key[KV_KEY_MAX];
    int32_t key_len;
    int32_t status;
    int32_t has_crc;
    uint32_t crc;
    int32_t flags;      /* F_GETFL of the descriptor that moved the payload */
    int32_t pad;
    uint64_t address;   /* of the payload; the caller keeps the slot pinned */
    int64_t length;     /* payload bytes */
    int64_t blocks;     /* st_blocks (512 bytes) of the file now at that name */
    int64_t replaced;   /* st_blocks of the file that it took the place of */
    int64_t atime;      /* seconds, of the file as it was found */
    int64_t mtime;
};

/* What all items of a call share. */
struct kv_dir {
    int32_t fd;             /* directory that the names are relative to */
    int32_t direct;
    int32_t sync;
    int32_t preallocate;
    uint32_t file_mode;
    uint32_t dir_mode;
    int64_t touch_seconds;  /* renew the access time of a file that is older; negative is never */
    int64_t counter;        /* of temporary names */
    int64_t fallbacks;      /* calls that had to go without O_DIRECT */
    uint8_t digest[32];
    char tag[KV_TAG_MAX];   /* of temporary names: says which process they belong to */
    struct kv_fault *faults; /* KV_OPS of them, or NULL */
};

/* Aligned memory of one thread: two pages always, a whole payload when an address is odd. */
struct kv_bounce {
    uint8_t *pages;
    uint8_t *large;
    int64_t large_bytes;
};

/* Layout of the trailer; what is not named is zero. Little-endian, as every supported machine. */
struct kv_trailer {
    char magic[8];
    uint32_t version;
    uint32_t payload_crc;
    int64_t payload_bytes;
    uint32_t key_bytes;
    uint32_t reserved;
    uint8_t key[KV_KEY_MAX];
    uint8_t digest[32];
    uint8_t zero[KV_PAGE - 8 - 4 - 4 - 8 - 4 - 4 - KV_KEY_MAX - 32 - 4];
    uint32_t trailer_crc;   /* of everything before it */
};
_Static_assert(sizeof(struct kv_trailer) == KV_PAGE, "the trailer is one page");

/* Whether the hook lets the call through; else errno is set. */
static int kv_pass(struct kv_dir *d, enum kv_op op, int64_t *limit, int64_t *lost)
{
    struct kv_fault *f = d->faults ? d->faults + op : NULL;
    if (!f)
        return 1;
    int64_t call = __atomic_fetch_add(&f->calls, 1, __ATOMIC_RELAXED);
    int gate = __atomic_load_n(&f->gate, __ATOMIC_ACQUIRE);
    if (gate >= 0) {
        char byte;
        ssize_t n;
        do
            n = read(gate, &byte, 1);
        while (n < 0 && errno == EINTR);
    }
    int on = call >= f->after && (f->times < 0 || call < f->after + f->times);
    if (on && limit)
        *limit = f->limit;
    if (on && lost)
        *lost = f->lost;
    if (on && f->error) {
        errno = f->error;
        return 0;
    }
    return 1;
}

static int kv_openat(struct kv_dir *d, const char *path, int flags, unsigned mode)
{
    int fd;
    if (!kv_pass(d, KV_OPEN, NULL, NULL))
        return -1;
    do
        fd = openat(d->fd, path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static int kv_fstatat(struct kv_dir *d, const char *path, struct stat *st)
{
    return kv_pass(d, KV_STAT, NULL, NULL) ? fstatat(d->fd, path, st, AT_SYMLINK_NOFOLLOW) : -1;
}

static int kv_unlinkat(struct kv_dir *d, const char *path)
{
    return kv_pass(d, KV_UNLINK, NULL, NULL) ? unlinkat(d->fd, path, 0) : -1;
}

/* 0, or errno. A descriptor is gone after close, whatever it returned. */
static int kv_close(struct kv_dir *d, int fd)
{
    int injected = kv_pass(d, KV_CLOSE, NULL, NULL) ? 0 : errno;
    if (close(fd) != 0 && errno != EINTR && !injected)
        return errno;
    return injected;
}

static int64_t kv_span(int64_t length)
{
    return (length + KV_PAGE - 1) / KV_PAGE * KV_PAGE;
}

/* Path of a key below the namespace's directory: "ab/<hash>_<group>.kv". */
static int kv_path(const struct kv_item *it, char *out)
{
    static const char digits[] = "0123456789abcdef";
    int hash = it->key_len - 4, at = 3;
    uint32_t group = (uint32_t)it->key[hash] << 24 | (uint32_t)it->key[hash + 1] << 16
                   | (uint32_t)it->key[hash + 2] << 8 | it->key[hash + 3];
    out[0] = digits[it->key[0] >> 4];
    out[1] = digits[it->key[0] & 15];
    out[2] = '/';
    for (int i = 0; i < hash; i++) {
        out[at++] = digits[it->key[i] >> 4];
        out[at++] = digits[it->key[i] & 15];
    }
    return at + snprintf(out + at, 20, "_%u.kv", group);
}

/* Go on without O_DIRECT on a descriptor whose filesystem refuses this transfer. */
static int kv_undirect(struct kv_dir *d, int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || !(flags & O_DIRECT) || fcntl(fd, F_SETFL, flags & ~O_DIRECT) != 0)
        return 0;
    __atomic_fetch_add(&d->fallbacks, 1, __ATOMIC_RELAXED);
    return 1;
}

/* Move all of `iov`: 0, an errno, or KV_SHORT at the end of the file. */
static int kv_move(struct kv_dir *d, int fd, struct iovec *iov, int count, int writing)
{
    int64_t offset = 0;
    while (count > 0) {
        int64_t limit = -1, lost = 0;
        ssize_t n;
        if (iov->iov_len == 0) {
            iov++;
            count--;
            continue;
        }
        if (!kv_pass(d, writing ? KV_WRITE : KV_READ, &limit, &lost)) {
            n = -1;
        } else if (limit >= 0 || lost) {
            /* Tests only: move a part of the first vector, or claim more than was moved. */
            struct iovec part = *iov;
            if (limit >= 0 && (int64_t)part.iov_len > limit)
                part.iov_len = (size_t)limit;
            if (lost) {
                n = 0;
                for (int i = 0; i < count; i++)
                    n += (ssize_t)iov[i].iov_len;
            } else {
                n = writing ? pwritev(fd, &part, 1, offset) : preadv(fd, &part, 1, offset);
            }
        } else {
            n = writing ? pwritev(fd, iov, count, offset) : preadv(fd, iov, count, offset);
        }
        if (n < 0) {
            if (errno == EINTR || (errno == EINVAL && kv_undirect(d, fd)))
                continue;
            return errno;
        }
        if (n == 0)
            return writing ? EIO : KV_SHORT;
        offset += n;
        while (n > 0) {
            size_t step = (size_t)n < iov->iov_len ? (size_t)n : iov->iov_len;
            iov->iov_base = (char *)iov->iov_base + step;
            iov->iov_len -= step;
            n -= (ssize_t)step;
            if (iov->iov_len == 0 && count > 0) {
                iov++;
                count--;
            }
        }
    }
    return 0;
}

/* Vectors of a chunk: whole pages in place (or in the large buffer when the address is odd), the
 * last partial page and the trailer in the bounce pages. 0 or ENOMEM. */
static int kv_vectors(struct kv_dir *d, struct kv_item *it, struct kv_bounce *b, struct iovec *iov)
{
    int64_t main = it->length / KV_PAGE * KV_PAGE;
    uint8_t *base = (uint8_t *)(uintptr_t)it->address;
    if (d->direct && main && (it->address & (KV_PAGE - 1))) {
        if (b->large_bytes < main) {
            void *memory = NULL;
            free(b->large);
            b->large = NULL;
            b->large_bytes = 0;
            if (posix_memalign(&memory, KV_PAGE, (size_t)main) != 0)
                return ENOMEM;
            b->large = memory;
            b->large_bytes = main;
        }
        base = b->large;
    }
    iov[0].iov_base = base;
    iov[0].iov_len = (size_t)main;
    iov[1].iov_base = b->pages;
    iov[1].iov_len = it->length > main ? KV_PAGE : 0;
    iov[2].iov_base = b->pages + KV_PAGE;
    iov[2].iov_len = KV_PAGE;
    return 0;
}

static void kv_seal(const struct kv_dir *d, const struct kv_item *it, struct kv_trailer *t)
{
    memset(t, 0, sizeof *t);
    memcpy(t->magic, KV_MAGIC, 8);
    t->version = KV_VERSION;
    t->payload_crc = it->crc;
    t->payload_bytes = it->length;
    t->key_bytes = (uint32_t)it->key_len;
    memcpy(t->key, it->key, (size_t)it->key_len);
    memcpy(t->digest, d->digest, sizeof t->digest);
    t->trailer_crc = kvtier_crc32c(0, t, offsetof(struct kv_trailer, trailer_crc));
}

static int kv_check(const struct kv_dir *d, const struct kv_item *it, const struct kv_trailer *t)
{
    if (memcmp(t->magic, KV_MAGIC, 8) != 0
        || t->trailer_crc != kvtier_crc32c(0, t, offsetof(struct kv_trailer, trailer_crc)))
        return KV_CORRUPT;
    if (t->version != KV_VERSION)
        return KV_FOREIGN;
    if (t->payload_bytes != it->length || t->key_bytes != (uint32_t)it->key_len
        || memcmp(t->key, it->key, (size_t)it->key_len) != 0
        || memcmp(t->digest, d->digest, sizeof t->digest) != 0)
        return KV_CORRUPT;
    return 0;
}

/* A new file under a temporary name; makes the directory above it when it is not there. */
static int kv_create(struct kv_dir *d, const char *path, char *temporary)
{
    int direct = d->direct ? O_DIRECT : 0;
    for (int attempt = 0; attempt < 4; attempt++) {
        snprintf(temporary, KV_TEMP_MAX, "%.127s.%.95s.%llx.tmp", path, d->tag,
                 (unsigned long long)__atomic_fetch_add(&d->counter, 1, __ATOMIC_RELAXED));
        int fd = kv_openat(d, temporary, O_WRONLY | O_CREAT | O_EXCL | direct, d->file_mode);
        if (fd >= 0)
            return fd;
        if (errno == ENOENT) {
            char leaf[3] = {path[0], path[1], 0};
            if (!kv_pass(d, KV_MKDIR, NULL, NULL))
                return -1;
            if (mkdirat(d->fd, leaf, d->dir_mode) != 0 && errno != EEXIST)
                return -1;
        } else if (errno == EINVAL && direct) {
            direct = 0;
            __atomic_fetch_add(&d->fallbacks, 1, __ATOMIC_RELAXED);
        } else if (errno != EEXIST) {
            return -1;
        }
    }
    errno = ENOENT;
    return -1;
}

/* Give the finished file its name: 0, KV_EXISTS when another writer was first, or an errno. */
static int kv_publish(struct kv_dir *d, struct kv_item *it, const char *temporary,
                      const char *path, int64_t size, int replace)
{
    struct stat st;
    if (!kv_pass(d, KV_RENAME, NULL, NULL))
        return errno;
    if (!replace) {
        if (syscall(SYS_renameat2, d->fd, temporary, d->fd, path, RENAME_NOREPLACE) == 0)
            return 0;
        if (errno == EEXIST) {
            if (fstatat(d->fd, path, &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_size == size) {
                it->blocks = st.st_blocks;
                return KV_EXISTS;
            }
        } else if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) {
            return errno;
        }
    }
    return renameat(d->fd, temporary, d->fd, path) == 0 ? 0 : errno;
}

/* The name itself survives a power failure only when its directory is synced too. */
static int kv_sync_parent(struct kv_dir *d, const char *path)
{
    char leaf[3] = {path[0], path[1], 0};
    int error = 0;
    int fd = kv_openat(d, leaf, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0)
        return errno;
    if (!kv_pass(d, KV_FSYNC, NULL, NULL) || fsync(fd) != 0)
        error = errno;
    close(fd);
    return error;
}

/* Fill an open temporary file: 0 or an errno. Closes it in any case. */
static int kv_fill(struct kv_dir *d, struct kv_item *it, int fd, struct iovec *iov, int64_t size)
{
    struct stat st;
    int error = 0;
    it->flags = fcntl(fd, F_GETFL);
    if (d->preallocate) {
        int refused = !kv_pass(d, KV_FALLOCATE, NULL, NULL) || fallocate(fd, 0, 0, size) != 0;
        /* Many filesystems cannot; space that is really out is reported by the write too. */
        if (refused && (errno == ENOSPC || errno == EDQUOT))
            error = errno;
    }
    if (!error)
        error = kv_move(d, fd, iov, 3, 1);
    if (!error && d->sync && (!kv_pass(d, KV_FSYNC, NULL, NULL) || fsync(fd) != 0))
        error = errno;
    /* What counts is what the file has, not what the calls claimed. */
    if (!error && fstat(fd, &st) != 0)
        error = errno;
    if (!error && st.st_size != size)
        error = EIO;
    if (!error)
        it->blocks = st.st_blocks ? st.st_blocks : size / 512;
    int closed = kv_close(d, fd); /* NFS reports EIO and EDQUOT here */
    return error ? error : closed;
}

static int kv_store_once(struct kv_dir *d, struct kv_item *it, struct kv_bounce *b)
{
    char path[KV_PATH_MAX], temporary[KV_TEMP_MAX];
    struct iovec iov[3];
    struct stat st;
    int64_t size = kv_span(it->length) + KV_PAGE;
    int replace = 0;
    kv_path(it, path);
    if (kv_fstatat(d, path, &st) == 0) {
        if (st.st_size == size) {
            it->blocks = st.st_blocks;
            return KV_EXISTS;
        }
        it->replaced = st.st_blocks;
        replace = 1;
    } else if (errno != ENOENT) {
        return errno;
    }
    int error = kv_vectors(d, it, b, iov);
    if (error)
        return error;
    const uint8_t *payload = (const uint8_t *)(uintptr_t)it->address;
    if (!it->has_crc) {
        it->crc = kvtier_crc32c(0, payload, (size_t)it->length);
        it->has_crc = 1;
    }
    int64_t rest = it->length - (int64_t)iov[0].iov_len;
    if (iov[0].iov_base != payload)
        memcpy(iov[0].iov_base, payload, iov[0].iov_len);
    memset(b->pages, 0, KV_PAGE);
    memcpy(b->pages, payload + iov[0].iov_len, (size_t)rest);
    kv_seal(d, it, (struct kv_trailer *)(b->pages + KV_PAGE));
    int fd = kv_create(d, path, temporary);
    if (fd < 0)
        return errno;
    error = kv_fill(d, it, fd, iov, size);
    if (!error)
        error = kv_publish(d, it, temporary, path, size, replace);
    if (error)
        unlinkat(d->fd, temporary, 0);
    else if (d->sync)
        error = kv_sync_parent(d, path);
    return error;
}

static int kv_store(struct kv_dir *d, struct kv_item *it, struct kv_bounce *b)
{
    int error = kv_store_once(d, it, b);
    /* Somebody else's cleaner took the directory or the temporary file: once more. */
    return error == ENOENT ? kv_store_once(d, it, b) : error;
}

static int kv_load_open(struct kv_dir *d, struct kv_item *it, struct kv_bounce *b, int fd)
{
    struct iovec iov[3];
    struct stat st;
    int64_t size = kv_span(it->length) + KV_PAGE;
    it->flags = fcntl(fd, F_GETFL);
    if (!kv_pass(d, KV_STAT, NULL, NULL) || fstat(fd, &st) != 0)
        return errno;
    it->blocks = st.st_blocks;
    it->atime = st.st_atime;
    it->mtime = st.st_mtime;
    if (st.st_size < size)
        return KV_SHORT;
    if (st.st_size > size)
        return KV_CORRUPT;
    int error = kv_vectors(d, it, b, iov);
    if (error)
        return error;
    uint8_t *payload = (uint8_t *)(uintptr_t)it->address;
    uint8_t *base = iov[0].iov_base;
    size_t main = iov[0].iov_len;
    error = kv_move(d, fd, iov, 3, 0);
    if (error)
        return error;
    const struct kv_trailer *t = (const struct kv_trailer *)(b->pages + KV_PAGE);
    error = kv_check(d, it, t);
    if (error)
        return error;
    if (base != payload)
        memcpy(payload, base, main);
    memcpy(payload + main, b->pages, (size_t)it->length - main);
    it->crc = kvtier_crc32c(0, payload, (size_t)it->length);
    it->has_crc = 1;
    if (it->crc != t->payload_crc)
        return KV_CORRUPT;
    int64_t last = it->atime > it->mtime ? it->atime : it->mtime;
    if (d->touch_seconds >= 0 && (int64_t)time(NULL) - last > d->touch_seconds) {
        /* So that other instances, cleaners and the next start see the use; only a hint. */
        struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_OMIT}};
        (void)futimens(fd, times);
    }
    return 0;
}

static int kv_load(struct kv_dir *d, struct kv_item *it, struct kv_bounce *b)
{
    char path[KV_PATH_MAX];
    kv_path(it, path);
    int fd = kv_openat(d, path, O_RDONLY | O_NOFOLLOW | (d->direct ? O_DIRECT : 0), 0);
    if (fd < 0 && errno == EINVAL && d->direct) {
        __atomic_fetch_add(&d->fallbacks, 1, __ATOMIC_RELAXED);
        fd = kv_openat(d, path, O_RDONLY | O_NOFOLLOW, 0);
    }
    if (fd < 0)
        return errno == ENOENT ? KV_MISSING : errno;
    int error = kv_load_open(d, it, b, fd);
    kv_close(d, fd); /* nothing was written: what was read has been verified */
    return error;
}

static int kv_find(struct kv_dir *d, struct kv_item *it)
{
    char path[KV_PATH_MAX];
    struct stat st;
    kv_path(it, path);
    if (kv_fstatat(d, path, &st) != 0)
        return errno == ENOENT ? KV_MISSING : errno;
    it->blocks = st.st_blocks;
    it->mtime = st.st_mtime;
    if (it->length < 0 ? st.st_size < KV_PAGE : st.st_size != kv_span(it->length) + KV_PAGE)
        return KV_SHORT;
    return 0;
}

/* Set a proven corrupt file aside under "<name>.bad": 0, KV_MISSING or an errno. */
static int kv_set_aside(struct kv_dir *d, struct kv_item *it)
{
    char path[KV_PATH_MAX], aside[KV_PATH_MAX];
    struct stat st;
    kv_path(it, path);
    snprintf(aside, sizeof aside, "%.*s.bad", KV_PATH_MAX - 8, path);
    if (kv_fstatat(d, path, &st) == 0)
        it->blocks = st.st_blocks;
    if (!kv_pass(d, KV_RENAME, NULL, NULL))
        return errno;
    if (renameat(d->fd, path, d->fd, aside) == 0)
        return 0;
    return errno == ENOENT ? KV_MISSING : errno;
}

/* One entry of a directory. */
struct kv_entry {
    char name[NAME_MAX + 1];
    int32_t is_dir;
    int64_t size;
    int64_t blocks;
    int64_t used;   /* seconds: the later of access and modification */
    int64_t mtime;
};

/* Entries of a directory, into memory that the caller frees: 0 or an errno. */
static int kv_list(struct kv_dir *d, const char *path, struct kv_entry **out, int64_t *count)
{
    struct kv_entry *entries = NULL;
    int64_t room = 0, n = 0;
    struct dirent *entry;
    struct stat st;
    *out = NULL;
    *count = 0;
    int fd = kv_openat(d, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
    if (fd < 0)
        return errno;
    DIR *dir = fdopendir(fd);
    if (!dir) {
        int error = errno;
        close(fd);
        return error;
    }
    while ((errno = 0, entry = readdir(dir)) != NULL) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        /* A file that went in between is no error; a directory needs no call. */
        memset(&st, 0, sizeof st);
        if (entry->d_type == DT_DIR)
            st.st_mode = S_IFDIR;
        else if (fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        if (n == room) {
            int64_t more = room ? room * 2 : 16;
            void *grown = realloc(entries, (size_t)more * sizeof *entries);
            if (!grown) {
                errno = ENOMEM;
                break;
            }
            entries = grown;
            room = more;
        }
        struct kv_entry *e = entries + n++;
        snprintf(e->name, sizeof e->name, "%s", entry->d_name);
        e->is_dir = S_ISDIR(st.st_mode);
        e->size = st.st_size;
        e->blocks = st.st_blocks;
        e->used = st.st_atime > st.st_mtime ? st.st_atime : st.st_mtime;
        e->mtime = st.st_mtime;
    }
    int error = errno;
    closedir(dir);
    if (error) {
        free(entries);
        return error;
    }
    *out = entries;
    *count = n;
    return 0;
}

#endif
