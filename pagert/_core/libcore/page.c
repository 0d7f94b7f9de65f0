/* SPDX-License-Identifier: Apache-2.0
 *
 * page: what one page does next.
 *
 * page_advance() looks at a page that no transfer touches and puts it into the queue of the next transfer
 * it needs, if that one may start. It is called whenever something changed for the page: a frame was
 * assigned or handed over, a transfer completed, a flag was set. All state changes of a page pass through
 * here, device.c, lower.c, fail.c or pagert_complete().
 */
#include "list.h"

static bool uses_host_copy(uint32_t queue)
{
    return queue == PAGERT_HOST_TO_DEVICE || queue == PAGERT_FLASH_TO_HOST ||
           queue == PAGERT_DEVICE_TO_HOST || queue == PAGERT_HOST_TO_FLASH;
}

void page_enqueue(pagert_core *core, uint32_t index, uint32_t queue)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->queue == QUEUE_NONE && !has(p, PAGE_IN_FLIGHT));
    p->queue = queue & 15;
    list_append(core, &core->queues[queue], LIST_QUEUE, index);
    core->host_in_transfer += uses_host_copy(queue);
    core->move_in_transfer += queue == PAGERT_MOVE;
}

/* Its transfer is handed out: `queue` goes on to say which, the list forgets it. */
void page_take_off(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->queue < PAGERT_LINK_COUNT && !has(p, PAGE_IN_FLIGHT));
    list_remove(core, &core->queues[p->queue], LIST_QUEUE, index);
    set_flag(p, PAGE_IN_FLIGHT);
}

/* Out of its queue: the transfer is done, or it was never handed out. */
void page_leave_queue(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->queue != QUEUE_NONE);
    if (!has(p, PAGE_IN_FLIGHT))
        list_remove(core, &core->queues[p->queue], LIST_QUEUE, index);
    clear_flag(p, PAGE_IN_FLIGHT);
    core->host_in_transfer -= uses_host_copy(p->queue);
    core->move_in_transfer -= p->queue == PAGERT_MOVE;
    p->queue = QUEUE_NONE;
}

/* Tell the policy and the host lists what the page is now. */
void page_relist(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    bool evictable = p->copy[PAGERT_DEVICE] == COPY_VALID && p->holds == 0 &&
                     !has(p, PAGE_LEAVING | PAGE_MOVING | PAGE_DYING);
    if (evictable != has(p, PAGE_EVICTABLE)) {
        if (evictable) {
            set_flag(p, PAGE_EVICTABLE);
            core->policy->insert(core, index);
        } else {
            clear_flag(p, PAGE_EVICTABLE);
            core->policy->remove(core, index);
        }
    }
    uint32_t list = 0; /* 1 + the host list it belongs on */
    if (p->copy[PAGERT_HOST] == COPY_VALID && !uses_host_copy(p->queue) &&
        !has(p, PAGE_LEAVING_HOST | PAGE_DYING)) {
        if (p->copy[PAGERT_DEVICE] == COPY_VALID)
            list = 1 + HOST_SHADOW;
        else if (p->copy[PAGERT_DEVICE] == COPY_INCOMING && !has(p, PAGE_OVERWRITE))
            list = 1 + HOST_SOURCE;
        else
            list = 1 + HOST_ONLY;
    }
    uint32_t listed = (p->flags & PAGE_HOST_LIST) >> PAGE_HOST_LIST_SHIFT;
    if (list != listed) {
        if (listed == 1 + HOST_ONLY)
            TELL(core, host_remove, core, index);
        if (list == 1 + HOST_ONLY)
            TELL(core, host_insert, core, index);
        if (listed != 0)
            list_remove(core, &core->host_lists[listed - 1], LIST_HOST, index);
        if (list != 0)
            list_append(core, &core->host_lists[list - 1], LIST_HOST, index);
        clear_flag(p, PAGE_HOST_LIST);
        set_flag(p, list << PAGE_HOST_LIST_SHIFT);
    }
    TELL(core, changed, core, index);
}

/* The device frame is promised or owned: bring the bytes one stage nearer. */
static void advance_fetch(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    bool owned = device_owns(core, index);
    if (has(p, PAGE_OVERWRITE))
        return;
    if (p->copy[PAGERT_HOST] == COPY_VALID) {
        if (owned)
            page_enqueue(core, index, PAGERT_HOST_TO_DEVICE);
    } else if (p->copy[PAGERT_FLASH] == COPY_VALID) {
        if (configured(core, PAGERT_HOST)) /* need not wait for the device frame */
            page_enqueue(core, index,
                         p->copy[PAGERT_HOST] == COPY_INCOMING ? PAGERT_FLASH_TO_HOST : QUEUE_HOST_WAIT);
        else if (owned)
            page_enqueue(core, index, PAGERT_FLASH_TO_DEVICE);
    } else {
        PAGERT_ASSERT(has(p, PAGE_ZERO));
        if (owned)
            page_enqueue(core, index, PAGERT_FILL);
    }
}

/* The device copy is the newest and a copy below is wanted. */
static void advance_writeback(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    if (is_clean(p)) {
        clear_flag(p, PAGE_CLEANING);
        if (has(p, PAGE_LEAVING)) {
            core->counters.evictions++;
            device_forget(core, index);
        }
    } else if (configured(core, PAGERT_HOST)) {
        page_enqueue(core, index,
                     p->copy[PAGERT_HOST] == COPY_INCOMING ? PAGERT_DEVICE_TO_HOST : QUEUE_HOST_WAIT);
    } else {
        if (p->copy[PAGERT_FLASH] == COPY_NONE) {
            uint32_t frame = lower_take_flash(core);
            if (frame == NONE) {
                pagert_failure failure = {index, PAGERT_DEVICE_TO_FLASH, PAGERT_E_FULL};
                fail_writeback(core, index, &failure, true);
                return;
            }
            p->frame[PAGERT_FLASH] = frame;
            p->copy[PAGERT_FLASH] = COPY_INCOMING;
        }
        page_enqueue(core, index, PAGERT_DEVICE_TO_FLASH);
    }
}

