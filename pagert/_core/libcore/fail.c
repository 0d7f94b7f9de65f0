/* SPDX-License-Identifier: Apache-2.0
 *
 * fail: what a failed transfer undoes. A page never loses its last copy: a failed writeback leaves it where
 * it is, dirty; a failed fetch leaves it on the tier below. Whoever counted on the frame is told.
 */
#include "internal.h"

/* Tell the pins that hold the page, if any do. */
static bool mark_failed(pagert_core *core, uint32_t index, const pagert_failure *failure, bool full)
{
    page *p = &core->pages[index];
    if (p->holds == 0)
        return false;
    PAGERT_ASSERT(!has(p, PAGE_MOVING));
    set_flag(p, full ? PAGE_FAILED | PAGE_FULL : PAGE_FAILED);
    p->failed_link = failure->link & 15;
    p->error = failure->result;
    p->failed_page = failure->page;
    return true;
}

/* The device frame will not get the page's bytes. True if that was told to a pin. */
bool fail_page(pagert_core *core, uint32_t index, const pagert_failure *failure, bool full)
{
    page *p = &core->pages[index];
    page_cancel_queued(core, index);
    if (p->copy[PAGERT_DEVICE] == COPY_INCOMING)
        device_forget(core, index);
    bool told = mark_failed(core, index, failure, full);
    page_relist(core, index);
    return told;
}

/* `frame` keeps its page. Its heir gets nothing; if that was moving there, its own frame stays taken too,
 * and so on along the line. `told`: whether a pin was told already; if none was, who waits for room is. */
static void disinherit(pagert_core *core, uint32_t frame, const pagert_failure *failure, bool full,
                       bool told)
{
    while (core->frames[frame].heir != NONE) {
        uint32_t heir = core->frames[frame].heir;
        if (!has(&core->pages[heir], PAGE_MOVING)) {
            told |= fail_page(core, heir, failure, full);
            break;
        }
        device_cancel_move(core, heir);
        told |= mark_failed(core, heir, failure, full);
        frame = core->pages[heir].frame[PAGERT_DEVICE];
    }
    if (!told)
        pin_fail_waiters(core, failure, full);
}

/* The page stays on the device, dirty. */
void fail_writeback(pagert_core *core, uint32_t index, const pagert_failure *failure, bool full)
{
    page *p = &core->pages[index];
    uint32_t frame = p->frame[PAGERT_DEVICE];
    for (uint32_t tier = PAGERT_HOST; tier < PAGERT_TIER_COUNT; tier++)
        if (p->copy[tier] == COPY_INCOMING)
            page_drop_lower(core, index, tier);
    if (has(p, PAGE_CLEANING) && !has(p, PAGE_LEAVING) && !core->flushing)
        core->write_ahead_failed = true;
    else if (has(p, PAGE_CLEANING)) /* somebody asked for this writeback by name */
        core->flush_failed = (failed_writeback){.page = index, .full = full, .failure = *failure};
    bool leaving = has(p, PAGE_LEAVING);
    if (leaving && core->frames[frame].heir == NONE)
        device_withdraw(core, frame);
    clear_flag(p, PAGE_LEAVING | PAGE_CLEANING);
    page_relist(core, index);
    if (leaving)
        disinherit(core, frame, failure, full, false);
}

void fail_move(pagert_core *core, uint32_t index, const pagert_failure *failure)
{
    device_cancel_move(core, index);
    bool told = mark_failed(core, index, failure, false);
    disinherit(core, core->pages[index].frame[PAGERT_DEVICE], failure, false, told);
}
