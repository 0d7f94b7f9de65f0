/* SPDX-License-Identifier: Apache-2.0
 *
 * ahead: what is done before anyone asks for it. The policy says what comes, who can go and who is worth
 * writing; here it becomes prefetches, evictions and writebacks, as many as the links can take without being
 * late for what is asked for.
 */
#include "internal.h"

enum { WRITES_AHEAD = 16 }; /* transfers that go on at most when one more page is written ahead */

/* Pages that wait for a fetch to start. */
static uint32_t fetch_backlog(const pagert_pager *pager)
{
    return pager->queues[PAGERT_HOST_TO_DEVICE].count + pager->queues[PAGERT_FLASH_TO_DEVICE].count +
           pager->queues[PAGERT_FLASH_TO_HOST].count + pager->queues[QUEUE_HOST_WAIT].count;
}

static uint32_t writeback_backlog(const pagert_pager *pager)
{
    return pager->queues[PAGERT_DEVICE_TO_HOST].count + pager->queues[PAGERT_DEVICE_TO_FLASH].count;
}

static uint32_t fetch_ahead(pagert_pager *pager, uint32_t backlog_max)
{
    uint32_t started = 0;
    pagert_access access = {.mode = PAGERT_READ};
    uint32_t first_page, page_count, time;
    while (fetch_backlog(pager) < backlog_max &&
           pager->policy->upcoming(pager, &first_page, &page_count, &time)) {
        const page *head = &pager->pages[pager->pages[first_page].region];
        access.region = (pagert_region){pager->pages[first_page].region, head->generation};
        access.offset_bytes = (uint64_t)(first_page - access.region.first_page) << pager->page_shift;
        access.size_bytes = (uint64_t)page_count << pager->page_shift;
        if (first_page + page_count == access.region.first_page + head->page_count)
            access.size_bytes -= pager->config.page_bytes - head->tail_bytes;
        if (pin_prefetch(pager, access.region, access.offset_bytes, access.size_bytes, time) != 1)
            break;
        pager->policy->fetched(pager);
        started += page_count;
    }
    return started;
}

/* Write dirty pages that will have to go while the links have little to do. Only into frames that are free: to
 * drop a host copy for one would make another page dirty again, and that without end. */
static uint32_t write_ahead(pagert_pager *pager)
{
    uint32_t started = 0;
    while (!pager->write_ahead_failed && pager->queues[QUEUE_HOST_WAIT].count == 0 &&
           frame_set_free_count(&pager->sets[pager->lower_tier]) > 0 &&
           pager->in_flight + writeback_backlog(pager) < WRITES_AHEAD) {
        uint32_t index = pager->policy->writable(pager);
        if (index == NONE)
            break;
        set_flag(&pager->pages[index], PAGE_CLEANING);
        page_advance(pager, index);
        lower_grant_host(pager);
        started++;
    }
    return started;
}

uint32_t pagert_look_ahead(pagert_pager *pager, uint32_t backlog_max)
{
    uint32_t index;
    if (pager->policy->upcoming == NULL || pin_is_waited_for(pager))
        return 0;
    while ((index = pager->policy->leaver(pager)) != NONE)
        page_start_leaving(pager, index);
    uint32_t started = fetch_ahead(pager, backlog_max);
    return started + write_ahead(pager);
}
