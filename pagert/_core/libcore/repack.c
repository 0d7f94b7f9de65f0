/* SPDX-License-Identifier: Apache-2.0
 *
 * repack: make room for all windows of one pin together, when placing them one by one got stuck because a
 * window that the pin itself needs lay in the way.
 *
 * It works in rounds, each from a quiet state. A layout is computed afresh: spans, largest first, into the
 * gaps between windows that other pins hold. It depends on sizes and held windows only, so that it is the
 * same in each round, and each round brings at least one page nearer to it. Fragmentation alone therefore
 * never makes a pin fail.
 *
 * Nobody is evicted for it while a frame is free, except as the policy says. Pages in the way go to free frames
 * outside the layout. Where all those are inside, meant for pages that are still to be fetched, what is in the
 * way of a resident page of the pin goes there for a while: when that page has moved in, its own frame outside
 * is free.
 */
#include "internal.h"

static bool is_span(const pagert_access *access) { return access->span_count > 0; }

static bool in_span(const pagert_access *access, uint32_t index)
{
    return index - access->span_first < access->span_count;
}

/* The end of a laid span that covers a frame of [base, base + count), or 0. */
static uint32_t laid_end(const pagert_pin *pin, uint32_t base, uint32_t count)
{
    for (uint32_t i = 0; i < pin->access_count; i++) {
        const pagert_access *a = &pin->accesses[i];
        if (is_span(a) && a->base_frame != NONE && a->base_frame < base + count &&
            base < a->base_frame + a->span_count)
            return a->base_frame + a->span_count;
    }
    return 0;
}

/* The frame after the last held frame of [base, base + count) that does not hold the span's own page at
 * its place, or 0 if the run can be cleared. */
static uint32_t held_end(const pagert_core *core, const pagert_access *access, uint32_t base)
{
    for (uint32_t i = access->span_count; i-- > 0;) {
        const device_frame *f = &core->frames[base + i];
        uint32_t owner = f->heir != NONE ? f->heir : f->page;
        if (owner != NONE && core->pages[owner].holds > 0 && owner != access->span_first + i)
            return base + i + 1;
    }
    return 0;
}

/* Pages of the span that other pins hold force it to lie around them; NONE if none does. False: they lie in
 * different windows, so that no place exists. */
static bool find_forced_base(const pagert_core *core, const pagert_access *access, uint32_t *base)
{
    *base = NONE;
    for (uint32_t i = 0; i < access->span_count; i++) {
        const page *p = &core->pages[access->span_first + i];
        if (p->holds == 0 || p->copy[PAGERT_DEVICE] == COPY_NONE)
            continue;
        uint32_t frame = has(p, PAGE_MOVING) ? p->move_frame : p->frame[PAGERT_DEVICE];
        if (frame < i || (*base != NONE && *base != frame - i))
            return false;
        *base = frame - i;
    }
    return true;
}

static bool lay(const pagert_core *core, const pagert_pin *pin, pagert_access *access)
{
    uint32_t frame_count = core->config.frame_count[PAGERT_DEVICE];
    uint32_t forced;
    if (!find_forced_base(core, access, &forced))
        return false;
    for (uint32_t base = forced != NONE ? forced : 0; (uint64_t)base + access->span_count <= frame_count;) {
        uint32_t next = held_end(core, access, base);
        if (next == 0)
            next = laid_end(pin, base, access->span_count);
        if (next == 0) {
            access->base_frame = base;
            return true;
        }
        if (forced != NONE)
            return false;
        base = next;
    }
    return false;
}

/* Spans that others force come first, then the largest; of equals the first. */
static bool lay_all(const pagert_core *core, pagert_pin *pin)
{
    for (uint32_t i = 0; i < pin->access_count; i++)
        pin->accesses[i].base_frame = NONE;
    for (;;) {
        pagert_access *next = NULL;
        bool next_forced = false;
        for (uint32_t i = 0; i < pin->access_count; i++) {
            pagert_access *a = &pin->accesses[i];
            if (!is_span(a) || a->base_frame != NONE)
                continue;
            uint32_t base;
            bool forced = !find_forced_base(core, a, &base) || base != NONE;
            if (next == NULL || (forced && !next_forced) ||
                (forced == next_forced && a->span_count > next->span_count)) {
                next = a;
                next_forced = forced;
            }
        }
        if (next == NULL)
            return true;
        if (!lay(core, pin, next))
            return false;
    }
}

