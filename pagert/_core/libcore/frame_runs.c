/* SPDX-License-Identifier: Apache-2.0
 *
 * frame_runs: which device frames are available (free, or being vacated and promised to nobody), and where so many
 * of them lie side by side. Owns nothing but the memory it is given.
 *
 * A bit for each frame, and over the words of 64 a binary tree that knows the longest run below each node. A change
 * sets the bit only and marks the word as stale; a search brings the tree up to date first. So it costs nothing
 * where windows of one frame come and go, and O(log n) for each word that changed where they are longer.
 *
 * Invariant: a node is right unless a word below it is stale. Bits past the last frame stay zero.
 */
#include "internal.h"

static uint32_t words_for(uint32_t bits) { return bits / 64 + (bits % 64 != 0); }

static uint32_t leaf_count_for(uint32_t frame_count)
{
    uint32_t leaves = 1;
    while (leaves < words_for(frame_count))
        leaves *= 2;
    return leaves;
}

/* Node 1 is the root, the children of n are 2n and 2n + 1, the leaves come last. */
uint64_t frame_runs_bytes(uint32_t frame_count)
{
    uint32_t words = words_for(frame_count);
    return (words + (uint64_t)words_for(words)) * sizeof(uint64_t) +
           2 * (uint64_t)leaf_count_for(frame_count) * sizeof(run_node);
}

void frame_runs_init(frame_runs *runs, uint32_t frame_count, void *memory)
{
    uint32_t words = words_for(frame_count), left = frame_count;
    *runs = (frame_runs){.frame_count = frame_count, .leaf_count = leaf_count_for(frame_count)};
    runs->words = memory;
    runs->stale = runs->words + words;
    runs->nodes = (run_node *)(void *)(runs->stale + words_for(words));
    for (uint32_t word = 0; word < words; word++, left -= 64) {
        runs->words[word] = left < 64 ? (UINT64_C(1) << left) - 1 : UINT64_MAX;
        runs->stale[word / 64] |= UINT64_C(1) << (word % 64);
        if (left <= 64)
            break;
    }
}

void frame_runs_set(frame_runs *runs, uint32_t frame, bool available)
{
    uint64_t *word = &runs->words[frame / 64], bit = UINT64_C(1) << (frame % 64);
    *word = available ? *word | bit : *word & ~bit;
    runs->stale[frame / 64 / 64] |= UINT64_C(1) << (frame / 64 % 64);
}

bool frame_runs_contains(const frame_runs *runs, uint32_t frame)
{
    return (runs->words[frame / 64] >> (frame % 64)) & 1;
}

static run_node leaf_of(uint64_t word)
{
    if (word == UINT64_MAX)
        return (run_node){64, 64, 64};
    run_node leaf = {(uint32_t)__builtin_ctzll(~word), (uint32_t)__builtin_clzll(~word), 0};
    for (; word != 0; word &= word << 1)
        leaf.longest++;
    return leaf;
}

/* `half_frames`: what each child covers. */
static run_node join(run_node left, run_node right, uint32_t half_frames)
{
    run_node both = {left.prefix, right.suffix, left.suffix + right.prefix};
    if (left.prefix == half_frames)
        both.prefix += right.prefix;
    if (right.suffix == half_frames)
        both.suffix += left.suffix;
    if (left.longest > both.longest)
        both.longest = left.longest;
    if (right.longest > both.longest)
        both.longest = right.longest;
    return both;
}

static void refresh(frame_runs *runs)
{
    uint32_t words = words_for(runs->frame_count);
    for (uint32_t k = 0; k < words_for(words); k++) {
        for (; runs->stale[k] != 0; runs->stale[k] &= runs->stale[k] - 1) {
            uint32_t word = k * 64 + (uint32_t)__builtin_ctzll(runs->stale[k]);
            uint32_t node = runs->leaf_count + word, half_frames = 64;
            runs->nodes[node] = leaf_of(runs->words[word]);
            for (node /= 2; node > 0; node /= 2, half_frames *= 2)
                runs->nodes[node] = join(runs->nodes[2 * node], runs->nodes[2 * node + 1], half_frames);
        }
    }
}

/* The first run of `count` available frames, or NONE. */
uint32_t frame_runs_find(frame_runs *runs, uint32_t count)
{
    refresh(runs);
    if (runs->nodes[1].longest < count)
        return NONE;
    uint32_t node = 1, first = 0, half_frames = 32 * runs->leaf_count; /* `first`: the node's first frame */
    for (; node < runs->leaf_count; half_frames /= 2) {
        const run_node *left = &runs->nodes[2 * node], *right = left + 1;
        node *= 2;
        if (left->longest >= count)
            continue;
        if (left->suffix + right->prefix >= count)
            return first + half_frames - left->suffix;
        first += half_frames;
        node++;
    }
    uint64_t starts = runs->words[node - runs->leaf_count];
    for (uint32_t k = 1; k < count; k++)
        starts &= starts >> 1;
    return first + (uint32_t)__builtin_ctzll(starts);
}

/* The first available frame at or after `from`, or NONE. O(words). */
uint32_t frame_runs_next(const frame_runs *runs, uint32_t from)
{
    uint32_t words = words_for(runs->frame_count);
    if (from >= runs->frame_count)
        return NONE;
    uint64_t bits = runs->words[from / 64] & (UINT64_MAX << (from % 64));
    for (uint32_t word = from / 64;;) {
        if (bits != 0)
            return word * 64 + (uint32_t)__builtin_ctzll(bits);
        if (++word == words)
            return NONE;
        bits = runs->words[word];
    }
}
