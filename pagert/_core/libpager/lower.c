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
static uint32_t find_spare_flash_copy(pagert_pager *pager)
{
    uint32_t count = pager->config.frame_count[PAGERT_DEVICE];
    for (uint32_t step = 0; step < count && !pager->flushing; step++) { /* a flush wants them clean */
        uint32_t frame = (pager->reclaim_cursor + step) % count, index = pager->frames[frame].page;
        if (index == NONE)
            continue;
        const page *p = &pager->pages[index];
        if (p->copy[PAGERT_DEVICE] == COPY_VALID && p->copy[PAGERT_FLASH] == COPY_VALID &&
            !has(p, PAGE_LEAVING) && !has(p, PAGE_IN_FLIGHT)) {
            pager->reclaim_cursor = (frame + 1) % count;
            return index;
        }
    }
    for (uint32_t list = 0; list < HOST_LISTS; list++)
        for (uint32_t index = pager->host_lists[list].oldest; index != NONE;
             index = pager->pages[index].links[LIST_HOST].younger)
            if (pager->pages[index].copy[PAGERT_FLASH] == COPY_VALID)
                return index;
    return NONE;
}

uint32_t lower_take_flash(pagert_pager *pager)
{
    if (!configured(pager, PAGERT_FLASH))
        return NONE;
    uint32_t frame = frame_set_take(&pager->sets[PAGERT_FLASH]);
    if (frame == NONE) {
        uint32_t index = find_spare_flash_copy(pager);
        if (index == NONE)
            return NONE;
        page_drop_lower(pager, index, PAGERT_FLASH);
        frame = frame_set_take(&pager->sets[PAGERT_FLASH]);
    }
    return frame;
}

void lower_end_leaving_host(pagert_pager *pager, uint32_t index)
{
    clear_flag(&pager->pages[index], PAGE_LEAVING_HOST);
    pager->host_leaving--;
}

/* Free a host frame, or start to: drop a copy that another tier has, else write the oldest to flash.
 * During a flush a copy that keeps a device page clean goes to flash rather than away. */
enum departure { DROPPED, STARTED, NO_VICTIM };
static enum departure start_departure(pagert_pager *pager)
{
    for (uint32_t list = 0; list < HOST_LISTS; list++) {
        bool may_drop = list == HOST_SHADOW && !pager->flushing;
        uint32_t index = pager->host_lists[list].oldest;
        if (list == HOST_ONLY && pager->policy->host_victim != NULL) {
            uint32_t best = pager->policy->host_victim(pager);
            if (best != NONE && pager->pages[best].queue == QUEUE_NONE)
                index = best;
        }
        while (index != NONE && !may_drop && pager->pages[index].queue != QUEUE_NONE)
            index = pager->pages[index].links[LIST_HOST].younger; /* it moves within the device now */
        if (index == NONE)
            continue;
        page *p = &pager->pages[index];
        if (may_drop || p->copy[PAGERT_FLASH] == COPY_VALID) {
            page_drop_lower(pager, index, PAGERT_HOST);
            page_advance(pager, index); /* a page on its way to the device starts again from flash */
            return DROPPED;
        }
        uint32_t frame = lower_take_flash(pager);
        if (frame == NONE)
            continue;
        p->frame[PAGERT_FLASH] = frame;
        p->copy[PAGERT_FLASH] = COPY_INCOMING;
        set_flag(p, PAGE_LEAVING_HOST);
        pager->host_leaving++;
        page_enqueue(pager, index, PAGERT_HOST_TO_FLASH);
        page_relist(pager, index);
        return STARTED;
    }
    return NO_VICTIM;
}

/* The first in line for a host frame will not get one: it fails, so that the others can go on. `cause`: the
 * transfer that was to free one, or NULL if the tiers are full. */
void lower_fail_waiter(pagert_pager *pager, const pagert_failure *cause)
{
    uint32_t index = pager->queues[QUEUE_HOST_WAIT].oldest;
    if (index == NONE)
        return;
    bool fetch = pager->pages[index].copy[PAGERT_DEVICE] == COPY_INCOMING;
    pagert_failure full = {index, fetch ? PAGERT_FLASH_TO_HOST : PAGERT_DEVICE_TO_HOST, PAGERT_E_FULL};
    const pagert_failure *failure = cause != NULL ? cause : &full;
    page_leave_queue(pager, index);
    if (fetch)
        fail_page(pager, index, failure, cause == NULL);
    else
        fail_writeback(pager, index, failure, cause == NULL);
}

/* Give host frames to those who wait. Called at the end of every call that may have changed something. */
void lower_grant_host(pagert_pager *pager)
{
    page_list *waiting = &pager->queues[QUEUE_HOST_WAIT];
    while (waiting->count > 0) {
        uint32_t frame = frame_set_take(&pager->sets[PAGERT_HOST]);
        if (frame != NONE) {
            uint32_t index = waiting->oldest;
            page *p = &pager->pages[index];
            page_leave_queue(pager, index);
            p->frame[PAGERT_HOST] = frame;
            p->copy[PAGERT_HOST] = COPY_INCOMING;
            page_advance(pager, index);
            continue;
        }
        enum departure departure = NO_VICTIM;
        if (pager->host_leaving < waiting->count)
            departure = start_departure(pager);
        if (departure != NO_VICTIM)
            continue;
        if (pager->host_leaving > 0 || pager->host_in_transfer > 0 || pager->move_in_transfer > 0)
            return; /* after those there may be a victim */
        lower_fail_waiter(pager, NULL);
    }
}
