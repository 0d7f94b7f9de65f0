/* SPDX-License-Identifier: Apache-2.0
 *
 * lower: frames of the tiers below the device.
 *
 * Pages that need a host frame wait in one queue, first come first served. That order is what keeps three
 * tiers from locking up: a victim queues before the page that will have its device frame, so whoever is
 * first in line waits for nobody behind it.
 */
#include "list.h"

/* A page whose flash copy could be spared, since a faster tier has one too. O(device and host frames),
 * and only when flash is full. */
static uint32_t find_spare_flash_copy(pagert_core *core)
{
    uint32_t count = core->config.frame_count[PAGERT_DEVICE];
    for (uint32_t step = 0; step < count && !core->flushing; step++) { /* a flush wants them clean */
        uint32_t frame = (core->reclaim_cursor + step) % count, index = core->frames[frame].page;
        if (index == NONE)
            continue;
        const page *p = &core->pages[index];
        if (p->copy[PAGERT_DEVICE] == COPY_VALID && p->copy[PAGERT_FLASH] == COPY_VALID &&
            !has(p, PAGE_LEAVING) && !has(p, PAGE_IN_FLIGHT)) {
            core->reclaim_cursor = (frame + 1) % count;
            return index;
        }
    }
    for (uint32_t list = 0; list < HOST_LISTS; list++)
        for (uint32_t index = core->host_lists[list].oldest; index != NONE;
             index = core->pages[index].links[LIST_HOST].younger)
            if (core->pages[index].copy[PAGERT_FLASH] == COPY_VALID)
                return index;
    return NONE;
}

uint32_t lower_take_flash(pagert_core *core)
{
    if (!configured(core, PAGERT_FLASH))
        return NONE;
    uint32_t frame = frame_set_take(&core->sets[PAGERT_FLASH]);
    if (frame == NONE) {
        uint32_t index = find_spare_flash_copy(core);
        if (index == NONE)
            return NONE;
        page_drop_lower(core, index, PAGERT_FLASH);
        frame = frame_set_take(&core->sets[PAGERT_FLASH]);
    }
    return frame;
}

void lower_end_leaving_host(pagert_core *core, uint32_t index)
{
    clear_flag(&core->pages[index], PAGE_LEAVING_HOST);
    core->host_leaving--;
}

/* Free a host frame, or start to: drop a copy that another tier has, else write the oldest to flash.
 * During a flush a copy that keeps a device page clean goes to flash rather than away. */
enum departure { DROPPED, STARTED, NO_VICTIM };
static enum departure start_departure(pagert_core *core)
{
    for (uint32_t list = 0; list < HOST_LISTS; list++) {
        bool may_drop = list == HOST_SHADOW && !core->flushing;
        uint32_t index = core->host_lists[list].oldest;
        if (list == HOST_ONLY && core->policy->host_victim != NULL) {
            uint32_t best = core->policy->host_victim(core);
            if (best != NONE && core->pages[best].queue == QUEUE_NONE)
                index = best;
        }
        while (index != NONE && !may_drop && core->pages[index].queue != QUEUE_NONE)
            index = core->pages[index].links[LIST_HOST].younger; /* it moves within the device now */
        if (index == NONE)
            continue;
        page *p = &core->pages[index];
        if (may_drop || p->copy[PAGERT_FLASH] == COPY_VALID) {
            page_drop_lower(core, index, PAGERT_HOST);
            page_advance(core, index); /* a page on its way to the device starts again from flash */
            return DROPPED;
        }
        uint32_t frame = lower_take_flash(core);
        if (frame == NONE)
            continue;
        p->frame[PAGERT_FLASH] = frame;
        p->copy[PAGERT_FLASH] = COPY_INCOMING;
        set_flag(p, PAGE_LEAVING_HOST);
        core->host_leaving++;
        page_enqueue(core, index, PAGERT_HOST_TO_FLASH);
        page_relist(core, index);
        return STARTED;
    }
    return NO_VICTIM;
}

/* The first in line for a host frame will not get one: it fails, so that the others can go on. `cause`: the
 * transfer that was to free one, or NULL if the tiers are full. */
void lower_fail_waiter(pagert_core *core, const pagert_failure *cause)
{
    uint32_t index = core->queues[QUEUE_HOST_WAIT].oldest;
    if (index == NONE)
        return;
    bool fetch = core->pages[index].copy[PAGERT_DEVICE] == COPY_INCOMING;
    pagert_failure full = {index, fetch ? PAGERT_FLASH_TO_HOST : PAGERT_DEVICE_TO_HOST, PAGERT_E_FULL};
    const pagert_failure *failure = cause != NULL ? cause : &full;
    page_leave_queue(core, index);
    if (fetch)
        fail_page(core, index, failure, cause == NULL);
    else
        fail_writeback(core, index, failure, cause == NULL);
}

/* Give host frames to those who wait. Called at the end of every call that may have changed something. */
void lower_grant_host(pagert_core *core)
{
    page_list *waiting = &core->queues[QUEUE_HOST_WAIT];
    while (waiting->count > 0) {
        uint32_t frame = frame_set_take(&core->sets[PAGERT_HOST]);
        if (frame != NONE) {
            uint32_t index = waiting->oldest;
            page *p = &core->pages[index];
            page_leave_queue(core, index);
            p->frame[PAGERT_HOST] = frame;
            p->copy[PAGERT_HOST] = COPY_INCOMING;
            page_advance(core, index);
            continue;
        }
        enum departure departure = NO_VICTIM;
        if (core->host_leaving < waiting->count)
            departure = start_departure(core);
        if (departure != NO_VICTIM)
            continue;
        if (core->host_leaving > 0 || core->host_in_transfer > 0 || core->move_in_transfer > 0)
            return; /* after those there may be a victim */
        lower_fail_waiter(core, NULL);
    }
}
