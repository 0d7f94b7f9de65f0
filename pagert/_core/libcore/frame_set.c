/* SPDX-License-Identifier: Apache-2.0
 *
 * frame_set: which frames of a tier are used. Finding, taking and giving back cost one step a level, at
 * most six. Owns nothing but the words it is given; never walks all frames.
 *
 * Invariant: bit i of level k+1 is set if and only if word i of level k is full. Bits past the last frame
 * count as used without being set: take() wraps before it reaches them.
 */
#include "internal.h"

static uint32_t words_of_level(uint32_t bits) { return bits / 64 + (bits % 64 != 0); }

uint64_t frame_set_words(uint32_t frame_count)
{
    uint64_t total = 0;
    uint32_t bits = frame_count;
    while (bits > 0) {
        uint32_t words = words_of_level(bits);
        total += words;
        if (words == 1)
            break;
        bits = words;
    }
    return total;
}

void frame_set_init(frame_set *set, uint32_t frame_count, uint64_t *words)
{
    *set = (frame_set){.frame_count = frame_count};
    uint32_t bits = frame_count;
    while (bits > 0) {
        uint32_t count = words_of_level(bits);
        set->level[set->level_count++] = words;
        words += count;
        if (count == 1)
            break;
        bits = count;
    }
}

bool frame_set_contains(const frame_set *set, uint32_t frame)
{
    PAGERT_ASSERT(frame < set->frame_count);
    return (set->level[0][frame / 64] >> (frame % 64)) & 1;
}

void frame_set_add(frame_set *set, uint32_t frame)
{
    PAGERT_ASSERT(!frame_set_contains(set, frame));
    for (uint32_t level = 0; level < set->level_count; level++) {
        uint64_t *word = &set->level[level][frame / 64];
        *word |= UINT64_C(1) << (frame % 64);
        if (*word != UINT64_MAX)
            break;
        frame /= 64;
    }
    set->used_count++;
    if (set->used_count > set->peak_count)
        set->peak_count = set->used_count;
}

void frame_set_remove(frame_set *set, uint32_t frame)
{
    PAGERT_ASSERT(frame_set_contains(set, frame));
    for (uint32_t level = 0; level < set->level_count; level++) {
        uint64_t *word = &set->level[level][frame / 64];
        bool was_full = *word == UINT64_MAX;
        *word &= ~(UINT64_C(1) << (frame % 64));
        if (!was_full)
            break;
        frame /= 64;
    }
    set->used_count--;
}

/* The first free frame at or after `from`, or NONE. */
uint32_t frame_set_next_free(const frame_set *set, uint32_t from)
{
    uint32_t level = 0, index = from;
    for (;;) { /* climb until a word has a zero at or after the index */
        uint32_t limit = level == 0 ? set->frame_count : 0;
        if (level == 0 && index >= limit)
            return NONE;
        uint64_t zeros = ~set->level[level][index / 64] & (UINT64_MAX << (index % 64));
        if (zeros != 0) {
            index = (index & ~UINT32_C(63)) + (uint32_t)__builtin_ctzll(zeros);
            break;
        }
        index = index / 64 + 1;
        if (++level == set->level_count)
            return NONE;
        uint32_t words_below = set->frame_count;
        for (uint32_t i = 0; i < level; i++)
            words_below = words_of_level(words_below);
        if (index >= words_below)
            return NONE;
    }
    while (level > 0) { /* descend to the first zero below */
        level--;
        uint32_t words_here = set->frame_count;
        for (uint32_t i = 0; i <= level; i++)
            words_here = words_of_level(words_here);
        if (index >= words_here)
            return NONE;
        uint64_t zeros = ~set->level[level][index];
        index = index * 64 + (uint32_t)__builtin_ctzll(zeros);
    }
    return index < set->frame_count ? index : NONE;
}

uint32_t frame_set_take(frame_set *set)
{
    if (set->used_count == set->frame_count)
        return NONE;
    uint32_t frame = frame_set_next_free(set, set->cursor);
    if (frame == NONE)
        frame = frame_set_next_free(set, 0);
    PAGERT_ASSERT(frame != NONE);
    set->cursor = frame + 1 == set->frame_count ? 0 : frame + 1;
    frame_set_add(set, frame);
    return frame;
}
