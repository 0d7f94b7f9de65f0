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
void device_offer(pagert_core *core, uint32_t frame)
{
    core->vacating++;
    frame_runs_set(&core->runs, frame, true);
}

/* It no longer is, or somebody has the promise now. */
void device_withdraw(pagert_core *core, uint32_t frame)
{
    core->vacating--;
    frame_runs_set(&core->runs, frame, false);
}

static void use_frame(pagert_core *core, uint32_t frame)
{
    frame_set_add(&core->sets[PAGERT_DEVICE], frame);
    frame_runs_set(&core->runs, frame, false);
}

static void free_frame(pagert_core *core, uint32_t frame)
{
    frame_set_remove(&core->sets[PAGERT_DEVICE], frame);
    frame_runs_set(&core->runs, frame, true);
}

static void set_heir(pagert_core *core, uint32_t frame, uint32_t heir)
{
    device_frame *f = &core->frames[frame];
    PAGERT_ASSERT(f->heir == NONE);
    if (f->page == NONE)
        use_frame(core, frame);
    else if (has(&core->pages[f->page], PAGE_LEAVING))
        device_withdraw(core, frame);
    f->heir = heir;
}

static void clear_heir(pagert_core *core, uint32_t frame)
{
    device_frame *f = &core->frames[frame];
    PAGERT_ASSERT(f->heir != NONE);
    f->heir = NONE;
    if (f->page == NONE)
        free_frame(core, frame);
    else if (has(&core->pages[f->page], PAGE_LEAVING))
        device_offer(core, frame);
}

/* The page of `frame` is gone: the heir's turn. */
static void hand_over(pagert_core *core, uint32_t frame)
{
    device_frame *f = &core->frames[frame];
    uint32_t heir = f->heir;
    f->page = NONE;
    if (heir == NONE) {
        free_frame(core, frame);
        return;
    }
    if (!has(&core->pages[heir], PAGE_MOVING)) { /* a page in a move takes over when its bytes are there */
        f->page = heir;
        f->heir = NONE;
    }
    page_advance(core, heir);
}

/* Give `frame` to an absent page: at once if it is free, else as soon as its page is gone. */
void device_assign(pagert_core *core, uint32_t index, uint32_t frame, bool overwrite)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->copy[PAGERT_DEVICE] == COPY_NONE);
    p->frame[PAGERT_DEVICE] = frame;
    p->copy[PAGERT_DEVICE] = COPY_INCOMING;
    if (overwrite)
        set_flag(p, PAGE_OVERWRITE);
    if (p->holds > 0)
        core->held_frames++;
    set_heir(core, frame, index);
    if (core->frames[frame].page == NONE) {
        core->frames[frame].page = index;
        core->frames[frame].heir = NONE;
    }
    page_advance(core, index);
}

/* Drop the device copy, or the claim to one. The page must not be moving or in flight from its frame. */
void device_forget(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    uint32_t frame = p->frame[PAGERT_DEVICE];
    PAGERT_ASSERT(p->copy[PAGERT_DEVICE] != COPY_NONE && !has(p, PAGE_MOVING));
    p->copy[PAGERT_DEVICE] = COPY_NONE;
    if (p->holds > 0)
        core->held_frames--;
    if (core->frames[frame].page == index) {
        if (has(p, PAGE_LEAVING) && core->frames[frame].heir == NONE)
            device_withdraw(core, frame);
        clear_flag(p, PAGE_LEAVING | PAGE_CLEANING | PAGE_OVERWRITE);
        page_relist(core, index);
        hand_over(core, frame);
    } else {
        clear_flag(p, PAGE_OVERWRITE);
        clear_heir(core, frame);
        page_relist(core, index);
    }
}

/* Move a resident page to a frame that is free or will be. Its own frame may be promised before that. */
void device_start_move(pagert_core *core, uint32_t index, uint32_t target_frame)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(p->copy[PAGERT_DEVICE] == COPY_VALID && p->queue == QUEUE_NONE);
    PAGERT_ASSERT(!has(p, PAGE_MOVING | PAGE_LEAVING | PAGE_FAILED));
    clear_flag(p, PAGE_CLEANING);
    set_flag(p, PAGE_MOVING);
    core->moving++;
    p->move_frame = target_frame;
    set_heir(core, target_frame, index);
    page_relist(core, index);
    page_advance(core, index);
}

void device_finish_move(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    uint32_t source = p->frame[PAGERT_DEVICE], target = p->move_frame;
    PAGERT_ASSERT(core->frames[target].page == NONE && core->frames[target].heir == index);
    clear_flag(p, PAGE_MOVING);
    core->moving--;
    core->frames[target] = (device_frame){.page = index, .heir = NONE};
    p->frame[PAGERT_DEVICE] = target;
    hand_over(core, source);
    page_advance(core, index);
}

/* The page stays where it is. Not while the move is in flight. */
void device_cancel_move(pagert_core *core, uint32_t index)
{
    page *p = &core->pages[index];
    PAGERT_ASSERT(has(p, PAGE_MOVING) && (p->queue != PAGERT_MOVE || !has(p, PAGE_IN_FLIGHT)));
    if (p->queue == PAGERT_MOVE)
        page_leave_queue(core, index);
    clear_flag(p, PAGE_MOVING);
    core->moving--;
    clear_heir(core, p->move_frame);
    page_relist(core, index);
}
