/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC32C (Castagnoli polynomial, reflected), as in iSCSI and ext4.
 *
 * There are three ways, and which one runs is decided once, when the first checksum is asked for.
 *
 * PORTABLE takes eight bytes at a time through eight tables.
 *
 * INSTRUCTION: the processor's instruction takes eight bytes and has a latency of three cycles but
 * starts one each cycle, so three independent stripes run interleaved, and their results are
 * joined. Appending n zero bytes is a linear map of the 32 bits of the checksum; for the two stripe
 * lengths in use it lies in four tables of 256 words, so that joining costs a few loads.
 *
 * FOLDING: carry-less products of 512 bits at a time. A block of 256 bytes times x^2048, modulo the
 * polynomial, is added to the next block (Gopal et al., Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction, Intel 2009); the instruction reduces the last one.
 * Measured on a Zen 5 core, from DRAM, where a checksum is computed once a page: 37 GB/s for the
 * instruction's 18.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HARDWARE_TARGET __attribute__((target("sse4.2")))
#define HARDWARE_WORD(crc, word) ((uint32_t)_mm_crc32_u64((crc), (word)))
#define HARDWARE_BYTE(crc, byte) (_mm_crc32_u8((crc), (byte)))
static int processor_has_it(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
}
#define FOLDING_TARGET __attribute__((target("sse4.2,avx512f,avx512vl,vpclmulqdq")))
static int processor_has_folding(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq");
}
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <sys/auxv.h>
#define HARDWARE_TARGET /* the instructions are switched on where they stand, see below */
static inline uint32_t arm_word(uint32_t crc, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
static inline uint32_t arm_byte(uint32_t crc, uint8_t byte)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}
#define HARDWARE_WORD(crc, word) arm_word((crc), (word))
#define HARDWARE_BYTE(crc, byte) arm_byte((crc), (byte))
static int processor_has_it(void)
{
    const unsigned long crc32_bit = 1ul << 7; /* HWCAP_CRC32 */
    return (getauxval(AT_HWCAP) & crc32_bit) != 0;
}
#endif

enum { STRIPE_LONG = 4096, STRIPE_SHORT = 256, CACHE_LINE = 64, PREFETCH_BYTES = 2048 };
enum { FOLD_BYTES = 256 };

#define POLYNOMIAL 0x82f63b78u /* reflected */

typedef struct shift_tables {
    uint32_t of[4][256]; /* by byte of the checksum, lowest first */
} shift_tables;

static uint32_t byte_tables[8][256]; /* [k][b]: checksum of byte b with k zero bytes after it */
static shift_tables shift_long, shift_short;
static uint32_t (*ways[CRC32C_WAY_COUNT])(uint32_t state, const uint8_t *bytes,
                                          uint64_t size_bytes);
static unsigned best_way;
static pthread_once_t chosen = PTHREAD_ONCE_INIT;

static inline uint64_t load_word(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static uint32_t update_portable(uint32_t state, const uint8_t *bytes, uint64_t size_bytes)
{
    for (; size_bytes >= 8; bytes += 8, size_bytes -= 8) {
        uint64_t word = load_word(bytes);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        word ^= state;
        state = 0;
        for (int i = 0; i < 8; i++)
            state ^= byte_tables[7 - i][(word >> (8 * i)) & 0xff];
    }
    for (; size_bytes; bytes++, size_bytes--)
        state = (state >> 8) ^ byte_tables[0][(state ^ *bytes) & 0xff];
    return state;
}

static inline uint32_t append_zeros(const shift_tables *tables, uint32_t state)
{
    return tables->of[0][state & 0xff] ^ tables->of[1][(state >> 8) & 0xff] ^
           tables->of[2][(state >> 16) & 0xff] ^ tables->of[3][state >> 24];
}

static void fill_shift_tables(shift_tables *tables, uint32_t zero_bytes)
{
    uint32_t image[32]; /* of each single bit */
    for (int bit = 0; bit < 32; bit++) {
        uint32_t state = 1u << bit;
        for (uint32_t i = 0; i < zero_bytes; i++)
            state = (state >> 8) ^ byte_tables[0][state & 0xff];
        image[bit] = state;
    }
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t sum = 0;
            for (int bit = 0; bit < 8; bit++)
                if (value >> bit & 1)
                    sum ^= image[8 * byte + bit];
            tables->of[byte][value] = sum;
        }
}

#ifdef HARDWARE_WORD
HARDWARE_TARGET static inline uint32_t update_stripes(uint32_t state, const uint8_t *bytes,
                                                      uint32_t stripe_bytes,
                                                      const shift_tables *tables)
{
    uint32_t second = 0, third = 0;
    const uint8_t *end = bytes + stripe_bytes;
    const uint64_t two_stripes = 2 * (uint64_t)stripe_bytes;
    for (; bytes < end; bytes += CACHE_LINE) {
        /* The processor's own prefetch stops where a stripe ends. */
        __builtin_prefetch(bytes + PREFETCH_BYTES);
        __builtin_prefetch(bytes + stripe_bytes + PREFETCH_BYTES);
        __builtin_prefetch(bytes + two_stripes + PREFETCH_BYTES);
        for (int at = 0; at < CACHE_LINE; at += 8) {
            state = HARDWARE_WORD(state, load_word(bytes + at));
            second = HARDWARE_WORD(second, load_word(bytes + stripe_bytes + at));
            third = HARDWARE_WORD(third, load_word(bytes + two_stripes + at));
        }
    }
    return append_zeros(tables, append_zeros(tables, state) ^ second) ^ third;
}

