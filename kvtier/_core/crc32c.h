/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32C (Castagnoli, RFC 3720): the SSE 4.2 instruction on three interleaved streams where the
 * CPU has it, eight tables elsewhere. The choice is made at run time, in kvtier_crc_init.
 *
 * Registers hold the bit-reflected remainder, without the final inversion. With A and K such 32-bit
 * polynomials, a carry-less product of the two, read as a reflected 64-bit polynomial, is A*K*x, and
 * the crc32 instruction on it (register 0) gives A*K*x^33 mod P. So n zero bytes are appended to A
 * by K = x^(8n-33) mod P: that is how the three streams are joined. */
#ifndef KVTIER_CRC32C_H
#define KVTIER_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVTIER_CRC_POLY 0x82f63b78u /* reflected */
/* Bytes of one of the three streams. The short one serves the rest; shorter long ones (1024, 4096)
 * are equal in the caches, but read memory at half and three quarters of the speed. */
#define KVTIER_CRC_LONG 8192
#define KVTIER_CRC_SHORT 256

static uint32_t kvtier_crc_table[8][256];
static uint32_t kvtier_crc_join[4]; /* long twice, long once, short twice, short once */
static uint32_t (*kvtier_crc_update)(uint32_t, const unsigned char *, size_t);

static uint32_t kvtier_crc_portable(uint32_t crc, const unsigned char *p, size_t n)
{
    while (n >= 8) {
        /* By bytes, so that it is right in either byte order. */
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16
                              | (uint32_t)p[3] << 24);
        crc = kvtier_crc_table[7][low & 255] ^ kvtier_crc_table[6][low >> 8 & 255]
            ^ kvtier_crc_table[5][low >> 16 & 255] ^ kvtier_crc_table[4][low >> 24]
            ^ kvtier_crc_table[3][p[4]] ^ kvtier_crc_table[2][p[5]]
            ^ kvtier_crc_table[1][p[6]] ^ kvtier_crc_table[0][p[7]];
        p += 8;
        n -= 8;
    }
    while (n--)
        crc = crc >> 8 ^ kvtier_crc_table[0][(crc ^ *p++) & 255];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static inline uint64_t
kvtier_crc_word(uint64_t crc, const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
    return _mm_crc32_u64(crc, word);
}

/* One third each of a piece of 3 * lane bytes, joined into one register. */
__attribute__((target("sse4.2,pclmul"))) static inline uint64_t
kvtier_crc_three(uint64_t a, const unsigned char *p, size_t lane, const uint32_t *join)
{
    uint64_t b = 0, c = 0;
    const unsigned char *end = p + lane;
    for (; p < end; p += 32) {
        /* Three streams of two pages each: the hardware's prefetcher stops at every page's end. */
        _mm_prefetch((const char *)(p + 1024), _MM_HINT_T0);
        _mm_prefetch((const char *)(p + lane + 1024), _MM_HINT_T0);
        _mm_prefetch((const char *)(p + 2 * lane + 1024), _MM_HINT_T0);
        for (int i = 0; i < 32; i += 8) {
            a = kvtier_crc_word(a, p + i);
            b = kvtier_crc_word(b, p + lane + i);
            c = kvtier_crc_word(c, p + 2 * lane + i);
        }
    }
    __m128i first = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a),
                                         _mm_cvtsi32_si128((int)join[0]), 0);
    __m128i second = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)b),
                                          _mm_cvtsi32_si128((int)join[1]), 0);
    return c ^ _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(_mm_xor_si128(first, second)));
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t
kvtier_crc_sse42(uint32_t start, const unsigned char *p, size_t n)
{
    uint64_t crc = start;
    while (n && ((uintptr_t)p & 7)) {
        crc = _mm_crc32_u8((uint32_t)crc, *p++);
        n--;
    }
    for (; n >= 3 * KVTIER_CRC_LONG; n -= 3 * KVTIER_CRC_LONG, p += 3 * KVTIER_CRC_LONG)
        crc = kvtier_crc_three(crc, p, KVTIER_CRC_LONG, kvtier_crc_join);
    for (; n >= 3 * KVTIER_CRC_SHORT; n -= 3 * KVTIER_CRC_SHORT, p += 3 * KVTIER_CRC_SHORT)
        crc = kvtier_crc_three(crc, p, KVTIER_CRC_SHORT, kvtier_crc_join + 2);
    for (; n >= 8; n -= 8, p += 8)
        crc = kvtier_crc_word(crc, p);
    while (n--)
        crc = _mm_crc32_u8((uint32_t)crc, *p++);
    return (uint32_t)crc;
}
#endif

/* x^n mod P, reflected. */
static uint32_t kvtier_crc_power(unsigned n)
{
    uint32_t value = 0x80000000u;
    while (n--)
        value = value >> 1 ^ (value & 1 ? KVTIER_CRC_POLY : 0);
    return value;
}

static int kvtier_crc_has_instruction(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#else
    return 0;
#endif
}

/* Once, before any other call; the module does it while it holds the import lock. */
static void kvtier_crc_init(void)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? KVTIER_CRC_POLY : 0);
        kvtier_crc_table[0][byte] = crc;
    }
    for (unsigned byte = 0; byte < 256; byte++)
        for (int t = 1; t < 8; t++) {
            uint32_t before = kvtier_crc_table[t - 1][byte];
            kvtier_crc_table[t][byte] = before >> 8 ^ kvtier_crc_table[0][before & 255];
        }
    kvtier_crc_join[0] = kvtier_crc_power(8 * 2 * KVTIER_CRC_LONG - 33);
    kvtier_crc_join[1] = kvtier_crc_power(8 * KVTIER_CRC_LONG - 33);
    kvtier_crc_join[2] = kvtier_crc_power(8 * 2 * KVTIER_CRC_SHORT - 33);
    kvtier_crc_join[3] = kvtier_crc_power(8 * KVTIER_CRC_SHORT - 33);
    kvtier_crc_update = kvtier_crc_portable;
#if defined(__x86_64__)
    if (kvtier_crc_has_instruction())
        kvtier_crc_update = kvtier_crc_sse42;
#endif
}

static inline uint32_t kvtier_crc32c(uint32_t value, const void *data, size_t n)
{
    return ~kvtier_crc_update(~value, (const unsigned char *)data, n);
}

static inline uint32_t kvtier_crc32c_tables(uint32_t value, const void *data, size_t n)
{
    return ~kvtier_crc_portable(~value, (const unsigned char *)data, n);
}

#endif
