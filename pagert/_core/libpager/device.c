/* SPDX-License-Identifier: Apache-2.0
 *
 * device: who has which device frame, and who gets it next.
 *
 * A frame is free (no page, no heir), owned (a page), promised (an heir that waits for the page to go), or
 * the empty target of a move (an heir only). Invariant: the frame set contains exactly the frames that have
 * a page or an heir; `vacating` counts frames whose page is leaving and that have no heir; these and the free ones
 * are the available ones of `runs`.
 */
#include "internal.h"

/* The page of a frame that nobody has the promise of is leaving. */
void device_offer(pagert_pager *pager, uint32_t frame)
{
    pager->vacating++;
    frame_runs_set(&pager->runs, frame, true);
}

/* It no longer is, or somebody has the promise now. */
void device_withdraw(pagert_pager *pager, uint32_t frame)
{
    pager->vacating--;
    frame_runs_set(&pager->runs, frame, false);
}

static void use_frame(pagert_pager *pager, uint32_t frame)
{
    frame_set_add(&pager->sets[PAGERT_DEVICE], frame);
    frame_runs_set(&pager->runs, frame, false);
}

static void free_frame(pagert_pager *pager, uint32_t frame)
{
    frame_set_remove(&pager->sets[PAGERT_DEVICE], frame);
    frame_runs_set(&pager->runs, frame, true);
}

static void set_heir(pagert_pager *pager, uint32_t frame, uint32_t heir)
{
    device_frame *f = &pager->frames[frame];
    PAGERT_ASSERT(f->heir == NONE);
    if (f->page == NONE)
        use_frame(pager, frame);
    else if (has(&pager->pages[f->page], PAGE_LEAVING))
        device_withdraw(pager, frame);
    f->heir = heir;
}

static void clear_heir(pagert_pager *pager, uint32_t frame)
{
    device_frame *f = &pager->frames[frame];
    PAGERT_ASSERT(f->heir != NONE);
    f->heir = NONE;
    if (f->page == NONE)
        free_frame(pager, frame);
    else if (has(&pager->pages[f->page], PAGE_LEAVING))
        device_offer(pager, frame);
}

/* The page of `frame` is gone: the heir's turn. */
static void hand_over(pagert_pager *pager, uint32_t frame)
{
    device_frame *f = &pager->frames[frame];
    uint32_t heir = f->heir;
    f->page = NONE;
    if (heir == NONE) {
        free_frame(pager, frame);
        return;
    }
    if (!has(&pager->pages[heir], PAGE_MOVING)) { /* a page in a move takes over when its bytes are there */
        f->page = heir;
        f->heir = NONE;
    }
    page_advance(pager, heir);
}

/* Give `frame` to an absent page: at once if it is free, else as soon as its page is gone. */
void device_assign(pagert_pager *pager, uint32_t index, uint32_t frame, bool overwrite)
{
    page *p = &pager->pages[index];
    PAGERT_ASSERT(p->copy[PAGERT_DEVICE] == COPY_NONE);
    p->frame[PAGERT_DEVICE] = frame;
    p->copy[PAGERT_DEVICE] = COPY_INCOMING;
    if (overwrite)
        set_flag(p, PAGE_OVERWRITE);
    if (p->holds > 0)
        pager->held_frames++;
    set_heir(pager, frame, index);
    if (pager->frames[frame].page == NONE) {
        pager->frames[frame].page = index;
        pager->frames[frame].heir = NONE;
    }
    page_advance(pager, index);
}

/* Drop the device copy, or the claim to one. The page must not be moving or in flight from its frame. */
void device_forget(pagert_pager *pager, uint32_t index)
{
    page *p = &pager->pages[index];
    uint32_t frame = p->frame[PAGERT_DEVICE];
    PAGERT_ASSERT(p->copy[PAGERT_DEVICE] != COPY_NONE && !has(p, PAGE_MOVING));
    p->copy[PAGERT_DEVICE] = COPY_NONE;
    if (p->holds > 0)
        pager->held_frames--;
    if (pager->frames[frame].page == index) {
        if (has(p, PAGE_LEAVING) && pager->frames[frame].heir == NONE)
            device_withdraw(pager, frame);
        clear_flag(p, PAGE_LEAVING | PAGE_CLEANING | PAGE_OVERWRITE);
        page_relist(pager, index);
        hand_over(pager, frame);
    } else {
        clear_flag(p, PAGE_OVERWRITE);
        clear_heir(pager, frame);
        page_relist(pager, index);
    }
}

/* Move a resident page to a frame that is free or will be. Its own frame may be promised before that. */
void device_start_move(pagert_pager *pager, uint32_t index, uint32_t target_frame)
{
    page *p = &pager->pages[index];
    PAGERT_ASSERT(p->copy[PAGERT_DEVICE] == COPY_VALID && p->queue == QUEUE_NONE);
    PAGERT_ASSERT(!has(p, PAGE_MOVING | PAGE_LEAVING | PAGE_FAILED));
    clear_flag(p, PAGE_CLEANING);
    set_flag(p, PAGE_MOVING);
    pager->moving++;
    p->move_frame = target_frame;
    set_heir(pager, target_frame, index);
    page_relist(pager, index);
    page_advance(pager, index);
}

void device_finish_move(pagert_pager *pager, uint32_t index)
{
    page *p = &pager->pages[index];
    uint32_t source = p->frame[PAGERT_DEVICE], target = p->move_frame;
    PAGERT_ASSERT(pager->frames[target].page == NONE && pager->frames[target].heir == index);
    clear_flag(p, PAGE_MOVING);
    pager->moving--;
    pager->frames[target] = (device_frame){.page = index, .heir = NONE};
    p->frame[PAGERT_DEVICE] = target;
    hand_over(pager, source);
    page_advance(pager, index);
}

/* The page stays where it is. Not while the move is in flight. */
void device_cancel_move(pagert_pager *pager, uint32_t index)
{
    page *p = &pager->pages[index];
    PAGERT_ASSERT(has(p, PAGE_MOVING) && (p->queue != PAGERT_MOVE || !has(p, PAGE_IN_FLIGHT)));
    if (p->queue == PAGERT_MOVE)
        page_leave_queue(pager, index);
    clear_flag(p, PAGE_MOVING);
    pager->moving--;
    clear_heir(pager, p->move_frame);
    page_relist(pager, index);
}