HARDWARE_TARGET static uint32_t update_instruction(uint32_t state, const uint8_t *bytes,
                                                   uint64_t size_bytes)
{
    for (; size_bytes >= 3 * STRIPE_LONG; bytes += 3 * STRIPE_LONG, size_bytes -= 3 * STRIPE_LONG)
        state = update_stripes(state, bytes, STRIPE_LONG, &shift_long);
    for (; size_bytes >= 3 * STRIPE_SHORT;
         bytes += 3 * STRIPE_SHORT, size_bytes -= 3 * STRIPE_SHORT)
        state = update_stripes(state, bytes, STRIPE_SHORT, &shift_short);
    for (; size_bytes >= 8; bytes += 8, size_bytes -= 8)
        state = HARDWARE_WORD(state, load_word(bytes));
    for (; size_bytes; bytes++, size_bytes--)
        state = HARDWARE_BYTE(state, *bytes);
    return state;
}
#endif

#ifdef FOLDING_TARGET
/* What the low and the high half of 128 bits are multiplied with. */
static uint64_t fold_low, fold_high;

/* x^exponent modulo the polynomial, reflected; one bit up, since a product of reflected numbers is
 * short of one. */
static uint64_t power_of_x(uint32_t exponent)
{
    uint32_t power = 1u << 31;
    while (exponent--)
        power = (power >> 1) ^ (power & 1 ? POLYNOMIAL : 0);
    return (uint64_t)power << 1;
}

FOLDING_TARGET static inline __m512i fold(__m512i sum, __m512i factors, const uint8_t *bytes)
{
    const __m512i low = _mm512_clmulepi64_epi128(sum, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(sum, factors, 0x11);
    const int exclusive_or = 0x96; /* of all three */
    return _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(bytes), exclusive_or);
}

FOLDING_TARGET static uint32_t update_folding(uint32_t state, const uint8_t *bytes,
                                              uint64_t size_bytes)
{
    if (size_bytes < 2 * FOLD_BYTES)
        return update_instruction(state, bytes, size_bytes);
    const __m512i factors =
        _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold_high, (long long)fold_low));
    __m512i sum[4];
    for (int i = 0; i < 4; i++)
        sum[i] = _mm512_loadu_si512(bytes + 64 * i);
    sum[0] = _mm512_xor_si512(sum[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    bytes += FOLD_BYTES, size_bytes -= FOLD_BYTES;
    for (; size_bytes >= FOLD_BYTES; bytes += FOLD_BYTES, size_bytes -= FOLD_BYTES)
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(bytes + 64 * i + STRIPE_LONG);
            sum[i] = fold(sum[i], factors, bytes + 64 * i);
        }
    uint8_t last[FOLD_BYTES];
    for (int i = 0; i < 4; i++)
        _mm512_storeu_si512(last + 64 * i, sum[i]);
    return update_instruction(update_instruction(0, last, FOLD_BYTES), bytes, size_bytes);
}
#endif

static void choose(void)
{
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t state = value;
        for (int bit = 0; bit < 8; bit++)
            state = (state >> 1) ^ (state & 1 ? POLYNOMIAL : 0);
        byte_tables[0][value] = state;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t state = byte_tables[k - 1][value];
            byte_tables[k][value] = (state >> 8) ^ byte_tables[0][state & 0xff];
        }
    fill_shift_tables(&shift_long, STRIPE_LONG);
    fill_shift_tables(&shift_short, STRIPE_SHORT);
    ways[CRC32C_PORTABLE] = update_portable;
#ifdef HARDWARE_WORD
    if (processor_has_it())
        ways[best_way = CRC32C_INSTRUCTION] = update_instruction;
#endif
#ifdef FOLDING_TARGET
    fold_low = power_of_x(8 * FOLD_BYTES + 32);
    fold_high = power_of_x(8 * FOLD_BYTES - 32);
    if (best_way == CRC32C_INSTRUCTION && processor_has_folding())
        ways[best_way = CRC32C_FOLDING] = update_folding;
#endif
}

uint32_t pagert_crc32c(uint32_t seed, const void *bytes, uint64_t size_bytes)
{
    (void)pthread_once(&chosen, choose);
    return ~ways[best_way](~seed, bytes, size_bytes);
}

int pagert_crc32c_by(unsigned way, uint32_t seed, const void *bytes, uint64_t size_bytes,
                     uint32_t *checksum)
{
    (void)pthread_once(&chosen, choose);
    if (way >= CRC32C_WAY_COUNT || !ways[way])
        return -EOPNOTSUPP;
    *checksum = ~ways[way](~seed, bytes, size_bytes);
    return 0;
}

int pagert_crc32c_is_hardware(void)
{
    (void)pthread_once(&chosen, choose);
    return best_way != CRC32C_PORTABLE;
}
