/* SPDX-License-Identifier: Apache-2.0
 *
 * fail: what a failed transfer undoes. A page never loses its last copy: a failed writeback leaves it where
 * it is, dirty; a failed fetch leaves it on the tier below. Whoever counted on the frame is told.
 */
#include "internal.h"

static void mark_failed(pagert_pager *pager, uint32_t index, const pagert_failure *failure, bool full)
{
    page *p = &pager->pages[index];
    if (p->holds == 0)
        return; /* nobody waits for it */
    PAGERT_ASSERT(!has(p, PAGE_MOVING));
    set_flag(p, full ? PAGE_FAILED | PAGE_FULL : PAGE_FAILED);
    p->failed_link = failure->link & 15;
    p->error = failure->result;
    p->links[LIST_POLICY].older = failure->page;
    (void)pager;
}

/* The device frame will not get the page's bytes. */
void fail_page(pagert_pager *pager, uint32_t index, const pagert_failure *failure, bool full)
{
    page *p = &pager->pages[index];
    page_cancel_queued(pager, index);
    if (p->copy[PAGERT_DEVICE] == COPY_INCOMING)
        device_forget(pager, index);
    mark_failed(pager, index, failure, full);
    page_relist(pager, index);
}

/* `frame` keeps its page. Its heir gets nothing; if that was moving there, its own frame stays taken too,
 * and so on along the line. */
static void disinherit(pagert_pager *pager, uint32_t frame, const pagert_failure *failure, bool full)
{
    while (pager->frames[frame].heir != NONE) {
        uint32_t heir = pager->frames[frame].heir;
        if (!has(&pager->pages[heir], PAGE_MOVING)) {
            fail_page(pager, heir, failure, full);
            return;
        }
        device_cancel_move(pager, heir);
        mark_failed(pager, heir, failure, full);
        frame = pager->pages[heir].frame[PAGERT_DEVICE];
    }
}

/* The page stays on the device, dirty. */
void fail_writeback(pagert_pager *pager, uint32_t index, const pagert_failure *failure, bool full)
{
    page *p = &pager->pages[index];
    uint32_t frame = p->frame[PAGERT_DEVICE];
    for (uint32_t tier = PAGERT_HOST; tier < PAGERT_TIER_COUNT; tier++)
        if (p->copy[tier] == COPY_INCOMING)
            page_drop_lower(pager, index, tier);
    if (has(p, PAGE_CLEANING)) { /* somebody asked for this writeback by name */
        pager->flush_failed = true;
        pager->flush_full = full;
        pager->flush_failure = *failure;
    }
    if (has(p, PAGE_LEAVING) && pager->frames[frame].heir == NONE)
        pager->vacating--;
    clear_flag(p, PAGE_LEAVING | PAGE_CLEANING);
    page_relist(pager, index);
    disinherit(pager, frame, failure, full);
}

void fail_move(pagert_pager *pager, uint32_t index, const pagert_failure *failure)
{
    device_cancel_move(pager, index);
    mark_failed(pager, index, failure, false);
    disinherit(pager, pager->pages[index].frame[PAGERT_DEVICE], failure, false);
}
