/* SPDX-License-Identifier: Apache-2.0
 *
 * extents: the free runs of the virtual address space, kept inside the page table's own free entries.
 *
 * The first page of a run has its length, the last one the way back to the first, so that neighbours are
 * joined at once. Runs hang on lists by size, eight steps to a power of two, as in the two-level segregated
 * fit allocator (Masmano, Ripoll, Crespo, Real: TLSF, ECRTS 2004). Taking and giving back are O(1), except
 * that the last list that could hold a fit is searched before address space is said to be exhausted.
 */
#include "list.h"

static bool is_free(const page *p, uint32_t end) { return !has(p, PAGE_LIVE) && has(p, end); }

/* The class of a run: the largest class whose smallest size is <= page_count. */
static uint32_t class_of(uint32_t page_count)
{
    if (page_count < 8)
        return page_count;
    uint32_t power = 31 - (uint32_t)__builtin_clz(page_count);
    return (power - 2) * 8 + ((page_count >> (power - 3)) & 7);
}

static void insert(pagert_core *core, uint32_t first, uint32_t count)
{
    page *head = &core->pages[first], *last = &core->pages[first + count - 1];
    uint32_t class = class_of(count);
    head->page_count = count;
    last->region = first;
    set_flag(head, PAGE_EXTENT_FIRST);
    set_flag(last, PAGE_EXTENT_LAST);
    list_append(core, &core->extents.free[class], LIST_QUEUE, first);
    core->extents.non_empty[class / 64] |= UINT64_C(1) << (class % 64);
}

static void take_out(pagert_core *core, uint32_t first)
{
    page *head = &core->pages[first];
    uint32_t class = class_of(head->page_count);
    clear_flag(&core->pages[first + head->page_count - 1], PAGE_EXTENT_LAST);
    clear_flag(head, PAGE_EXTENT_FIRST);
    list_remove(core, &core->extents.free[class], LIST_QUEUE, first);
    if (core->extents.free[class].count == 0)
        core->extents.non_empty[class / 64] &= ~(UINT64_C(1) << (class % 64));
}

void extents_init(pagert_core *core)
{
    for (uint32_t class = 0; class < EXTENT_CLASSES; class++)
        list_init(&core->extents.free[class]);
    insert(core, 0, core->config.page_count);
}

/* The first run of a class above `class`: any of them is long enough. */
static uint32_t first_above(const pagert_core *core, uint32_t class)
{
    for (uint32_t next = class + 1; next < EXTENT_CLASSES; next = (next / 64 + 1) * 64) {
        uint64_t word = core->extents.non_empty[next / 64] & (UINT64_MAX << (next % 64));
        if (word != 0)
            return core->extents.free[next / 64 * 64 + (uint32_t)__builtin_ctzll(word)].oldest;
    }
    return NONE;
}

uint32_t extents_take(pagert_core *core, uint32_t page_count)
{
    uint32_t class = class_of(page_count);
    uint32_t first = core->extents.free[class].oldest; /* O(1) where runs of this very size come back */
    if (first == NONE || core->pages[first].page_count < page_count)
        first = first_above(core, class);
    if (first == NONE) {
        first = core->extents.free[class].oldest;
        while (first != NONE && core->pages[first].page_count < page_count)
            first = core->pages[first].links[LIST_QUEUE].younger;
    }
    if (first == NONE)
        return NONE;
    uint32_t found = core->pages[first].page_count;
    take_out(core, first);
    if (found > page_count)
        insert(core, first + page_count, found - page_count);
    return first;
}

void extents_give(pagert_core *core, uint32_t first_page, uint32_t page_count)
{
    if (first_page > 0 && is_free(&core->pages[first_page - 1], PAGE_EXTENT_LAST)) {
        uint32_t before = core->pages[first_page - 1].region;
        take_out(core, before);
        page_count += first_page - before;
        first_page = before;
    }
    uint32_t end = first_page + page_count;
    if (end < core->config.page_count && is_free(&core->pages[end], PAGE_EXTENT_FIRST)) {
        uint32_t after = core->pages[end].page_count;
        take_out(core, end);
        page_count += after;
    }
    insert(core, first_page, page_count);
}