/* Whether each span has a place that other pins leave it, the pin's other spans aside. */
bool repack_fits_alone(const pagert_core *core, pagert_pin *pin)
{
    for (uint32_t i = 0; i < pin->access_count; i++)
        pin->accesses[i].base_frame = NONE;
    for (uint32_t i = 0; i < pin->access_count; i++) {
        pagert_access *a = &pin->accesses[i];
        if (is_span(a) && !lay(core, pin, a))
            return false;
        a->base_frame = NONE;
    }
    return true;
}

static bool in_any_span(const pagert_pin *pin, uint32_t index)
{
    for (uint32_t i = 0; i < pin->access_count; i++)
        if (in_span(&pin->accesses[i], index))
            return true;
    return false;
}

/* A free frame that no span of the layout covers. */
static uint32_t spare_frame(const pagert_core *core, const pagert_pin *pin)
{
    uint32_t frame = 0;
    while ((frame = frame_set_next_free(&core->sets[PAGERT_DEVICE], frame)) != NONE) {
        uint32_t end = laid_end(pin, frame, 1);
        if (end == 0)
            return frame;
        frame = end;
        if (frame >= core->config.frame_count[PAGERT_DEVICE])
            return NONE;
    }
    return NONE;
}

/* The next free frame of the layout whose page is absent, after `*k`, `*i`. */
static uint32_t idle_target(const pagert_core *core, const pagert_pin *pin, uint32_t *k, uint32_t *i)
{
    for (; *k < pin->access_count; (*k)++, *i = 0) {
        const pagert_access *a = &pin->accesses[*k];
        for (; *i < a->span_count; (*i)++) {
            uint32_t target = a->base_frame + *i;
            if (core->pages[a->span_first + *i].copy[PAGERT_DEVICE] == COPY_NONE &&
                core->frames[target].page == NONE && core->frames[target].heir == NONE)
                return target;
        }
    }
    return NONE;
}

typedef struct round {
    uint32_t started;
    uint32_t stuck;           /* a page of the pin whose place is taken by another of its pages */
    uint32_t in_way;          /* somebody else's page that found no frame to go to */
    uint32_t cursor_k, cursor_i;
} round;

/* The i-th page of the access, or what lies in its place: bring it nearer to the layout. */
static void rearrange(pagert_core *core, const pagert_pin *pin, const pagert_access *a, uint32_t i, round *r)
{
    uint32_t index = a->span_first + i, target = a->base_frame + i;
    const page *p = &core->pages[index];
    const device_frame *f = &core->frames[target];
    bool resident = p->copy[PAGERT_DEVICE] == COPY_VALID && !has(p, PAGE_MOVING);
    if (f->page == index || f->heir != NONE)
        return;
    if (f->page != NONE && !in_any_span(pin, f->page)) {
        uint32_t frame = spare_frame(core, pin);
        if (frame == NONE && resident)
            frame = idle_target(core, pin, &r->cursor_k, &r->cursor_i);
        if (frame == NONE) {
            r->in_way = f->page;
            return;
        }
        device_start_move(core, f->page, frame);
        r->started++;
    } else if (resident && f->page == NONE) {
        device_start_move(core, index, target);
        r->started++;
    } else if (resident) {
        r->stuck = index;
    } else if (f->page != NONE) {
        r->stuck = f->page; /* a page of the pin in the place of an absent one: its own is taken */
    }
}

/* One round. PLACE_DONE: the layout stands, all windows are promised and no page is held yet. PLACE_BUSY:
 * moves or evictions were started, call again when quiet. PLACE_BLOCKED: no layout exists. */
int repack_round(pagert_core *core, pagert_pin *pin)
{
    if (!lay_all(core, pin))
        return PLACE_BLOCKED;
    round r = {.stuck = NONE, .in_way = NONE};
    for (uint32_t k = 0; k < pin->access_count; k++)
        for (uint32_t i = 0; i < pin->accesses[k].span_count; i++)
            rearrange(core, pin, &pin->accesses[k], i, &r);
    if (r.started == 0 && (r.in_way != NONE || r.stuck != NONE)) {
        /* No frame is free, or the pin's own pages stand in a circle: break it at one. */
        uint32_t index = r.in_way != NONE ? r.in_way : r.stuck;
        TELL(core, sent_away, core, index);
        page_start_leaving(core, index);
        r.started++;
    }
    if (r.started > 0)
        return PLACE_BUSY;
    for (uint32_t k = 0; k < pin->access_count; k++) {
        const pagert_access *a = &pin->accesses[k];
        for (uint32_t i = 0; i < a->span_count; i++) {
            uint32_t index = a->span_first + i;
            if (core->pages[index].copy[PAGERT_DEVICE] == COPY_NONE)
                device_assign(core, index, a->base_frame + i, pin_overwrites(core, pin, index));
        }
    }
    return PLACE_DONE;
}
