/* SPDX-License-Identifier: Apache-2.0
 *
 * Compares the tree over available frames with a row of bytes: where the first run of each length lies, and the next
 * frame from any place, after random changes of one frame, of rows and of everything.
 *
 * usage: frame_runs [seed [rounds]]
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../pagert/_core/libcore/internal.h"

enum { FRAMES_MAX = 20000, STEPS = 400 };

static uint64_t state;
static unsigned char available[FRAMES_MAX];

/* xorshift64* */
static uint32_t below(uint32_t limit)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * 0x2545f4914f6cdd1du) >> 32) % limit;
}

static uint32_t first_run(uint32_t frame_count, uint32_t wanted)
{
    uint32_t length = 0;
    for (uint32_t frame = 0; frame < frame_count; frame++) {
        length = available[frame] ? length + 1 : 0;
        if (length == wanted)
            return frame + 1 - wanted;
    }
    return PAGERT_NONE;
}

static uint32_t next_from(uint32_t frame_count, uint32_t frame)
{
    while (frame < frame_count && !available[frame])
        frame++;
    return frame < frame_count ? frame : PAGERT_NONE;
}

static void change(frame_runs *runs, uint32_t first, uint32_t count, int value)
{
    for (uint32_t frame = first; frame < first + count; frame++) {
        available[frame] = (unsigned char)value;
        frame_runs_set(runs, frame, value != 0);
    }
}

static int run_round(void)
{
    static const uint32_t sizes[] = {1, 63, 64, 65, 128, 4095, 4096, 4097};
    uint32_t frame_count = below(2) ? sizes[below(8)] : 1 + below(FRAMES_MAX);
    void *memory = calloc(1, frame_runs_bytes(frame_count)); /* exact: a sanitizer sees what goes beyond */
    if (memory == NULL)
        return 1;
    frame_runs runs;
    frame_runs_init(&runs, frame_count, memory);
    memset(available, 1, frame_count);
    int wrong = 0;
    for (int step = 0; step < STEPS && !wrong; step++) {
        uint32_t first = below(frame_count), room = frame_count - first;
        uint32_t kind = below(20);
        if (kind == 0)
            change(&runs, 0, frame_count, (int)below(2));
        else if (kind < 8)
            change(&runs, first, 1 + below(room < 300 ? room : 300), (int)below(2));
        else
            change(&runs, first, 1, (int)below(2));
        uint32_t length = 1 + below(below(2) ? frame_count : frame_count < 200 ? frame_count : 200);
        wrong |= frame_runs_find(&runs, length) != first_run(frame_count, length);
        wrong |= frame_runs_next(&runs, first) != next_from(frame_count, first);
        wrong |= frame_runs_next(&runs, frame_count) != PAGERT_NONE;
        wrong |= frame_runs_contains(&runs, first) != available[first];
    }
    free(memory);
    return wrong;
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    uint64_t rounds = argc > 2 ? strtoull(argv[2], NULL, 0) : 100;
    printf("frame_runs: seeds %" PRIu64 " to %" PRIu64 "\n", seed, seed + rounds - 1);
    fflush(stdout);
    for (uint64_t round = 0; round < rounds; round++) {
        state = (seed + round) * 0x9e3779b97f4a7c15u + 1;
        if (run_round()) {
            fprintf(stderr, "frame_runs: wrong with seed %" PRIu64 "\n", seed + round);
            return 1;
        }
    }
    puts("frame_runs: passed");
    return 0;
}
