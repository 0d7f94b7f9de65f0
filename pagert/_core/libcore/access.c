/* SPDX-License-Identifier: Apache-2.0
 *
 * access: byte ranges of regions as pages.
 */
#include "internal.h"

static uint64_t region_bytes(const pagert_core *core, const page *head)
{
    return ((uint64_t)(head->page_count - 1) << core->page_shift) + head->tail_bytes;
}

int region_pages(const pagert_core *core, pagert_region region, uint64_t offset_bytes,
                 uint64_t size_bytes, uint32_t *first_page, uint32_t *page_count)
{
    if (region.first_page >= core->config.page_count)
        return PAGERT_E_STALE;
    const page *head = &core->pages[region.first_page];
    if (!has(head, PAGE_LIVE) || !has(head, PAGE_HEAD) || has(head, PAGE_DYING) ||
        head->generation != region.generation)
        return PAGERT_E_STALE;
    uint64_t total = region_bytes(core, head);
    if (size_bytes == 0 || offset_bytes >= total || size_bytes > total - offset_bytes)
        return PAGERT_E_ARGUMENT;
    uint64_t first = offset_bytes >> core->page_shift;
    uint64_t last = (offset_bytes + size_bytes - 1) >> core->page_shift;
    *first_page = region.first_page + (uint32_t)first;
    *page_count = (uint32_t)(last - first + 1);
    return 0;
}

/* Whether the access writes every byte that the page has: nothing of it need be fetched. */
bool access_overwrites(const pagert_core *core, const pagert_access *access, uint32_t index)
{
    if (access->mode != PAGERT_OVERWRITE)
        return false;
    const page *head = &core->pages[access->region.first_page];
    uint64_t start = (uint64_t)(index - access->region.first_page) << core->page_shift;
    uint64_t end = start + core->config.page_bytes, total = region_bytes(core, head);
    if (end > total)
        end = total;
    return access->offset_bytes <= start && access->offset_bytes + access->size_bytes >= end;
}

bool pin_covers(const pagert_pin *pin, uint32_t index)
{
    for (uint32_t k = 0; k < pin->access_count; k++)
        if (index - pin->accesses[k].first_page < pin->accesses[k].page_count)
            return true;
    return false;
}

/* Whether the pin writes every byte of the page and reads none, by any of its accesses. */
bool pin_overwrites(const pagert_core *core, const pagert_pin *pin, uint32_t index)
{
    bool overwritten = false;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        if (index - a->first_page >= a->page_count)
            continue;
        if (!access_overwrites(core, a, index))
            return false;
        overwritten = true;
    }
    return overwritten;
}
