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

static void insert(pagert_pager *pager, uint32_t first, uint32_t count)
{
    page *head = &pager->pages[first], *last = &pager->pages[first + count - 1];
    uint32_t class = class_of(count);
    head->page_count = count;
    last->region = first;
    set_flag(head, PAGE_EXTENT_FIRST);
    set_flag(last, PAGE_EXTENT_LAST);
    list_append(pager, &pager->extents.free[class], LIST_QUEUE, first);
    pager->extents.non_empty[class / 64] |= UINT64_C(1) << (class % 64);
}

static void take_out(pagert_pager *pager, uint32_t first)
{
    page *head = &pager->pages[first];
    uint32_t class = class_of(head->page_count);
    clear_flag(&pager->pages[first + head->page_count - 1], PAGE_EXTENT_LAST);
    clear_flag(head, PAGE_EXTENT_FIRST);
    list_remove(pager, &pager->extents.free[class], LIST_QUEUE, first);
    if (pager->extents.free[class].count == 0)
        pager->extents.non_empty[class / 64] &= ~(UINT64_C(1) << (class % 64));
}

void extents_init(pagert_pager *pager)
{
    for (uint32_t class = 0; class < EXTENT_CLASSES; class++)
        list_init(&pager->extents.free[class]);
    insert(pager, 0, pager->config.page_count);
}

/* The first run of a class above `class`: any of them is long enough. */
static uint32_t first_above(const pagert_pager *pager, uint32_t class)
{
    for (uint32_t next = class + 1; next < EXTENT_CLASSES; next = (next / 64 + 1) * 64) {
        uint64_t word = pager->extents.non_empty[next / 64] & (UINT64_MAX << (next % 64));
        if (word != 0)
            return pager->extents.free[next / 64 * 64 + (uint32_t)__builtin_ctzll(word)].oldest;
    }
    return NONE;
}

uint32_t extents_take(pagert_pager *pager, uint32_t page_count)
{
    uint32_t class = class_of(page_count);
    uint32_t first = pager->extents.free[class].oldest; /* O(1) where runs of this very size come back */
    if (first == NONE || pager->pages[first].page_count < page_count)
        first = first_above(pager, class);
    if (first == NONE) {
        first = pager->extents.free[class].oldest;
        while (first != NONE && pager->pages[first].page_count < page_count)
            first = pager->pages[first].links[LIST_QUEUE].younger;
    }
    if (first == NONE)
        return NONE;
    uint32_t found = pager->pages[first].page_count;
    take_out(pager, first);
    if (found > page_count)
        insert(pager, first + page_count, found - page_count);
    return first;
}

void extents_give(pagert_pager *pager, uint32_t first_page, uint32_t page_count)
{
    if (first_page > 0 && is_free(&pager->pages[first_page - 1], PAGE_EXTENT_LAST)) {
        uint32_t before = pager->pages[first_page - 1].region;
        take_out(pager, before);
        page_count += first_page - before;
        first_page = before;
    }
    uint32_t end = first_page + page_count;
    if (end < pager->config.page_count && is_free(&pager->pages[end], PAGE_EXTENT_FIRST)) {
        uint32_t after = pager->pages[end].page_count;
        take_out(pager, end);
        page_count += after;
    }
    insert(pager, first_page, page_count);
}
