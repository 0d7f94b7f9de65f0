/* SPDX-License-Identifier: Apache-2.0
 *
 * Every way to a CRC32C that this processor has, against the definition bit by bit: all sizes up to
 * a few kilobytes, larger ones around the units of each way, every alignment, with and without a
 * seed.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../../pagert/_core/libflash/internal.h"

enum { LARGEST = 70000, SMALL = 1400 };

static uint32_t bitwise(uint32_t seed, const uint8_t *bytes, uint64_t size_bytes)
{
    uint32_t state = ~seed;
    for (uint64_t i = 0; i < size_bytes; i++) {
        state ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            state = (state >> 1) ^ (0x82f63b78u & (0u - (state & 1)));
    }
    return ~state;
}

static int compare(unsigned way, uint32_t seed, const uint8_t *bytes, uint64_t size_bytes)
{
    uint32_t checksum;
    if (pagert_crc32c_by(way, seed, bytes, size_bytes, &checksum))
        return 0;
    if (checksum == bitwise(seed, bytes, size_bytes))
        return 1;
    fprintf(stderr, "way %u, seed %u, %llu bytes at alignment %u: wrong\n", way, seed,
            (unsigned long long)size_bytes, (unsigned)((uintptr_t)bytes % 64));
    abort();
}

int main(void)
{
    static const uint64_t large[] = {4096,  8192,  12287, 12288, 12289, 13056, 16384,
                                     24575, 24576, 36864, 65536, 65537, 69999};
    uint8_t *bytes = malloc(LARGEST + 64);
    if (!bytes)
        return 1;
    uint64_t state = 1;
    for (int i = 0; i < LARGEST + 64; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (uint8_t)(state >> 56);
    }
    for (unsigned way = 0; way < CRC32C_WAY_COUNT; way++) {
        int found = 0;
        for (uint64_t size_bytes = 0; size_bytes < SMALL; size_bytes++)
            found |= compare(way, (uint32_t)size_bytes * 2654435761u, bytes + size_bytes % 64,
                             size_bytes);
        for (unsigned i = 0; i < sizeof large / sizeof *large; i++)
            found |= compare(way, i % 2 ? 0 : 0xdeadbeefu, bytes + i, large[i]);
        printf("crc32c_ways: way %u %s\n", way, found ? "passed" : "is not in this processor");
    }
    free(bytes);
    return 0;
}