void page_advance(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(has(p, PAGE_LIVE));
    if (p->queue == QUEUE_NONE && !has(p, PAGE_DYING)) {
        if (has(p, PAGE_MOVING)) {
            if (core->frames[p->move_frame].page == NONE)
                page_enqueue(core, index, PAGERT_MOVE);
        } else if (p->copy[PAGERT_DEVICE] == COPY_INCOMING) {
            advance_fetch(core, index);
        } else if (p->copy[PAGERT_DEVICE] == COPY_VALID && has(p, PAGE_LEAVING | PAGE_CLEANING)) {
            advance_writeback(core, index);
        }
    }
    page_relist(core, index);
}

/* Evict an unheld resident page: at once if it is clean, else as soon as it is written back. */
void page_start_leaving(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->copy[PAGERT_DEVICE] == COPY_VALID && p->holds == 0);
    PAGERT_ASSERT(!has(p, PAGE_LEAVING | PAGE_MOVING));
    PAGERT_ASSERT(core->frames[p->frame[PAGERT_DEVICE]].heir == NONE);
    set_flag(p, PAGE_LEAVING);
    device_offer(core, p->frame[PAGERT_DEVICE]);
    page_relist(core, index);
    if (is_clean(p)) { /* also while its host copy goes to flash: that needs nothing from here */
        core->counters.evictions++;
        device_forget(core, index);
    } else {
        core->last_vacated = p->frame[PAGERT_DEVICE];
        page_advance(core, index);
    }
}

/* Take back a page that is leaving, because it is needed again. False if its frame is promised. */
bool page_stay(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(has(p, PAGE_LEAVING));
    if (core->frames[p->frame[PAGERT_DEVICE]].heir != NONE)
        return false;
    clear_flag(p, PAGE_LEAVING);
    device_withdraw(core, p->frame[PAGERT_DEVICE]);
    page_cancel_queued(core, index); /* in flight it goes on, and leaves the page clean */
    page_relist(core, index);
    return true;
}

/* Give up a lower tier's frame, whether its bytes are there or not. */
void page_drop_lower(pagert_core *core, uint32_t index, uint32_t tier)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(tier != PAGERT_DEVICE && p->copy[tier] != COPY_NONE);
    frame_set_remove(&core->sets[tier], p->frame[tier]);
    bool was_clean = is_clean(p);
    p->copy[tier] = COPY_NONE;
    if (was_clean && !is_clean(p) && p->copy[PAGERT_DEVICE] == COPY_VALID && !has(p, PAGE_DYING))
        TELL(core, copy_lost, core, index);
    page_relist(core, index);
}

/* Withdraw a transfer that was not handed out yet, with the frame it was meant for, if that is on a lower
 * tier. True if the page stands in no queue now; false if its transfer is in flight. */
bool page_cancel_queued(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    if (p->queue == QUEUE_NONE)
        return true;
    if (has(p, PAGE_IN_FLIGHT))
        return false;
    if (p->queue == PAGERT_MOVE) {
        device_cancel_move(core, index);
        return true;
    }
    page_leave_queue(core, index);
    if (has(p, PAGE_LEAVING_HOST))
        lower_end_leaving_host(core, index);
    clear_flag(p, PAGE_CLEANING);
    for (uint32_t tier = PAGERT_HOST; tier < PAGERT_TIER_COUNT; tier++)
        if (p->copy[tier] == COPY_INCOMING)
            page_drop_lower(core, index, tier);
    page_relist(core, index);
    return true;
}

/* A pin that writes is granted: the device copy becomes the only one. */
void page_commit_write(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    bool idle = page_cancel_queued(core, index);
    PAGERT_ASSERT(idle && p->holds > 0 && p->copy[PAGERT_DEVICE] != COPY_NONE);
    p->copy[PAGERT_DEVICE] = COPY_VALID;
    clear_flag(p, PAGE_ZERO | PAGE_OVERWRITE | PAGE_CLEANING);
    TELL(core, written, core, index);
    for (uint32_t tier = PAGERT_HOST; tier < PAGERT_TIER_COUNT; tier++)
        if (p->copy[tier] != COPY_NONE)
            page_drop_lower(core, index, tier);
    page_relist(core, index);
}

/* The region is released: forget the page, now or when its transfer comes back. */
void page_purge(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->holds == 0);
    set_flag(p, PAGE_DYING);
    page_relist(core, index);
    if (has(p, PAGE_IN_FLIGHT))
        return;
    page_cancel_queued(core, index);
    if (has(p, PAGE_MOVING))
        device_cancel_move(core, index);
    if (p->copy[PAGERT_DEVICE] != COPY_NONE)
        device_forget(core, index);
    if (has(p, PAGE_LEAVING_HOST))
        lower_end_leaving_host(core, index);
    for (uint32_t tier = PAGERT_HOST; tier < PAGERT_TIER_COUNT; tier++)
        if (p->copy[tier] != COPY_NONE)
            page_drop_lower(core, index, tier);
    p->flags = 0;
    if (core->flush_failed.page == index)
        core->flush_failed.page = NONE; /* nobody is left to be told */
}
