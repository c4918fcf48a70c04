/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of runs between local pages and canonical pages.
 *
 * Nothing here can fail: the plan has proven every run, and the caller has checked every block, before
 * the first byte moves. A run is two nested loops over fragments of one size, so that a transposition
 * of heads and tokens is one run. Vector instructions are picked at run time (kvtier_copy_init). */
#ifndef KVTIER_COPY_H
#define KVTIER_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct {
    int64_t size; /* bytes of one fragment */
    int64_t local, canonical; /* offsets of the first one in the two pages */
    int64_t inner, inner_local, inner_canonical; /* count and strides of the inner loop */
    int64_t outer, outer_local, outer_canonical;
} kvtier_run;

typedef struct {
    char *base; /* block 0 of the layer in accelerator memory */
    int64_t stride; /* bytes between two blocks there */
    int64_t block_offset; /* start of the canonical page inside a canonical block */
    int64_t num_writers, writer_index;
    const kvtier_run *runs;
    int64_t num_runs;
    int64_t bytes; /* of the local page: what its runs move */
} kvtier_page;

typedef struct {
    int64_t block; /* accelerator block */
    char *canonical; /* its canonical block */
    int64_t page_id;
} kvtier_job;

enum { KVTIER_STORE = 0, KVTIER_LOAD = 1, KVTIER_ZERO = 2 };

/* `count` fragments; `stream` means that the bytes will not be wanted in this core's caches. */
typedef void (*kvtier_strided_fn)(char *dst, const char *src, size_t size, int64_t count,
                                  int64_t dst_stride, int64_t src_stride, int stream);

static kvtier_strided_fn kvtier_strided;

static void kvtier_strided_portable(char *dst, const char *src, size_t size, int64_t count,
                                    int64_t dst_stride, int64_t src_stride, int stream)
{
    (void)stream;
    for (; count > 0; count--, dst += dst_stride, src += src_stride)
        memcpy(dst, src, size);
}

#if defined(__x86_64__)
#define KVTIER_AVX2 __attribute__((target("avx2")))

/* Reads of short pieces jump from page to page, where the hardware's prefetcher starts anew each
 * time: the lines of a piece a little further on are asked for while this one is copied. */
#define KVTIER_AHEAD_BYTES 2048

KVTIER_AVX2 static inline __attribute__((always_inline)) void
kvtier_vectors(char *dst, const char *src, size_t size, const char *ahead, int stream)
{
    for (size_t i = 0; i < size; i += 64) {
        _mm_prefetch(ahead + i, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        if (stream) {
            _mm256_stream_si256((__m256i *)(dst + i), a);
            _mm256_stream_si256((__m256i *)(dst + i + 32), b);
        } else {
            _mm256_storeu_si256((__m256i *)(dst + i), a);
            _mm256_storeu_si256((__m256i *)(dst + i + 32), b);
        }
    }
}

KVTIER_AVX2 static inline __attribute__((always_inline)) void
kvtier_pieces(char *dst, const char *src, size_t size, int64_t count, int64_t dst_stride,
              int64_t src_stride, int stream)
{
    int64_t ahead = size >= KVTIER_AHEAD_BYTES ? 1 : (int64_t)(KVTIER_AHEAD_BYTES / size);
    for (int64_t i = 0; i < count; i++, dst += dst_stride, src += src_stride)
        kvtier_vectors(dst, src, size, src + (i + ahead < count ? ahead * src_stride : 0), stream);
}

KVTIER_AVX2 static void kvtier_strided_avx2(char *dst, const char *src, size_t size, int64_t count,
                                            int64_t dst_stride, int64_t src_stride, int stream)
{
    stream = stream && !(((uintptr_t)dst | (uintptr_t)dst_stride) & 31);
#define KVTIER_FIXED(bytes)                                                          \
    case bytes:                                                                      \
        if (stream)                                                                  \
            kvtier_pieces(dst, src, bytes, count, dst_stride, src_stride, 1);        \
        else                                                                         \
            kvtier_pieces(dst, src, bytes, count, dst_stride, src_stride, 0);        \
        return;
    switch (size) {
        KVTIER_FIXED(64)
        KVTIER_FIXED(128)
        KVTIER_FIXED(256)
        KVTIER_FIXED(512)
        KVTIER_FIXED(1024)
    }
#undef KVTIER_FIXED
    if (size % 64 == 0 && stream)
        kvtier_pieces(dst, src, size, count, dst_stride, src_stride, 1);
    else if (size % 64 == 0)
        kvtier_pieces(dst, src, size, count, dst_stride, src_stride, 0);
    else
        kvtier_strided_portable(dst, src, size, count, dst_stride, src_stride, 0);
}
#endif

static void kvtier_copy_init(void)
{
    kvtier_strided = kvtier_strided_portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        kvtier_strided = kvtier_strided_avx2;
#endif
}

/* Loop order: the destination moves in the smaller steps. */
static inline void kvtier_copy_run(const kvtier_run *r, char *local, char *canonical, int load,
                                   int stream, kvtier_strided_fn strided)
{
    char *dst = load ? local : canonical;
    const char *src = load ? canonical : local;
    int64_t n[2] = {r->inner, r->outer};
    int64_t d[2] = {load ? r->inner_local : r->inner_canonical,
                    load ? r->outer_local : r->outer_canonical};
    int64_t s[2] = {load ? r->inner_canonical : r->inner_local,
                    load ? r->outer_canonical : r->outer_local};
    int in = d[0] > d[1] && n[1] > 1;
    int out = !in;
    for (int64_t i = 0; i < n[out]; i++, dst += d[out], src += s[out])
        strided(dst, src, (size_t)r->size, n[in], d[in], s[in], stream);
}

static inline void kvtier_zero_run(const kvtier_run *r, char *canonical)
{
    for (int64_t i = 0; i < r->outer; i++)
        for (int64_t j = 0; j < r->inner; j++)
            memset(canonical + i * r->outer_canonical + j * r->inner_canonical, 0, (size_t)r->size);
}

/* Bytes moved (or zeroed). Without `vectors` the portable loops run, whatever the processor has. */
static int64_t kvtier_copy_blocks(const kvtier_page *pages, int64_t num_pages,
                                  const kvtier_job *jobs, int64_t num_jobs, int what, int stream,
                                  int vectors)
{
    kvtier_strided_fn strided = vectors ? kvtier_strided : kvtier_strided_portable;
    int64_t moved = 0;
    for (int64_t j = 0; j < num_jobs; j++)
        for (int64_t p = 0; p < num_pages; p++) {
            const kvtier_page *page = pages + p;
            if (what != KVTIER_LOAD && page->num_writers > 1
                && jobs[j].page_id % page->num_writers != page->writer_index)
                continue;
            char *canonical = jobs[j].canonical + page->block_offset;
            char *local = page->base + jobs[j].block * page->stride;
            for (int64_t r = 0; r < page->num_runs; r++) {
                const kvtier_run *run = page->runs + r;
                if (what == KVTIER_ZERO)
                    kvtier_zero_run(run, canonical + run->canonical);
                else
                    kvtier_copy_run(run, local + run->local, canonical + run->canonical,
                                    what == KVTIER_LOAD, stream, strided);
            }
            moved += page->bytes;
        }
#if defined(__x86_64__)
    if (stream)
        _mm_sfence(); /* streamed stores become visible before the caller says that they are */
#endif
    return moved;
}

#endif
