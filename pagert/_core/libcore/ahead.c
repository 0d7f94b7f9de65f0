/* SPDX-License-Identifier: Apache-2.0
 *
 * ahead: what is done before anyone asks for it. The policy says what comes, who can go and who is worth
 * writing; here it becomes prefetches, evictions and writebacks, as many as the links can take without being
 * late for what is asked for.
 */
#include "internal.h"

enum { WRITES_AHEAD = 16 }; /* transfers that go on at most when one more page is written ahead */

/* Pages that wait for a fetch to start. */
static uint32_t fetch_backlog(const pagert_core *core)
{
    return core->queues[PAGERT_HOST_TO_DEVICE].count + core->queues[PAGERT_FLASH_TO_DEVICE].count +
           core->queues[PAGERT_FLASH_TO_HOST].count + core->queues[QUEUE_HOST_WAIT].count;
}

static uint32_t writeback_backlog(const pagert_core *core)
{
    return core->queues[PAGERT_DEVICE_TO_HOST].count + core->queues[PAGERT_DEVICE_TO_FLASH].count;
}

static uint32_t fetch_ahead(pagert_core *core, uint32_t backlog_max)
{
    uint32_t started = 0;
    pagert_access access = {.mode = PAGERT_READ};
    uint32_t first_page, page_count, time;
    while (fetch_backlog(core) < backlog_max &&
           core->policy->upcoming(core, &first_page, &page_count, &time)) {
        const page *head = &core->pages[core->pages[first_page].region];
        access.region = (pagert_region){core->pages[first_page].region, head->generation};
        access.offset_bytes = (uint64_t)(first_page - access.region.first_page) << core->page_shift;
        access.size_bytes = (uint64_t)page_count << core->page_shift;
        if (first_page + page_count == access.region.first_page + head->page_count)
            access.size_bytes -= core->config.page_bytes - head->tail_bytes;
        if (pin_prefetch(core, access.region, access.offset_bytes, access.size_bytes, time) != 1)
            break;
        core->policy->fetched(core);
        started += page_count;
    }
    return started;
}

/* Write dirty pages that will have to go while the links have little to do. Only into frames that are free: to
 * drop a host copy for one would make another page dirty again, and that without end. */
static uint32_t write_ahead(pagert_core *core)
{
    uint32_t started = 0;
    while (!core->write_ahead_failed && core->queues[QUEUE_HOST_WAIT].count == 0 &&
           frame_set_free_count(&core->sets[core->lower_tier]) > 0 &&
           core->in_flight + writeback_backlog(core) < WRITES_AHEAD) {
        uint32_t index = core->policy->writable(core);
        if (index == NONE)
            break;
        set_flag(&core->pages[index], PAGE_CLEANING);
        page_advance(core, index);
        lower_grant_host(core);
        started++;
    }
    return started;
}

uint32_t pagert_look_ahead(pagert_core *core, uint32_t backlog_max)
{
    uint32_t index;
    if (core->policy->upcoming == NULL || pin_is_waited_for(core))
        return 0;
    while ((index = core->policy->leaver(core)) != NONE)
        page_start_leaving(core, index);
    uint32_t started = fetch_ahead(core, backlog_max);
    return started + write_ahead(core);
}
